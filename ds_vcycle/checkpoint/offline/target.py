"""Where a verb on checkpoints may write: what is there must be of the kind it replaces, and nobody else's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ds_vcycle.checkpoint.deepspeed.files import LATEST_UNIVERSAL
from ds_vcycle.checkpoint.huggingface.settings import CONFIG
from ds_vcycle.checkpoint.manifest import MANIFEST, CheckpointError
from ds_vcycle.checkpoint.retention import LATEST, settled
from ds_vcycle.checkpoint.source import WeightSource

WrittenForm = Literal["store", "huggingface", "deepspeed-universal", "run"]
_MARKS: dict[WrittenForm, str] = {
    "store": MANIFEST, "huggingface": CONFIG, "deepspeed-universal": LATEST_UNIVERSAL, "run": f"checkpoints/{LATEST}",
}  # fmt: skip
_NAMES: dict[WrittenForm, str] = {
    "store": "checkpoint", "huggingface": "Hugging Face directory",
    "deepspeed-universal": "universal DeepSpeed checkpoint", "run": "run",
}  # fmt: skip


def check_target(to: Path, sources: Sequence[WeightSource], *, overwrite: bool, form: WrittenForm = "store") -> None:
    """Refuse to write where something is that must stay.

    What an interrupted ``--overwrite`` left beside ``to`` counts as being there.

    Args:
        to: directory to write.
        sources: what is read.
        overwrite: replace what is there, if it has the form that is written; a run that has trained stays.
        form: that is written.

    Raises:
        CheckpointError: names ``--to`` and what is there.
    """
    for parent in to.parents:
        if (parent / LATEST).is_file() and (parent.name == "checkpoints" or any(parent.glob(f"*/{MANIFEST}"))):
            raise CheckpointError(
                f"--to {to} lies among a run's checkpoints, which come and go; give a directory elsewhere"
            )
        if parent.exists() and not parent.is_dir():
            raise CheckpointError(f"--to {to}: {parent} is a file; give a path through directories")
    there = settled(to)
    if not there.exists():
        return
    for lies in (source.directory.resolve() for source in sources):
        if there.resolve() in (lies, *lies.parents):
            raise CheckpointError(f"--to {to} holds the checkpoint that is read; give another directory")
    if not overwrite:
        raise CheckpointError(f"--to {to} exists; give another directory, or replace it with --overwrite")
    if not there.is_dir() or (any(there.iterdir()) and not (there / _MARKS[form]).is_file()):
        raise CheckpointError(f"--to {to} is no {_NAMES[form]}, so --overwrite leaves it alone; give another directory")
    if (there / "status.json").exists():
        raise CheckpointError(f"--to {to} is a run that has trained, so --overwrite leaves it alone; give another one")
