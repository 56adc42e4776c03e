"""What other programs read while a run goes on: RUN/heartbeat.json and RUN/events.jsonl. Imports no torch.

They are for looking at. The run itself never reads them, and what a full disk refuses is left out of them: the same
write of metrics.jsonl or status.json is an error.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_vcycle.cycle.json_files import replace_json

HEARTBEAT_NAME = "heartbeat.json"
EVENTS_NAME = "events.jsonl"
BEAT_SECONDS = 2.0


class Journal:
    """Heartbeat and events of a run, written by rank 0; silent on the others."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self._run_dir = run_dir
        self._enabled = enabled
        self._last_beat = -math.inf
        self._process: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        }

    def event(self, name: str, **values: Any) -> None:
        """Append one line: what happened, when, and where in the run."""
        if self._enabled:
            append_event(self._run_dir, name, **values)

    def due(self) -> bool:
        """Whether the next heartbeat is due: one every few seconds."""
        return self._enabled and time.monotonic() - self._last_beat >= BEAT_SECONDS

    def beat(self, values: Mapping[str, Any]) -> None:
        """Replace heartbeat.json in one rename."""
        if not self._enabled:
            return
        self._last_beat = time.monotonic()
        record = {"time": time.time(), **self._process, **values}
        with suppress(OSError):
            replace_json(self._run_dir / HEARTBEAT_NAME, _plain(record))


def append_event(run_dir: Path, name: str, **values: Any) -> None:
    """Append one line to RUN/events.jsonl, after whatever a killed run left of its last line."""
    record = {"event": name, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}
    line = json.dumps(_plain(record), allow_nan=False).encode()
    with suppress(OSError), (run_dir / EVENTS_NAME).open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")


class Pace:
    """How long a step of each level takes, as far as it is known."""

    def __init__(self, step_flops: Mapping[int, int]) -> None:
        """``step_flops``: FLOPs of a step by level, for the levels that have not been seen yet."""
        self._flops = step_flops
        self._seconds: dict[int, float] = {}
        self._seen: set[int] = set()

    def add(self, level: int, seconds: float) -> None:
        """One more step took so long; a level's first is left out, it warms up."""
        if level not in self._seen:
            self._seen.add(level)
            return
        before = self._seconds.get(level, seconds)
        self._seconds[level] = 0.9 * before + 0.1 * seconds

    def seconds(self, level: int) -> float | None:
        """Seconds of a step: measured, else those of the dearest measured level in proportion of FLOPs, else None."""
        if level in self._seconds:
            return self._seconds[level]
        if not self._seconds:
            return None
        known = max(self._seconds, key=lambda measured: self._flops[measured])
        return self._seconds[known] * self._flops[level] / self._flops[known]

    def remaining(self, steps: Mapping[int, int]) -> float | None:
        """Seconds of so many steps by level; None as long as no level has been measured."""
        total = 0.0
        for level, count in steps.items():
            each = self.seconds(level)
            if each is None:
                return None
            total += count * each
        return total


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
