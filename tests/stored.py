"""Whole tensors into a checkpoint and out of it, for the tests of what works on checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_vcycle.checkpoint import store
from ds_vcycle.checkpoint.store import StoredFragment, open_checkpoint
from ds_vcycle.levels import ModelShape
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.placement import Layout, placements
from tests.dist.cases_store import on_threads
from tests.sharded import cut

Wholes = dict[str, dict[str, Tensor]]  # kind of tensor -> parameter -> tensor of global shape, pad rows zero


def store_wholes(
    directory: Path, wholes: Wholes, shape: ModelShape, layout: Layout, state: Mapping[str, Any] | None = None,
    references: Sequence[str] = (),
) -> None:  # fmt: skip
    """Save as the ranks of a layout would, the ranks being threads."""
    table = {parameter.name: parameter for parameter in parameters(shape)}
    held = {key: cut(tuple(table.values()), whole, layout) for key, whole in wholes.items()}

    def work(rank: int, gather: Any, barrier: Any) -> None:
        dp_rank, tp_rank = layout.coordinates(rank)
        mine = [
            StoredFragment(
                parameter=table[p.name], tp=layout.tp, tp_rank=tp_rank, start=p.start, length=p.length,
                tensors={key: held[key][rank][p.name] for key in wholes},
            )
            for p in placements(tuple(table.values()), layout)[rank]
            if store.is_writer(table[p.name], tp_rank=tp_rank, dp_rank=dp_rank, zero_stage=layout.zero_stage)
        ]  # fmt: skip
        store.save(
            directory, fragments=mine, extras={}, state=state or {}, rank=rank, world_size=layout.world_size,
            gather=gather, barrier=barrier, references=references,
        )  # fmt: skip

    assert on_threads(layout.world_size, work) == [None] * layout.world_size


def load_wholes(directory: Path, shape: ModelShape) -> Wholes:
    """Every parameter of a checkpoint as one tensor-parallel rank reads it, its checksums verified."""
    with open_checkpoint(directory) as checkpoint:
        checkpoint.expect(parameters(shape))
        checkpoint.verify()
        found: Wholes = {}
        for parameter in parameters(shape):
            for key in checkpoint.keys(parameter):
                read = checkpoint.read(parameter, tp=1, tp_rank=0, start=0, length=parameter.numel, key=key)
                found.setdefault(key, {})[parameter.name] = read.view(parameter.shape)
        return found


def differing(found: Wholes, wanted: Wholes) -> list[tuple[str, str]]:
    """The tensors whose bits differ; both must hold the same ones."""
    assert found.keys() == wanted.keys()
    assert all(found[key].keys() == wanted[key].keys() for key in wanted)
    return [(key, name) for key in wanted for name in wanted[key] if not found[key][name].equal(wanted[key][name])]
