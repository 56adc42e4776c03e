"""RUN/requeues.json: how often a scheduler has taken a run back, and how often nothing had come of it since.

Imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

REQUEUES_NAME = "requeues.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Requeues:
    """Requeues of a run.

    ``count``: all of them. ``idle``: how many of the last ones in a row left the latest checkpoint where it was before.
    ``checkpoint``: the latest one at the last requeue. ``job``: which job that was of.
    """

    count: int = 0
    idle: int = 0
    checkpoint: str | None = None
    job: str | None = None

    def once_more(self, job: str | None, checkpoint: str | None) -> Requeues:
        """What is recorded if the run is requeued now; another job than before starts with nothing held against it."""
        same = job == self.job and checkpoint == self.checkpoint and self.count > 0
        return replace(self, count=self.count + 1, idle=self.idle + 1 if same else 0, checkpoint=checkpoint, job=job)


def read_requeues(run_dir: Path) -> Requeues:
    """What RUN/requeues.json holds; nothing has happened yet where it is missing or damaged."""
    try:
        return Requeues(**json.loads((run_dir / REQUEUES_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Requeues()


def write_requeues(run_dir: Path, requeues: Requeues) -> None:
    """Replace RUN/requeues.json in one rename."""
    temporary = run_dir / f".requeues.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(requeues), indent=1) + "\n", encoding="utf-8")
    temporary.replace(run_dir / REQUEUES_NAME)
