"""Which rank is to blame when the ranks cannot go on together: dead, hanging, or failed by itself.

A thread of each rank tells the launch's store every few seconds that it lives and where its main thread is. When a
collective fails (gloo notices a peer that has gone) or times out, the others read who has fallen silent. Where nothing
fails (NCCL waits on the device), the threads end the ranks themselves after ``training.rank_timeout_seconds``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil
from torch._C._distributed_c10d import TCPStore

from ds_vcycle.config import UserError
from ds_vcycle.cycle.stopping import EXIT_LOST

INTERVAL_SECONDS = 2.0
_LEAVE_SECONDS = 30.0  # for a rank that knows it to end in order
_COMMUNICATION = ("gloo", "NCCL", "Connection", "Timed out", "timeout", "Broken pipe", "store")


class LostRankError(UserError):
    """Another rank has gone or hangs, so this one cannot go on; what is saved is as it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a rank last said of itself. ``failed``: the error that ended it, of its own making."""

    count: int
    host: str
    pid: int
    where: str
    waiting: bool
    failed: str | None
    leaving: bool


class Pulse:
    """This rank's thread, and the question whose fault it is. Nothing with one rank. Enter it on every rank."""

    def __init__(self, rank: int, world_size: int, *, timeout_seconds: float) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout_seconds
        self._main = threading.get_ident()
        self._count, self._leaving = 0, False
        self._failed: str | None = None
        self._end = threading.Event()
        self._store: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Pulse:
        if self._world_size > 1 and "MASTER_ADDR" in os.environ:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = TCPStore(address, port, is_master=False, wait_for_workers=False)
            self._tell()
            self._store.wait([f"pulse/{rank}" for rank in range(self._world_size)])
            threading.Thread(target=self._watch, name="pulse", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()

    def culprit(self, error: Exception) -> str | None:
        """Whose fault an error of this rank is, in words; None if it is its own, or nobody can be named.

        Takes a few seconds where the others are on other machines.
        """
        if self._store is None:
            return None
        if isinstance(error, UserError) or not any(word in str(error) for word in _COMMUNICATION):
            self._failed = f"{type(error).__name__}: {error}"[:1000]
            with suppress(Exception):
                self._tell()
            return None
        self._leaving = True
        try:
            self._tell()
            found = self._blame()
        except Exception:  # the store has gone, and rank 0 holds it
            found = "rank 0 has gone"
        if found is not None:
            timer = threading.Timer(_LEAVE_SECONDS, os._exit, (EXIT_LOST,))  # the device may wait for ever
            timer.daemon = True
            timer.start()
        return found

    # --- the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Tell the others, and look at them: rank 0 at all, the others at rank 0 and at what it says."""
        heard = {rank: (-1, time.monotonic()) for rank in range(self._world_size)}
        while not self._end.wait(INTERVAL_SECONDS):
            try:
                self._tell()
                beats = self._beats(range(self._world_size) if self._rank == 0 else (0,))
            except Exception:
                beats = {}
            now = time.monotonic()
            for rank, beat in beats.items():
                if beat.count != heard[rank][0]:
                    heard[rank] = (beat.count, now)
            silent = [rank for rank in ([0] if self._rank else heard) if now - heard[rank][1] > self._timeout]
            if silent and not self._end.is_set():
                self._give_up(silent, beats)

    def _give_up(self, silent: list[int], beats: dict[int, Beat]) -> None:
        named = ", ".join(_named(rank, beats.get(rank)) for rank in silent)
        text = f"{named}: nothing heard for {self._timeout:.0f} s; go on with --resume"
        sys.stderr.write(f"[rank {self._rank}] ds-vcycle: error: {text}\n")
        sys.stderr.flush()
        time.sleep(INTERVAL_SECONDS)  # rank 0 holds the store; the others see its silence as it ends
        os._exit(EXIT_LOST)

    def _tell(self) -> None:
        with self._lock:
            self._count += 1
            where, waiting = _place(self._main)
            record = {
                "count": self._count, "host": socket.gethostname(), "pid": os.getpid(), "where": where,
                "waiting": waiting, "failed": self._failed, "leaving": self._leaving,
            }  # fmt: skip
            self._store.set(f"pulse/{self._rank}", json.dumps(record))

    def _beats(self, ranks: Any) -> dict[int, Beat]:
        """What these ranks said last."""
        with self._lock:
            values = self._store.multi_get([f"pulse/{rank}" for rank in ranks])
        return {rank: Beat(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}

    # --- whose fault ---------------------------------------------------------------------------------------------

    def _blame(self) -> str | None:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        first = self._beats(others)
        until = time.monotonic() + 4 * INTERVAL_SECONDS
        while True:
            now = self._beats(others)
            failed = [f"{_named(rank, beat)} failed: {beat.failed}" for rank, beat in now.items() if beat.failed]
            gone = [f"{_named(rank, beat)} has gone" for rank, beat in now.items() if not beat.leaving and _dead(beat)]
            if failed or gone:
                return "; ".join(failed or gone)
            if time.monotonic() > until:
                break
            time.sleep(INTERVAL_SECONDS / 4)
        silent = [rank for rank in others if now[rank].count == first[rank].count and not first[rank].leaving]
        if silent:
            return "; ".join(f"{_named(rank, now[rank])} has gone or hangs" for rank in silent)
        stuck = [rank for rank in others if not now[rank].waiting and not now[rank].leaving]
        if stuck:
            return "; ".join(f"{_named(rank, now[rank])} does not go on from {now[rank].where}" for rank in stuck)
        return None


def _named(rank: int, beat: Beat | None) -> str:
    return f"rank {rank} ({beat.host}, process {beat.pid})" if beat else f"rank {rank}"


def _dead(beat: Beat) -> bool:
    """Whether the process has ended; of one on another machine nobody knows."""
    if beat.host != socket.gethostname():
        return False
    try:
        return psutil.Process(beat.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _place(thread: int) -> tuple[str, bool]:
    """Where a thread is in our code, and whether it waits in a collective."""
    frame = sys._current_frames().get(thread)
    waiting, where = False, "its beginning"
    while frame is not None:
        file = frame.f_code.co_filename
        waiting = waiting or f"torch{os.sep}distributed" in file
        if f"ds_vcycle{os.sep}" in file and where == "its beginning":
            where = f"{os.path.basename(file)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return where, waiting
