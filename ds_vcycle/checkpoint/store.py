"""The shard store: one file per rank, one manifest, committed by one rename; read by any number of ranks.

A checkpoint is a directory ``RUN/checkpoints/NAME`` with ``rank-RRRRR.safetensors`` files and ``manifest.json``. It
exists in whole or not at all: ranks write into a hidden sibling, and only when every file is on the disk does rank 0
give it its name. The store knows fragments of parameters, not engines: nothing here depends on ZeRO stages.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ds_vcycle.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FragmentEntry,
    Manifest,
    ShardFile,
    StoredParameter,
    StoredTensor,
    check_coverage,
    describe,
    manifest_text,
    merge_parameters,
    read_manifest,
)
from ds_vcycle.checkpoint.reader import Checkpoint, FlatRange, open_checkpoint
from ds_vcycle.checkpoint.retention import (
    clean,
    find_latest,
    make_directory,
    prune,
    publish,
    set_latest,
    settled,
    sync_directory,
)
from ds_vcycle.checkpoint.shards import write_shard
from ds_vcycle.faults import fault_point
from ds_vcycle.schema import Parameter

__all__ = [
    "Checkpoint", "CheckpointError", "FlatRange", "StoredFragment", "WrittenShard", "find_latest", "is_writer",
    "open_checkpoint", "prune", "save", "save_written", "set_latest",
]  # fmt: skip

KEYS = ("master", "exp_avg", "exp_avg_sq")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFragment:
    """Elements [start, start + length) of the flat local tensor-parallel shard of one parameter, to be written.

    ``tensors``: "master" and, if there are moments, "exp_avg" and "exp_avg_sq"; each 1-D fp32 [length], any device.
    """

    parameter: Parameter
    tp: int
    tp_rank: int
    start: int
    length: int
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """What a rank tells rank 0 about what it wrote: one file, none, or more (those of the ranks it stands for)."""

    parameters: Mapping[str, StoredParameter]
    files: tuple[ShardFile, ...] = ()


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
        directory, lambda staging, identity: _write(staging, identity, fragments, extras, rank),
        state=state, rank=rank, world_size=world_size, gather=gather, barrier=barrier, references=references,
    )  # fmt: skip


def save_written(
    directory: Path,
    write: Callable[[Path, str], WrittenShard],
    *,
    state: Mapping[str, Any],
    rank: int,
    world_size: int,
    gather: Callable[[Any], list[Any]],
    barrier: Callable[[], None],
    references: Sequence[str] = (),
    alone: bool = True,
) -> None:
    """:func:`save` of files that ``write`` makes: it is given the temporary directory and the checkpoint's identity.

    ``alone``: the parent directory holds nothing but checkpoints, so that all that killed saves left there may go.
    """
    begun = _together(rank, gather, directory, lambda: _begin(directory, alone=alone) if rank == 0 else None)
    staging, identity = next(answer for answer in begun if answer)
    try:
        fault_point("save.begin")
        shards = _together(rank, gather, directory, lambda: write(staging, identity))
        fault_point("save.written")

        def commit() -> None:
            if rank == 0:
                needed = {name: read_manifest(settled(directory.parent / name)).identity for name in references}
                manifest = _manifest(shards, identity, world_size, needed, state)
                _prepare(staging, manifest)
            fault_point("save.manifest")
            if rank == 0:
                publish(staging, directory)

        _together(rank, gather, directory, commit)
    except (CheckpointError, KeyboardInterrupt):
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    fault_point("save.committed")
    barrier()


def _together(rank: int, gather: Callable[[Any], list[Any]], directory: Path, work: Callable[[], T]) -> list[T]:
    """Do this rank's part; then all go on with every rank's value, or all raise the lowest failing rank's error."""
    value: T | None = None
    failure: str | None = None
    cause: Exception | None = None
    try:
        value = work()
    except OSError as error:
        failure = f"{error.filename or directory}: {error.strerror or error}; free space or mend the permissions"
        cause = error
    except Exception as error:  # whatever it is: a rank that stayed silent would leave the others waiting
        failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        cause = error
    outcomes = gather((value, failure))
    for failing, (_, text) in enumerate(outcomes):
        if text is not None:
            raise CheckpointError(
                f"checkpoint {directory} was not saved: rank {failing}: {text} (earlier checkpoints are untouched)"
            ) from cause
    return [value for value, _ in outcomes]


def _begin(directory: Path, *, alone: bool) -> tuple[Path, str]:
    root = directory.parent
    make_directory(root)
    clean(root, None if alone else directory.name)
    identity = uuid.uuid4().hex
    staging = root / f".tmp-{directory.name}-{identity[:8]}"
    staging.mkdir()
    return staging, identity


def _write(
    staging: Path, identity: str, fragments: Iterable[StoredFragment], extras: Mapping[str, torch.Tensor], rank: int
) -> WrittenShard:
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


def _manifest(
    shards: Sequence[WrittenShard],
    identity: str,
    world_size: int,
    references: Mapping[str, str],
    state: Mapping[str, Any],
) -> Manifest:
    manifest = Manifest(
        identity=identity,
        created=time.time(),
        world_size=world_size,
        references=references,
        parameters=merge_parameters(shard.parameters for shard in shards),
        files=tuple(file for shard in shards for file in shard.files),
        state=state,
    )
    check_coverage(manifest)
    return manifest


def _prepare(staging: Path, manifest: Manifest) -> None:
    """Write the manifest; the directory is then complete and durable, but for its name."""
    for file in manifest.files:
        if not (staging / file.name).is_file():
            raise CheckpointError(
                f"{staging / file.name}, written by rank {file.rank}, is not visible on rank 0; the run directory must "
                "lie on a file system that all nodes share"
            )
    path = staging / MANIFEST
    try:
        with path.open("x") as out:
            out.write(manifest_text(manifest))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        problem = f"{error.filename or path}: {error.strerror or error}; free space or mend the permissions"
        raise CheckpointError(problem) from error
    sync_directory(staging)
