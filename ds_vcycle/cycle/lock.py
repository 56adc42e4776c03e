"""One run at a time in a run directory: two would mix their records and prune each other's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_vcycle.config import UserError

PATIENCE_SECONDS = 20.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks is used without


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for the length of the block; the system lets go of it when the process dies.

    A run that has said that it is done takes a moment to end, so it is waited for. The lock is the directory's own, no
    file: nothing is left behind.

    Raises:
        UserError: another run holds it.
    """
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            if not _taken(handle):
                raise UserError(
                    f"run_dir={run_dir} is in use by a run that is going on; wait until it has ended, stop it "
                    "(SIGTERM), or set another run_dir"
                )
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    """Whether the lock could be had in time."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.2)
        else:
            return True
