"""Helpers for tests of sharded code in one process: cut whole tensors into fragments, ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_vcycle.schema import Parameter
from ds_vcycle.sharding.placement import Layout, placements


def local_slice(parameter: Parameter, whole: Tensor, tp: int, tp_rank: int) -> Tensor:
    """A rank's tensor-parallel slice of a whole tensor, by Megatron's rule written out again."""
    if parameter.tp_dim is None:
        return whole
    dim, stride = parameter.tp_dim, parameter.dims[parameter.tp_dim].parts
    runs = whole.chunk(stride, dim)
    return torch.cat([run.chunk(tp, dim)[tp_rank] for run in runs], dim)


def cut(parameters: Sequence[Parameter], whole: dict[str, Tensor], layout: Layout) -> list[dict[str, Tensor]]:
    """Every rank's flat fragments."""
    by_name = {p.name: p for p in parameters}
    held = []
    for rank, ranges in enumerate(placements(parameters, layout)):
        tp_rank = layout.coordinates(rank)[1]
        held.append(
            {
                r.name: local_slice(by_name[r.name], whole[r.name], layout.tp, tp_rank)
                .reshape(-1)[r.start : r.start + r.length]
                .clone()
                for r in ranges
            }
        )
    return held


@dataclass
class ThreadMesh:
    """What an exchange needs to know of a mesh."""

    rank: int
    world_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Mailbox:
    """An all-to-all between threads."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.slots: dict[tuple[int, int], list[Tensor]] = {}

    def exchange(self, rank: int, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]]) -> Any:
        for peer, pieces in enumerate(outgoing):
            self.slots[rank, peer] = [piece if peer == rank else piece.clone().reshape(-1) for piece in pieces]
        self.barrier.wait(30)
        received = [self.slots[peer, rank] for peer in range(len(outgoing))]
        self.barrier.wait(30)
        assert [[piece.numel() for piece in pieces] for pieces in received] == [list(counts) for counts in incoming]
        return received


class ThreadExchange:
    """Stands in for ``exchange.Exchange``; counts what leaves the rank."""

    def __init__(self, mailbox: Mailbox, rank: int, world_size: int) -> None:
        self.mesh, self.mailbox, self.sent_bytes = ThreadMesh(rank, world_size), mailbox, 0

    def __call__(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[list[Tensor]]:
        others = [piece for peer, pieces in enumerate(outgoing) if peer != self.mesh.rank for piece in pieces]
        assert all(piece.dtype == dtype for piece in others)
        self.sent_bytes += sum(piece.numel() * piece.element_size() for piece in others)
        return self.mailbox.exchange(self.mesh.rank, outgoing, incoming)


def run_threads(world_size: int, work: Callable[[int, ThreadExchange], Any]) -> list[Any]:
    """Run ``work(rank, exchange)`` for every rank at once and return the results in rank order."""
    mailbox, results, errors = Mailbox(world_size), [None] * world_size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, ThreadExchange(mailbox, rank, world_size))
        except BaseException as error:
            errors.append(error)
            mailbox.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results
