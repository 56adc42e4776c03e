"""Running what is not done of a study: each run a process of its own, resumed if it was left. Imports no torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ds_vcycle.config import UserError
from ds_vcycle.cycle.stopping import read_status, stop_signals
from ds_vcycle.rundir import RunDirError, recorded_config
from ds_vcycle.study.definition import Study, Task

Outcome = Literal["finished", "failed", "stopped", "left"]
_GRACE_SECONDS = 120.0  # for a run that was told to stop to finish its step and save
_POLL_SECONDS = 0.2


class StudyError(UserError):
    """A study cannot go on."""


@dataclass(kw_only=True, slots=True)
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    log: Path
    begun: float


def is_done(task: Task) -> bool:
    """Whether the run's directory holds it, finished.

    Raises:
        StudyError: the directory holds a run of other settings.
    """
    directory = task.config.run_dir
    try:
        recorded = recorded_config(directory)
    except RunDirError:
        return False
    if recorded.model_dump(mode="json") != task.config.model_dump(mode="json"):
        raise StudyError(
            f"{directory} holds a run of other settings than {task.name} has now; remove it, or give the study "
            "another out"
        )
    return read_status(directory) == "finished"


def run_tasks(study: Study, tasks: Sequence[Task]) -> dict[str, Outcome]:
    """Run what is not done, in order, ``study.at_once`` at a time, within the budget.

    A failed run is named and the others go on. Ctrl-C or SIGTERM stops the runs under way with their states saved.

    Returns:
        How each run ended, by its name; ``left``: it was not begun.

    Raises:
        StudyError: a run directory holds other settings.
    """
    waiting = [task for task in tasks if not is_done(task)]
    outcomes: dict[str, Outcome] = {task.name: "left" if task in waiting else "finished" for task in tasks}
    if len(waiting) < len(tasks):
        _say(f"{len(tasks) - len(waiting)} of {len(tasks)} runs are done already")
    until = time.monotonic() + 60 * study.budget_minutes
    running: list[_Running] = []
    stopping = False
    with stop_signals() as asked:
        while running or (waiting and not stopping):
            if not stopping and (asked or time.monotonic() >= until):
                stopping = True
                why = "asked to stop" if asked else f"the budget of {study.budget_minutes:g} minutes is spent"
                _say(f"{why}: {len(waiting)} runs are not begun; the same command goes on")
                _stop(running)
            while waiting and not stopping and len(running) < study.at_once:
                running.append(_start(study, waiting.pop(0)))
            time.sleep(_POLL_SECONDS)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                outcomes[run.task.name] = _ended(run, stopping=stopping)
    return outcomes


def _start(study: Study, task: Task) -> _Running:
    directory = task.config.run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "output.log"
        _say(f"{task.name}: begun, {directory}")
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*_command(study), "train", *task.arguments, "--resume", "auto"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=_environment(study, os.environ), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise StudyError(f"{directory} cannot be written ({error.strerror}); give the study another out") from error
    return _Running(task=task, process=process, log=log, begun=time.monotonic())


def _command(study: Study) -> list[str]:
    if study.ranks == 1:
        return [sys.executable, "-m", "ds_vcycle"]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(study.ranks)]
    return [*launcher, "--master_port", str(_free_port()), "--module", "ds_vcycle"]


def _environment(study: Study, given: Mapping[str, str]) -> dict[str, str]:
    """The runs share the cores evenly, unless the user has said how many threads a process may have."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // (study.ranks * study.at_once))
    return {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", **given}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(running: Sequence[_Running]) -> None:
    """Ask the runs to save and end; their ranks notice at the next step. What does not end in time is killed.

    The launcher ends at once and leaves its ranks to save, so they are waited for as well.
    """
    processes: list[psutil.Process] = []
    for run in running:
        with suppress(psutil.Error):
            process = psutil.Process(run.process.pid)
            processes += [process, *process.children(recursive=True)]
        run.process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_SECONDS)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()


def _ended(run: _Running, *, stopping: bool) -> Outcome:
    status = read_status(run.task.config.run_dir)
    took = f"after {(time.monotonic() - run.begun) / 60:.1f} minutes"
    if status == "finished":
        _say(f"{run.task.name}: finished {took}")
        return "finished"
    if status == "stopped" or stopping:  # told to stop before it had begun, it has no status yet
        _say(f"{run.task.name}: stopped {took}; what it had saved is there")
        return "stopped"
    last = _telling(run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines())
    _say(f"{run.task.name}: failed {took} (exit code {run.process.returncode}), see {run.log}")
    for line in last:
        _say(f"  {line}")
    return "failed"


def _telling(lines: Sequence[str]) -> list[str]:
    """What of a log says why it ended: a launcher buries its ranks' words under its own."""
    errors = [line for line in lines if "error: " in line or "Error: " in line]
    return list(dict.fromkeys(errors))[-3:] or list(lines[-3:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
