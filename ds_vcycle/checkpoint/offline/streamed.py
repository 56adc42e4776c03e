"""A rank's file of fragments that are announced first and made one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from ds_vcycle.checkpoint.manifest import FragmentEntry, ShardFile, describe
from ds_vcycle.checkpoint.shards import stream_shard
from ds_vcycle.checkpoint.store import WrittenShard
from ds_vcycle.schema import Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedFragment:
    """Elements [start, start + length) of a parameter's tensor-parallel slice, no pad rows, in each kind of ``keys``.

    ``tp``: degree of the slices; by default the parameter is whole.
    """

    parameter: Parameter
    start: int
    length: int
    keys: tuple[str, ...]
    tp: int = 1
    tp_rank: int = 0

    @property
    def entry(self) -> FragmentEntry:
        """Its place in the manifest; the tensors are not known yet."""
        stored = describe(self.parameter, self.tp)
        tp_rank = self.tp_rank if stored.tp > 1 else 0
        return FragmentEntry(parameter=stored.name, tp_rank=tp_rank, start=self.start, length=self.length, tensors={})


def write_streamed(
    staging: Path, identity: str, rank: int, fragments: Sequence[AnnouncedFragment], tensors: Iterable[torch.Tensor],
    extras: Mapping[str, torch.Tensor] | None = None,
) -> WrittenShard:  # fmt: skip
    """Write a rank's file; at no time is more than one tensor of it in memory.

    Args:
        staging: the checkpoint's temporary directory.
        identity: of the checkpoint.
        rank: whose file it is.
        fragments: those of this rank.
        tensors: fp32 [length] for each key of each fragment, in this order.
        extras: the rank's own further tensors.
    """
    extras = extras or {}
    parameters = {f.parameter.name: describe(f.parameter, f.tp) for f in fragments}
    if not fragments and not extras:
        return WrittenShard(parameters=parameters)
    path = staging / f"rank-{rank:05d}.safetensors"
    entries = [fragment.entry for fragment in fragments]
    # The widest elements first: every tensor then starts at a multiple of its element size.
    kept = dict(sorted(extras.items(), key=lambda item: -item[1].element_size()))
    wide = {name: tensor for name, tensor in kept.items() if tensor.element_size() > 4}
    table = {f"extra/{name}": (tensor.dtype, tuple(tensor.shape)) for name, tensor in wide.items()}
    table |= {e.tensor_name(key): (torch.float32, (f.length,)) for e, f in zip(entries, fragments) for key in f.keys}
    table |= {f"extra/{name}": (tensor.dtype, tuple(tensor.shape)) for name, tensor in kept.items()}
    narrow = [tensor for name, tensor in kept.items() if name not in wide]
    written = stream_shard(path, table, chain(wide.values(), tensors, narrow), identity)
    file = ShardFile(
        name=path.name, rank=rank, bytes=path.stat().st_size,
        fragments=tuple(
            replace(entry, tensors={key: written[entry.tensor_name(key)] for key in fragment.keys})
            for entry, fragment in zip(entries, fragments)
        ),
        extras={name: written[f"extra/{name}"] for name in extras},
    )  # fmt: skip
    return WrittenShard(parameters=parameters, files=(file,))
