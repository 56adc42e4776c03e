"""Named points where a test can make a rank die at once, as ``kill -9`` would.

``DS_VCYCLE_FAULT=refine.blended:1`` ends rank 1 the first time it passes ``refine.blended``;
``DS_VCYCLE_FAULT=save.written`` ends every rank there; ``DS_VCYCLE_FAULT=step@7`` the 7th time ``step`` is passed.
Without the variable a point costs one dictionary look-up.
"""

from __future__ import annotations

import os

_passed: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Die here (exit code 137, no clean-up) if the environment asks for it."""
    wanted = os.environ.get("DS_VCYCLE_FAULT")
    if not wanted:
        return
    where, _, rank = wanted.partition(":")
    point, _, count = where.partition("@")
    if point != name or (rank and rank != os.environ.get("RANK", "0")):
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(count or 1):
        os._exit(137)
