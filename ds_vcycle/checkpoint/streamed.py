"""A rank's file of whole parameters whose fragments are announced first and made one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_vcycle.checkpoint.manifest import FragmentEntry, ShardFile, describe
from ds_vcycle.checkpoint.shards import stream_shard
from ds_vcycle.checkpoint.store import WrittenShard
from ds_vcycle.schema import Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedFragment:
    """Elements [start, start + length) of a whole parameter, no pad rows among them, in each kind of ``keys``."""

    parameter: Parameter
    start: int
    length: int
    keys: tuple[str, ...]

    @property
    def entry(self) -> FragmentEntry:
        """Its place in the manifest; the tensors are not known yet."""
        return FragmentEntry(parameter=self.parameter.name, tp_rank=0, start=self.start, length=self.length, tensors={})


def write_streamed(
    staging: Path, identity: str, rank: int, fragments: Sequence[AnnouncedFragment], tensors: Iterable[torch.Tensor]
) -> WrittenShard:
    """Write this rank's file; at no time is more than one tensor of it in memory.

    Args:
        staging: the checkpoint's temporary directory.
        identity: of the checkpoint.
        rank: of this process.
        fragments: those of this rank, each parameter laid out on one tensor-parallel rank.
        tensors: fp32 [length] for each key of each fragment, in this order.
    """
    parameters = {f.parameter.name: describe(f.parameter, 1) for f in fragments}
    if not fragments:
        return WrittenShard(parameters=parameters, files=())
    path = staging / f"rank-{rank:05d}.safetensors"
    table = {f.entry.tensor_name(key): (torch.float32, (f.length,)) for f in fragments for key in f.keys}
    written = stream_shard(path, table, tensors, identity)
    entries = tuple(
        FragmentEntry(
            parameter=f.parameter.name, tp_rank=0, start=f.start, length=f.length,
            tensors={key: written[f.entry.tensor_name(key)] for key in f.keys},
        )
        for f in fragments
    )  # fmt: skip
    file = ShardFile(name=path.name, rank=rank, bytes=path.stat().st_size, fragments=entries, extras={})
    return WrittenShard(parameters=parameters, files=(file,))
