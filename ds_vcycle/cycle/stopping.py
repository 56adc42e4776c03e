"""Asked to stop: signals set a flag, ranks agree on it between steps, and the run directory says how a run ended.

The launcher signals ranks one after another and hides their exit codes, so nothing is saved inside a handler, and
``status.json`` is what other programs should read.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

Status = Literal["running", "stopped", "finished", "failed"]
EXIT_STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, start again with --resume


class Stopped(Exception):  # noqa: N818 - an outcome, not an error
    """The run was asked to stop and has saved its state."""


class StopFlag:
    """Whether this process was sent SIGTERM or SIGUSR1, and which."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Turn SIGTERM and SIGUSR1 into a flag for the duration of the block."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag._set) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_status(run_dir: Path, status: Status, details: Mapping[str, Any]) -> None:
    """Replace RUN/status.json in one rename."""
    record = {"status": status, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **details}
    temporary = run_dir / f".status.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(run_dir / "status.json")
