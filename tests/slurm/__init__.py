"""What the tests on a cluster stand on: a Slurm and hosts on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

SEARCHED = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"  # daemons may lie where only root looks


def program(name: str) -> str:
    """A command of this environment, which need not be on PATH."""
    return str(Path(sys.executable).with_name(name))


def find(name: str) -> str | None:
    """A daemon's or command's path."""
    return shutil.which(name, path=SEARCHED)


def missing(names: Sequence[str]) -> list[str]:
    """What of these is not installed here."""
    return [name for name in names if find(name) is None]
