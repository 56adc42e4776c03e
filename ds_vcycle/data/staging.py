"""A directory that appears complete or not at all: written under a temporary name beside it, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_vcycle.data.errors import DataError


@contextmanager
def staged_directory(out: Path, *, overwrite: bool, marker: str) -> Iterator[Path]:
    """Give a temporary sibling of ``out`` to write into; on a clean exit it becomes ``out``, else it is removed.

    Args:
        out: a directory that does not exist yet, or an empty one.
        overwrite: ``out`` may also be a directory that holds ``marker``; it stays until the new one is complete.
        marker: the file by which a directory written here is known.

    Raises:
        DataError: something else is in the place of ``out``, or its parent cannot be written.
    """
    out = out.expanduser().resolve()
    _check(out, overwrite, marker)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise DataError(f"out={out}: cannot write there ({error.strerror}); choose another directory") from error
    try:
        yield staging
        _publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(out: Path, overwrite: bool, marker: str) -> None:
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / marker).is_file():
        raise DataError(f"out={out}: exists and is not a prepared corpus; choose another directory")
    if not overwrite:
        raise DataError(
            f"out={out}: is a prepared corpus already; choose another directory, or replace it with --overwrite"
        )


def _publish(staging: Path, out: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    staging.chmod(0o777 & ~umask)  # mkdtemp makes it private
    for path in (*staging.iterdir(), staging):
        _sync(path)
    old = staging.with_name(staging.name + ".old")
    if out.exists():
        out.rename(old)
    staging.rename(out)
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
