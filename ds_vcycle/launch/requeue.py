"""What becomes of a job whose ranks have ended: done, queued again, or failed. Imports no torch.

A run that was stopped, or whose ranks were killed from outside, is queued again; one that failed by itself would fail
again, so it is not, and neither is one whose last requeues brought no new checkpoint.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.retention import find_latest
from ds_vcycle.config import UserError
from ds_vcycle.cycle.journal import append_event
from ds_vcycle.cycle.requeues import read_requeues, write_requeues
from ds_vcycle.cycle.stopping import EXIT_LOST, EXIT_STOPPED, read_status

Verdict = Literal["finished", "again", "failed"]
_KILLED = 128  # exit codes above: by a signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the ranks of a job ended.

    ``status``: of status.json if this job wrote it; ``code``: the launcher's exit code; ``asked``: the job was told to
    make room.
    """

    status: str | None
    code: int
    asked: bool


def verdict(ended: Ended) -> Verdict:
    """What becomes of the run.

    Exit code 2 is an error of the configuration, whatever another run in the same directory says. A launcher may hide
    exit codes, so a run that says ``running`` to the end was killed.
    """
    if ended.status == "finished" or (ended.status is None and ended.code == 0):
        return "finished"
    if ended.status == "failed" or ended.code == 2:
        return "failed"
    if ended.status in ("stopped", "running") or ended.asked or ended.code in (EXIT_STOPPED, EXIT_LOST):
        return "again"
    return "again" if ended.code > _KILLED else "failed"


def read_ended(run_dir: Path, *, code: int, since: float, asked: bool) -> Ended:
    """How the ranks of a job ended that began at ``since`` (seconds of the epoch); older files are of another."""
    path = run_dir / "status.json"
    of_this_job = path.is_file() and path.stat().st_mtime >= since
    return Ended(status=read_status(run_dir) if of_this_job else None, code=code, asked=asked)


def requeue(run_dir: Path, ended: Ended, *, max_idle: int, env: Mapping[str, str] = os.environ) -> int:
    """Queue the job again if it is to be; says what it did. Returns the script's exit code.

    Raises:
        UserError: ``scontrol requeue`` refuses.
    """
    found = verdict(ended)
    if found == "finished":
        return 0
    if found == "failed":
        print(f"{run_dir}: failed (exit code {ended.code}); not queued again, it would fail again")
        return ended.code or 1
    job = env.get("SLURM_JOB_ID")
    if job is None:
        print(f"{run_dir}: not finished; the same command goes on")
        return EXIT_STOPPED
    requeues = read_requeues(run_dir).once_more(job, _latest(run_dir))
    if requeues.idle >= max_idle:
        why = f"{requeues.idle} requeues in a row brought no new checkpoint"
        append_event(run_dir, "gave_up", job=job, reason=why)
        print(f"{run_dir}: {why}; not queued again. Give it more time, or set saving.every_steps lower")
        return 1
    write_requeues(run_dir, requeues)
    append_event(run_dir, "requeued", job=job, count=requeues.count, idle=requeues.idle, checkpoint=requeues.checkpoint)
    print(f"{run_dir}: job {job} is queued again (for the {requeues.count}. time)", flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"scontrol requeue {job}: {done.stderr.strip()}; go on with sbatch {run_dir}/launch/vcycle.sbatch"
        )
    return EXIT_STOPPED


def _latest(run_dir: Path) -> str | None:
    try:
        found = find_latest(run_dir / "checkpoints")
    except CheckpointError:
        return None
    return found.name if found else None
