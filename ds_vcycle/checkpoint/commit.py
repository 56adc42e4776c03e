"""The commit of a checkpoint: every rank's file in a hidden directory, then one rename that all ranks wait for."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_vcycle.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    ShardFile,
    StoredParameter,
    check_coverage,
    manifest_text,
    merge_parameters,
    read_manifest,
)
from ds_vcycle.checkpoint.retention import clean, make_directory, publish, settled, sync_directory
from ds_vcycle.faults import fault_point

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """A save that has begun: the checkpoint's directory, the temporary one ``path``, the checkpoint's identity."""

    directory: Path
    path: Path
    identity: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """What a rank tells rank 0 about what it wrote: one file, none, or more (those of the ranks it stands for)."""

    parameters: Mapping[str, StoredParameter]
    files: tuple[ShardFile, ...] = ()


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
    """Save files that ``write`` makes: it is given the temporary directory and the checkpoint's identity.

    Every rank calls it; when it returns, the checkpoint is on the disk under its name.

    Args:
        directory: of the checkpoint.
        write: this rank's part.
        state: JSON; rank 0's is stored.
        rank: of this process.
        world_size: number of ranks that the checkpoint is of.
        gather: every rank's picklable value in rank order, on every rank.
        barrier: returns when every rank has called it.
        references: names of sibling checkpoints this one needs.
        alone: the parent directory holds nothing but checkpoints, so that all that killed saves left there may go.

    Raises:
        CheckpointError: on every rank, with the same text, if any rank failed. The temporary directory is removed, and
            what was there before is untouched.
    """
    staging = begin_save(directory, rank=rank, gather=gather, alone=alone)
    commit_save(
        staging, lambda: write(staging.path, staging.identity), state=state, rank=rank, world_size=world_size,
        gather=gather, barrier=barrier, references=references,
    )  # fmt: skip


def begin_save(directory: Path, *, rank: int, gather: Callable[[Any], list[Any]], alone: bool = True) -> Staging:
    """Make the temporary directory of a save. Every rank calls it, and then :func:`commit_save`.

    Between the two each rank may write its file when and in which thread it likes; no other save may begin.

    Raises:
        CheckpointError: as :func:`save_written`.
    """
    begun = _together(rank, gather, directory, lambda: _begin(directory, alone=alone) if rank == 0 else None)
    fault_point("save.begin")
    return next(staging for staging in begun if staging)


def commit_save(
    staging: Staging,
    written: Callable[[], WrittenShard],
    *,
    state: Mapping[str, Any],
    rank: int,
    world_size: int,
    gather: Callable[[Any], list[Any]],
    barrier: Callable[[], None],
    references: Sequence[str] = (),
) -> None:
    """Wait for every rank's file and give the checkpoint its name. Every rank calls it.

    Args:
        staging: what :func:`begin_save` returned.
        written: writes this rank's file, or waits until it is written; what it raises is every rank's error.
        state: as for :func:`save_written`, and so all that follows.
        rank: of this process.
        world_size: number of ranks that the checkpoint is of.
        gather: every rank's picklable value in rank order, on every rank.
        barrier: returns when every rank has called it.
        references: names of sibling checkpoints this one needs.

    Raises:
        CheckpointError: as :func:`save_written`.
    """
    directory = staging.directory
    try:
        shards = _together(rank, gather, directory, written)
        fault_point("save.written")

        def commit() -> None:
            if rank == 0:
                needed = {name: read_manifest(settled(directory.parent / name)).identity for name in references}
                _prepare(staging.path, _manifest(shards, staging.identity, world_size, needed, state))
            fault_point("save.manifest")
            if rank == 0:
                publish(staging.path, directory)

        _together(rank, gather, directory, commit)
    except (CheckpointError, KeyboardInterrupt):
        if rank == 0:
            shutil.rmtree(staging.path, ignore_errors=True)
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


def _begin(directory: Path, *, alone: bool) -> Staging:
    root = directory.parent
    make_directory(root)
    clean(root, None if alone else directory.name)
    identity = uuid.uuid4().hex
    staging = root / f".tmp-{directory.name}-{identity[:8]}"
    staging.mkdir()
    return Staging(directory=directory, path=staging, identity=identity)


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
