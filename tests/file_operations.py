"""Every change a piece of code makes to the file system, one by one: to count them, fail them, or die at them.

Writes reach the file at once, so that what a killed process leaves is what it had written. :class:`Unsynced` knows what
a power cut would take besides: the contents of files that were not synced, and names in directories that were not.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One change about to be made. ``begin`` makes the half of it that can be made by halves: of a write."""

    kind: str
    path: str
    begin: Callable[[], object] = lambda: None


@dataclass(kw_only=True)
class Unsynced:
    """What a power cut would take. Removals are taken for journalled, with all that came before them."""

    contents: dict[int, int] = field(default_factory=dict)  # inode -> a descriptor of the file
    names: list[tuple[int, Callable[[], object]]] = field(default_factory=list)  # directory's inode, how to undo it
    lost: bool = False
    # One operation at a time: a rank on another thread must not make a file in a directory that a cut is taking away.
    lock: Any = field(default_factory=threading.RLock)

    def written(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode not in self.contents:
            self.contents[inode] = os.dup(descriptor)

    def named(self, path: Path, undo: Callable[[], object]) -> None:
        self.names.append((path.parent.stat().st_ino, undo))

    def synced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self.names = [(inode, undo) for inode, undo in self.names if inode != found.st_ino]
        elif found.st_ino in self.contents:
            os.close(self.contents.pop(found.st_ino))

    def lose(self) -> None:
        """Cut the power."""
        self.lost = True
        for descriptor in self.contents.values():
            os.ftruncate(descriptor, 0)
        for _, undo in reversed(self.names):
            undo()


class _Written:
    """A file open for writing whose writes are operations of their own, text in UTF-8."""

    def __init__(self, path: str, file: Any, before: Callable[[Operation], object], unsynced: Unsynced) -> None:
        self._path, self._file, self._before, self._unsynced = path, file, before, unsynced
        self.name, self.fileno, self.close, self.tell = path, file.fileno, file.close, file.tell

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self) -> None:
        pass

    def write(self, data: Any) -> int:
        whole = data.encode() if isinstance(data, str) else bytes(data)
        half = whole[: len(whole) // 2]
        with self._unsynced.lock:
            self._unsynced.written(self.fileno())
            self._before(Operation(kind="write", path=self._path, begin=lambda: self._file.write(half)))
            assert self._file.write(whole) == len(whole)
        return len(data)


@contextmanager
def intercepted(before: Callable[[Operation], object], unsynced: Unsynced | None = None) -> Iterator[None]:
    """Call ``before`` with every change this process is about to make to the file system; it may raise.

    Seen: opening for writing, write, fsync, mkdir, rename, replace, unlink, rmdir, through ``os``, ``io.open``, pathlib
    and shutil.
    """
    log = unsynced or Unsynced()

    def announce(operation: Operation) -> None:
        if not log.lost:
            before(operation)

    original = {name: getattr(os, name) for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")}
    open_file = io.open

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) <= set("rbt"):
            return open_file(path, mode, *args, **kwargs)
        announce(Operation(kind="open", path=str(path)))
        new = not os.path.exists(path)
        file = open_file(path, mode.replace("t", "").replace("b", "") + "b", buffering=0)
        if new:
            log.named(Path(path), lambda: original["unlink"](path))
        return _Written(str(path), file, announce, log)

    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        announce(Operation(kind="mkdir", path=str(path)))
        original["mkdir"](path, *args, **kwargs)
        log.named(Path(path), lambda: shutil.rmtree(path))

    def moved(source: Any, target: Any, kind: str) -> None:
        announce(Operation(kind=kind, path=f"{source} -> {target}"))
        replaced = Path(target).read_bytes() if os.path.isfile(target) else None
        original["replace"](source, target)

        def undo() -> None:
            original["replace"](target, source)
            if replaced is not None:
                Path(target).write_bytes(replaced)

        log.named(Path(target), undo)

    def removed(path: Any, kind: str, **kwargs: Any) -> None:
        announce(Operation(kind=kind, path=str(path)))
        original[kind](path, **kwargs)
        log.names.clear()

    def synced(descriptor: int) -> None:
        announce(Operation(kind="fsync", path=os.readlink(f"/proc/self/fd/{descriptor}")))
        original["fsync"](descriptor)
        log.synced(descriptor)

    replacements: dict[str, Any] = {
        "mkdir": made,
        "rename": lambda source, target: moved(source, target, "rename"),
        "replace": lambda source, target: moved(source, target, "replace"),
        "unlink": lambda path, **kwargs: removed(path, "unlink", **kwargs),
        "rmdir": lambda path, **kwargs: removed(path, "rmdir", **kwargs),
        "fsync": synced,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(io, "open", _alone(opened, log)))
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(os, name, _alone(replacement, log)))
        yield


def _alone(operation: Callable[..., Any], log: Unsynced) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        with log.lock:
            return operation(*args, **kwargs)

    return alone


def killed(scenario: Callable[[Path], None], root: Path, at: int, *, power: bool) -> int:
    """Run a scenario in a child that dies when operation ``at`` is half done; its exit code."""
    child = os.fork()
    if child == 0:
        unsynced, numbers = Unsynced(), count()

        def before(operation: Operation) -> None:
            if next(numbers) >= at:
                operation.begin()
                if power:
                    unsynced.lose()
                os._exit(137)

        try:
            with intercepted(before, unsynced):
                scenario(root)
            unsynced.lose()  # what has returned is there to stay
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
