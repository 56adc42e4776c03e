"""One run at a time in a run directory: two would mix their records and prune each other's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_vcycle.config import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks is used without


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for the length of the block; the system lets go of it when the process dies.

    The lock is the directory's own, no file: nothing is left behind.

    Raises:
        UserError: another run holds it.
    """
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"run_dir={run_dir} is in use by a run that is going on; wait until it has ended, stop it (SIGTERM), "
                "or set another run_dir"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)
