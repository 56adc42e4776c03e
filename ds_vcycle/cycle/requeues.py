"""RUN/requeues.json: how often a scheduler has taken a run back, and how often nothing had come of it since.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ds_vcycle.cycle.json_files import read_json, replace_json

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
        return Requeues(**read_json(run_dir / REQUEUES_NAME))
    except TypeError:
        return Requeues()


def write_requeues(run_dir: Path, requeues: Requeues) -> None:
    """Replace RUN/requeues.json in one rename."""
    replace_json(run_dir / REQUEUES_NAME, asdict(requeues))
