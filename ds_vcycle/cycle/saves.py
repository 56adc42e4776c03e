"""The saves of a run: each at once, or written in the background while training goes on; never two at a time.

In the background a save is: a copy of this rank's masters and moments on the host, one thread that writes and syncs
it, and a commit at the first step boundary at which every rank's file is on the disk. All that ranks do together is
done by the main thread, so that no collective of a save can meet one of a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_vcycle.checkpoint.store import (
    Staging,
    StoredFragment,
    WrittenShard,
    begin_save,
    commit_save,
    prune,
    set_latest,
    write_fragments,
)
from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.phases import Phase
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.records import RunRecords
from ds_vcycle.cycle.saving import engine_fragments, engine_state, gather_objects, run_state
from ds_vcycle.cycle.transition import Fragments
from ds_vcycle.faults import fault_point
from ds_vcycle.levels import Level
from ds_vcycle.parallel import Mesh, any_rank, raise_together, together
from ds_vcycle.random_states import rng_state
from ds_vcycle.sharding.placement import layout_of
from ds_vcycle.sharding.zero import Engine
from ds_vcycle.train.metrics import Totals, save_record


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that is on the disk and the latest one.

    ``own_seconds``: from its beginning to then; ``stall_seconds``: how long of these training stood for it.
    """

    position: Position
    own_seconds: float
    stall_seconds: float


@dataclass(kw_only=True, slots=True)
class _Pending:
    """A save that has begun. ``written`` writes this rank's file, or waits until it is written."""

    staging: Staging
    position: Position
    state: Mapping[str, Any]
    mesh: Mesh
    begun: float
    stall: float
    written: Callable[[], WrittenShard]
    future: Future[WrittenShard] | None = None


class Saves:
    """Makes the checkpoints of a run, ``latest`` and the removal of old ones. Every rank calls every method."""

    def __init__(self, config: RunConfig, phases: Sequence[Phase]) -> None:
        self._config = config
        self._phases = phases
        self._root = config.run_dir / "checkpoints"
        self._pending: _Pending | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._host = HostCopy()

    def save(
        self, position: Position, engine: Engine, level: Level, mesh: Mesh, average: Fragments | None = None
    ) -> list[Saved]:
        """Save this position, or begin to; returns what has come onto the disk: an earlier save, and this one.

        ``average``: this rank's fragments of a moving average of the weights, if one is kept.

        Raises:
            CheckpointError: it, or the earlier one, cannot be written; the checkpoints before are as they were.
        """
        finished, begun = self.finish(), time.perf_counter()
        layout = layout_of(level, self._config, mesh.world_size)
        held, extras = engine_fragments(engine, level, layout, mesh, average), rng_state()
        state = run_state(self._config, self._phases, position) | engine_state(engine, mesh)
        staging = begin_save(
            self._root / position.name, rank=mesh.rank, gather=lambda value: gather_objects(mesh, value)
        )
        background = self._config.saving.background
        kept = together(lambda: self._host.copy(held, mesh.device)) if background else held

        def write() -> WrittenShard:
            shard = write_fragments(staging.path, staging.identity, kept, extras, mesh.rank)
            fault_point("save.file")
            return shard

        pending = _Pending(
            staging=staging, position=position, state=state, mesh=mesh, begun=begun, stall=0.0, written=write
        )
        self._pending = pending
        if not background:
            return finished + self.finish()
        pending.future = self._thread.submit(write)
        pending.written = pending.future.result
        pending.stall = time.perf_counter() - begun
        return finished

    def poll(self) -> list[Saved]:
        """At a step boundary: commit the save under way if every rank's file is on the disk, or any rank failed.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        future = self._pending.future if self._pending else None
        if future is None:
            return []
        failed = future.done() and future.exception() is not None
        return self.finish() if any_rank(failed) or not any_rank(not future.done()) else []

    def finish(self) -> list[Saved]:
        """Wait for the save under way, if there is one, and commit it.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        pending, self._pending = self._pending, None
        return [] if pending is None else [self._commit(pending)]

    def close(self) -> None:
        """Let the thread end. What is not committed by now never will be; the next save removes it."""
        self._pending = None
        self._thread.shutdown()

    def _commit(self, pending: _Pending) -> Saved:
        start, mesh = time.perf_counter(), pending.mesh
        commit_save(
            pending.staging, pending.written, state=pending.state, rank=mesh.rank, world_size=mesh.world_size,
            gather=lambda value: gather_objects(mesh, value), barrier=lambda: dist.barrier(group=mesh.host_group),
            references=tuple(pending.position.parked.values()),
        )  # fmt: skip
        error = None
        if mesh.rank == 0:
            try:
                set_latest(self._root, pending.position.name)
                saving = self._config.saving
                prune(self._root, saving.keep_last, keep_phase_ends=saving.keep_phase_ends)
            except ValueError as problem:
                error = problem
        raise_together(error)
        end = time.perf_counter()
        stall = pending.stall + end - (start if pending.future else pending.begun)
        return Saved(position=pending.position, own_seconds=end - pending.begun, stall_seconds=stall)


def record_saves(done: Sequence[Saved], records: RunRecords, totals: Totals) -> None:
    """Write down what has come onto the disk; ``totals``: of now. Collective if there is anything."""
    for saved in done:
        path = f"checkpoints/{saved.position.name}"
        took = {"own_seconds": saved.own_seconds, "stall_seconds": saved.stall_seconds}
        records.write(save_record(saved.position.place, path=path, totals=totals, **took))
        records.settle()


class HostCopy:
    """Memory on the host that fragments are copied into, kept from one save to the next: new memory is slow."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    @torch.no_grad()
    def copy(self, held: Sequence[StoredFragment], device: torch.device) -> list[StoredFragment]:
        """The fragments with their tensors copied; valid until the next call.

        Args:
            held: fragments whose tensors will change.
            device: where they are; from an accelerator they are copied through pinned memory, all at once.
        """
        total = sum(tensor.numel() for fragment in held for tensor in fragment.tensors.values())
        if self._memory.numel() != total:
            self._memory = torch.empty(0)  # first let go of the old
            self._memory = torch.empty(total, pin_memory=device.type == "cuda")
        copies, used = [], 0
        for fragment in held:
            tensors: dict[str, Tensor] = {}
            for key, tensor in fragment.tensors.items():
                tensors[key] = self._memory[used : used + tensor.numel()].copy_(tensor, non_blocking=True)
                used += tensor.numel()
            copies.append(replace(fragment, tensors=tensors))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return copies
