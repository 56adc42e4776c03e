"""The processes of an offline verb: this one alone, or those of a launch, which then agree over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ds_vcycle.config import UserError

T = TypeVar("T")
_PATIENCE = timedelta(days=1)  # a process may be done with its share long before another


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """Who this process is and how it talks to the others. ``gather``: everybody's picklable value in rank order."""

    rank: int
    world_size: int
    gather: Callable[[Any], list[Any]]
    barrier: Callable[[], None]


ALONE = Processes(rank=0, world_size=1, gather=lambda value: [value], barrier=lambda: None)


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes of this launch (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set), or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Processes(rank=dist.get_rank(), world_size=dist.get_world_size(), gather=_gather, barrier=dist.barrier)
    finally:
        dist.destroy_process_group()


def together(processes: Processes, work: Callable[[], T]) -> T:
    """Do something on every process that needs no other; all return, or all raise the lowest failing one's error.

    Raises:
        UserError: on every process with the same text.
    """
    value: T | None = None
    problem: str | None = None
    cause: Exception | None = None
    try:
        value = work()
    except UserError as error:
        problem, cause = str(error), error
    except OSError as error:
        problem, cause = f"{error.filename}: {error.strerror or error}; mend the path or its permissions", error
    failed = next((text for text in processes.gather(problem) if text is not None), None)
    if failed is not None:
        raise UserError(failed) from cause
    assert value is not None
    return value


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
