"""Asked to stop: signals or a file set a flag, ranks agree on it between steps, and status.json says how a run ended.

The launcher signals ranks one after another and hides their exit codes, so nothing is saved inside a handler, and
``status.json`` is what other programs should read. The ``deepspeed`` command itself forwards no signal: it dies and
leaves the ranks behind, so a rank whose launcher has gone takes that as a request to stop.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from ds_vcycle.cycle.json_files import read_json, replace_json

Status = Literal["running", "stopped", "finished", "failed"]
STOP_NAME = "stop"
EXIT_STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, start again with --resume
EXIT_LOST = 76  # another rank has gone or hangs
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LAUNCHERS = {"deepspeed", "ds", "deepspeed.launcher.launch", "deepspeed.launcher.runner"}  # what they are started as


class Stopped(Exception):  # noqa: N818 - an outcome, not an error
    """The run was asked to stop and has saved its state."""


class StopFlag:
    """Whether this rank is asked to stop: SIGTERM, SIGUSR1 or Ctrl-C, its launcher has gone, or a file is there.

    The file, RUN/stop, is for launchers that pass no signal on; rank 0 looks for it once a second at most.
    """

    def __init__(self) -> None:
        self._signal: str | None = None
        self._file: Path | None = None
        self._looked = -math.inf
        self._parents = _launchers()

    def __bool__(self) -> bool:
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The signal's name (the first one's), or ``launcher gone``."""
        if self._signal is None and _orphaned(self._parents):
            self._signal = "launcher gone"
        if self._signal is None and self._file is not None and time.monotonic() - self._looked >= 1:
            self._looked = time.monotonic()
            if self._file.exists():
                self._signal = f"RUN/{STOP_NAME}"
        return self._signal

    def watch(self, run_dir: Path) -> None:
        """Also be asked by RUN/stop."""
        self._file = run_dir / STOP_NAME

    def heeded(self) -> None:
        """The run has stopped: RUN/stop, if there is one, is not there for the next."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second Ctrl-C does not wait for the step


def _launchers() -> tuple[int, ...]:
    """Process ids above this rank of the ``deepspeed`` launcher or a study, nearest first; none without them.

    A rank's parent is ``deepspeed.launcher.launch``, whose parent on a single node is the ``deepspeed`` command. What
    is above them, a shell perhaps, may go without any meaning.
    """
    found: list[int] = []
    with suppress(psutil.Error):
        process = psutil.Process().parent()
        while process is not None and _launches(process.cmdline()):
            found.append(process.pid)
            process = process.parent()
    return tuple(found)


def _launches(command: Sequence[str]) -> bool:
    """Whether a process with this command line starts ranks, and is to stop them when it goes."""
    words = {Path(part).name for part in command[:4]}
    return bool(words & _LAUNCHERS) or ("study" in words and bool(words & {"ds-vcycle", "ds_vcycle"}))


def _orphaned(parents: tuple[int, ...]) -> bool:
    """Whether one of these ancestors, nearest first, has ended: its child then has another parent, or has ended too."""
    try:
        children = (os.getpid(), *parents)
        return any(psutil.Process(child).ppid() != parent for child, parent in zip(children, parents, strict=False))
    except psutil.Error:
        return True


_outer: StopFlag | None = None


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Turn SIGTERM, SIGUSR1 and a first SIGINT (Ctrl-C) into a flag for the duration of the block.

    Within another such block it is that one's flag: what was asked before holds.
    """
    global _outer
    if _outer is not None:
        yield _outer
        return
    flag = _outer = StopFlag()
    before = {number: signal.signal(number, flag._set) for number in _SIGNALS}
    try:
        yield flag
    finally:
        _outer = None
        for number, handler in before.items():
            signal.signal(number, handler)


def write_status(run_dir: Path, status: Status, details: Mapping[str, Any]) -> None:
    """Replace RUN/status.json in one rename."""
    record = {"status": status, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **details}
    replace_json(run_dir / "status.json", record)


def read_status(run_dir: Path) -> str | None:
    """How RUN/status.json says the run ended; None if there is none, or it cannot be read."""
    found = read_json(run_dir / "status.json")
    return str(found["status"]) if "status" in found else None
