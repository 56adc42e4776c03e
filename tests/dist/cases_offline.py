"""Offline verbs in a process of their own, and how far its resident memory rises meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ds_vcycle.checkpoint.offline.change_of_level import coalesce_checkpoint, refine_checkpoints


def resident_growth(verb: Literal["coalesce", "refine"], small: Path, large: Path, bucket: int) -> int:
    """Bytes by which the peak of a verb on ``large`` exceeds what the process held after the same on ``small``.

    Both hold checkpoints ``fine`` and ``coarse``; the small ones come first, so that what is imported does not count.
    """
    _run(verb, small, bucket)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (Linux: proc(5))
    before = _bytes("VmRSS")
    _run(verb, large, bucket)
    return _bytes("VmHWM") - before


def _run(verb: Literal["coalesce", "refine"], folder: Path, bucket: int) -> None:
    if verb == "coalesce":
        coalesce_checkpoint(folder / "fine", folder / "down", bucket=bucket)
    else:
        refine_checkpoints(folder / "fine", folder / "coarse", folder / "up", alpha=0.5, beta=0.25, bucket=bucket)


def _bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
