"""Run a function on several ranks: one process each, forked from a server that has the heavy modules loaded."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "numpy",
    "deepspeed",
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.models.bert.bert_model",
]
_SERVER_ENV = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What one rank left: the function's value, or the traceback; ``exit_code`` is 137 after ``os._exit(137)``."""

    value: Any
    exit_code: int
    error: str | None


class RankError(AssertionError):
    """At least one rank raised or died; the message holds every rank's traceback."""


def run_ranks(
    world_size: int,
    target: str,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
    check: bool = True,
    wait_all: bool = False,
    grace_s: float = 10,
) -> list[RankResult]:
    """Call ``module:function`` with ``args`` in ``world_size`` processes, as a launcher would start them.

    The function initialises the process group itself (``parallel.init_distributed``); RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set, torch runs on one thread. Arguments and values are pickled.

    Args:
        world_size: number of ranks.
        target: ``"tests.test_x:case"``; imported in each rank.
        args: the same for every rank.
        env: further environment variables.
        timeout_s: all ranks are killed after so many seconds (exit code -9).
        check: raise :class:`RankError` if any rank raised or died; otherwise report it in the results.
        wait_all: keep waiting for the others when a rank fails; otherwise kill them after ``grace_s``.
        grace_s: see ``wait_all``.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = _start(world_size, target, tuple(args), dict(env or {}), folder)
        _wait(processes, time.monotonic() + timeout_s, wait_all=wait_all, grace_s=grace_s)
        results = [_result(Path(folder, str(rank)), process) for rank, process in enumerate(processes)]
    failed = [rank for rank, result in enumerate(results) if result.error or result.exit_code]
    if check and failed:
        raise RankError("\n".join(f"rank {r}: exit {results[r].exit_code}: {results[r].error}" for r in failed))
    return results


def values(world_size: int, target: str, args: Sequence[Any] = (), **options: Any) -> list[Any]:
    """:func:`run_ranks`, the values only."""
    return [result.value for result in run_ranks(world_size, target, args, **options)]


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(world_size: int, target: str, args: tuple[Any, ...], env: dict[str, str], folder: str) -> list[BaseProcess]:
    common = {**env, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    _context.set_forkserver_preload(_PRELOAD)
    before = {key: os.environ.get(key) for key in _SERVER_ENV}
    os.environ.update(_SERVER_ENV)  # the server keeps the environment it is started with
    try:
        processes: list[BaseProcess] = []
        for rank in range(world_size):
            rank_env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _context.Process(target=_rank_main, args=(target, args, rank_env, folder), daemon=True)
            process.start()
            processes.append(process)
        return processes
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _wait(processes: list[BaseProcess], deadline: float, *, wait_all: bool, grace_s: float) -> None:
    running = {process.sentinel: process for process in processes}
    while running and time.monotonic() < deadline:
        for sentinel in multiprocessing.connection.wait(list(running), timeout=max(0, deadline - time.monotonic())):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and not wait_all:
                deadline = min(deadline, time.monotonic() + grace_s)
    for process in running.values():
        process.kill()
        process.join()


def _result(path: Path, process: BaseProcess) -> RankResult:
    exit_code = process.exitcode if process.exitcode is not None else -9
    if not path.exists():
        return RankResult(value=None, exit_code=exit_code, error=None if exit_code == 0 else "died without a traceback")
    value, error = pickle.loads(path.read_bytes())
    return RankResult(value=value, exit_code=exit_code, error=error)


def _rank_main(target: str, args: tuple[Any, ...], env: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # the server's modules live as long as the rank; scanning them takes seconds per collection
    value, error = None, None
    try:
        module, _, function = target.partition(":")
        value = getattr(importlib.import_module(module), function)(*args)
        outcome = pickle.dumps((value, None))
    except SystemExit as stop:
        _leave(folder, pickle.dumps((None, None)), stop.code if isinstance(stop.code, int) else 1)
    except BaseException:
        error = traceback.format_exc()
        outcome = pickle.dumps((None, error))
    _leave(folder, outcome, 1 if error else 0)


def _leave(folder: str, outcome: bytes, exit_code: int) -> None:
    path = Path(folder, os.environ["RANK"])
    path.with_suffix(".part").write_bytes(outcome)
    path.with_suffix(".part").rename(path)
    import torch.distributed as dist

    if exit_code == 0 and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a peer that failed is reported by its own exit code
            dist.barrier()  # rank 0 holds the store: the others must be done with it
    os._exit(exit_code)  # skips the interpreter's shutdown, where background threads of gloo may abort
