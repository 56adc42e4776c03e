"""The shard store: one file per rank, one manifest, committed by one rename; read by any number of ranks.

A checkpoint is a directory ``RUN/checkpoints/NAME`` with ``rank-RRRRR.safetensors`` files and ``manifest.json``. It
exists in whole or not at all: ranks write into a hidden sibling, and only when every file is on the disk does rank 0
give it its name. The store knows fragments of parameters, not engines: nothing here depends on ZeRO stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_vcycle.checkpoint.commit import Staging, WrittenShard, begin_save, commit_save, save_written
from ds_vcycle.checkpoint.manifest import (
    CheckpointError,
    FragmentEntry,
    ShardFile,
    StoredParameter,
    StoredTensor,
    describe,
)
from ds_vcycle.checkpoint.reader import Checkpoint, FlatRange, open_checkpoint
from ds_vcycle.checkpoint.retention import find_latest, prune, set_latest
from ds_vcycle.checkpoint.shards import write_shard
from ds_vcycle.schema import Parameter

__all__ = [
    "Checkpoint", "CheckpointError", "FlatRange", "Staging", "StoredFragment", "WrittenShard", "begin_save",
    "commit_save", "find_latest", "is_writer", "open_checkpoint", "prune", "save", "save_written", "set_latest",
    "write_fragments",
]  # fmt: skip

KEYS = ("master", "exp_avg", "exp_avg_sq", "average")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFragment:
    """Elements [start, start + length) of the flat local tensor-parallel shard of one parameter, to be written.

    ``tensors``: "master", "exp_avg" and "exp_avg_sq" if there are moments, "average" if a moving average of the weights
    is kept; each 1-D fp32 [length], any device.
    """

    parameter: Parameter
    tp: int
    tp_rank: int
    start: int
    length: int
    tensors: Mapping[str, torch.Tensor]


def is_writer(parameter: Parameter, *, tp_rank: int, dp_rank: int, zero_stage: int) -> bool:
    """Whether this rank writes its fragments of a parameter, so that one replica of each is stored.

    Tensor-parallel rank 0 writes what all tensor-parallel ranks hold; under ZeRO 0, data-parallel rank 0 writes.
    """
    return (parameter.tp_dim is not None or tp_rank == 0) and (zero_stage > 0 or dp_rank == 0)


def save(
    directory: Path,
    *,
    fragments: Iterable[StoredFragment],
    extras: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    rank: int,
    world_size: int,
    gather: Callable[[Any], list[Any]],
    barrier: Callable[[], None],
    references: Sequence[str] = (),
) -> None:
    """Write a checkpoint; every rank calls it. When it returns, the checkpoint is on the disk under its name.

    An older checkpoint of the same name is replaced; it goes only after the new one is complete.

    Args:
        directory: RUN/checkpoints/NAME, on a file system that all ranks share.
        fragments: those this rank is the writer of (:func:`is_writer`); pad rows are left out here.
        extras: this rank's own further tensors (RNG states), of any dtype.
        state: JSON; rank 0's is stored.
        rank: of this process.
        world_size: number of processes.
        gather: every rank's picklable value in rank order, on every rank.
        barrier: returns when every rank has called it.
        references: names of sibling checkpoints this one needs (the parked fine level); rank 0's are stored.

    Raises:
        CheckpointError: on every rank, with the same text, if any rank failed. The temporary directory is removed, and
            what was there before is untouched.
    """
    save_written(
        directory, lambda path, identity: write_fragments(path, identity, fragments, extras, rank),
        state=state, rank=rank, world_size=world_size, gather=gather, barrier=barrier, references=references,
    )  # fmt: skip


def write_fragments(
    staging: Path, identity: str, fragments: Iterable[StoredFragment], extras: Mapping[str, torch.Tensor], rank: int
) -> WrittenShard:
    """Write a rank's file into a save's temporary directory (its arguments: :func:`save`, :class:`Staging`)."""
    parameters: dict[str, StoredParameter] = {}
    entries: list[FragmentEntry] = []
    tensors = {f"extra/{name}": tensor for name, tensor in extras.items()}
    for fragment in fragments:
        stored = describe(fragment.parameter, fragment.tp)
        parameters[stored.name] = stored
        entry = _entry(fragment, stored)
        if entry.length:
            entries.append(entry)
            tensors |= {entry.tensor_name(key): _kept(fragment, entry.length, key) for key in fragment.tensors}
    if not tensors:
        return WrittenShard(parameters=parameters)
    path = staging / f"rank-{rank:05d}.safetensors"
    written = write_shard(path, tensors, identity)
    file = ShardFile(
        name=path.name,
        rank=rank,
        bytes=path.stat().st_size,
        fragments=tuple(replace(entry, tensors=_written(entry, written)) for entry in entries),
        extras={name: written[f"extra/{name}"] for name in extras},
    )
    return WrittenShard(parameters=parameters, files=(file,))


def _written(entry: FragmentEntry, written: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    names = {key: entry.tensor_name(key) for key in KEYS}
    return {key: written[name] for key, name in names.items() if name in written}


def _entry(fragment: StoredFragment, stored: StoredParameter) -> FragmentEntry:
    """Where the fragment lies, its pad rows cut off (length 0: nothing but pad rows)."""
    name, start, end = stored.name, fragment.start, fragment.start + fragment.length
    assert 0 <= start <= end <= stored.local_numel, f"{name}: [{start}, {end}) of {stored.local_numel}"
    assert "master" in fragment.tensors and set(fragment.tensors) <= set(KEYS), f"{name}: {list(fragment.tensors)}"
    for key, tensor in fragment.tensors.items():
        assert tensor.shape == (fragment.length,) and tensor.dtype == torch.float32, (
            f"{name}: {key} is no fp32 [length]"
        )
    tp_rank = fragment.tp_rank if stored.tp > 1 else 0
    length = stored.real_length(tp_rank, start, fragment.length)
    return FragmentEntry(parameter=name, tp_rank=tp_rank, start=start, length=length, tensors={})


def _kept(fragment: StoredFragment, length: int, key: str) -> torch.Tensor:
    tensor = fragment.tensors[key]
    assert not tensor[length:].any(), f"{fragment.parameter.name}: pad rows of {key} are not zero"
    return tensor[:length]
