"""What the tests on a cluster stand on: a Slurm and hosts on this machine."""

from __future__ import annotations

import sys
from pathlib import Path


def program(name: str) -> str:
    """A command of this environment, which need not be on PATH."""
    return str(Path(sys.executable).with_name(name))
