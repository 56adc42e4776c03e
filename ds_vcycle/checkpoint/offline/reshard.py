"""``ds-vcycle convert --tp --dp --zero``: a checkpoint rewritten into the fragments another layout holds.

Any layout reads any checkpoint; what is gained is that each rank of the new one reads its own file only, front to back.
Nothing is rounded or rearranged but fragments: masters, moments, Adam's step, the position, the parked levels and the
counters are those of the source, bit for bit. At most one fragment is in memory at a time.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from ds_vcycle.checkpoint.manifest import describe
from ds_vcycle.checkpoint.offline.processes import ALONE, Processes, together
from ds_vcycle.checkpoint.offline.relayout import TargetLayout, lowered_micro_batches, relaid, target_layout
from ds_vcycle.checkpoint.offline.streamed import AnnouncedFragment, write_streamed
from ds_vcycle.checkpoint.offline.target import WrittenForm, check_target
from ds_vcycle.checkpoint.reader import Checkpoint, open_checkpoint
from ds_vcycle.checkpoint.recorded import locate_checkpoint, recorded
from ds_vcycle.checkpoint.retention import clean, make_directory, publish, set_latest, settled, sync_directory
from ds_vcycle.checkpoint.store import KEYS, WrittenShard, is_writer, save_written
from ds_vcycle.config import RunConfig
from ds_vcycle.levels import Level, resolve_levels
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.placement import Layout, layout_of, rank_placements

Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharded:
    """What was written: a run directory to resume from, or (of no run's checkpoint) a checkpoint."""

    directory: Path
    checkpoint: Path
    layout: Layout
    parked: tuple[str, ...]
    random_states: bool
    is_run: bool
    micro_batches: tuple[str, ...] = ()

    def __str__(self) -> str:
        layout = self.layout
        ranks = f"{layout.world_size} ranks (TP {layout.tp} x DP {layout.dp}, ZeRO {layout.zero_stage})"
        parked = f", parked: {', '.join(self.parked)}" if self.parked else ""
        lines = [f"written: {self.checkpoint}, for {ranks}{parked}"]
        if self.micro_batches:
            lines.append(f"so that the global batch divides: {', '.join(self.micro_batches)}")
        if self.is_run:
            how = "its random states kept" if self.random_states else "random generators seeded anew"
            start = "ds-vcycle"
            if layout.world_size > 1:
                start = f"deepspeed --num_gpus {layout.world_size} --module ds_vcycle"
            lines.append(f"go on, {how}: {start} train --config {self.directory / 'config.yaml'} --resume")
        else:
            lines.append(f"a run starts from it with training.init_from={self.checkpoint}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One checkpoint to rewrite: the level in it, what its parameters are there, and what is recorded."""

    source: Checkpoint
    level: Level
    layout: Layout
    state: Mapping[str, Any]

    @property
    def same_ranks(self) -> bool:
        """Whether each rank's random states mean the same there."""
        theirs = self.source.world_size, self.source.tensor_parallel
        return theirs == (self.layout.world_size, self.layout.tp)

    @property
    def table(self) -> tuple[Parameter, ...]:
        """The parameters, padded as the new layout pads them."""
        missing = self.source.state.get("missing", ())
        return tuple(parameter for parameter in parameters(self.level.shape) if parameter.name not in missing)

    def fragments(self, rank: int) -> list[AnnouncedFragment]:
        """What a rank of the new layout writes."""
        (dp_rank, tp_rank), layout = self.layout.coordinates(rank), self.layout
        table = {parameter.name: parameter for parameter in self.table}
        found = []
        for held in rank_placements(tuple(table.values()), layout, rank):
            parameter = table[held.name]
            if not is_writer(parameter, tp_rank=tp_rank, dp_rank=dp_rank, zero_stage=layout.zero_stage):
                continue
            stored = describe(parameter, layout.tp)
            length = stored.real_length(tp_rank if stored.tp > 1 else 0, held.start, held.length)
            kinds = self.source.keys(parameter)
            keys = tuple(key for key in KEYS if key in kinds)
            if length:
                found.append(
                    AnnouncedFragment(
                        parameter=parameter, start=held.start, length=length, keys=keys, tp=layout.tp, tp_rank=tp_rank
                    )
                )
        return found

    def tensors(self, fragments: Sequence[AnnouncedFragment]) -> Iterator[Tensor]:
        """Their tensors, each read when it is asked for."""
        for f in fragments:
            for key in f.keys:
                yield self.source.read(f.parameter, tp=f.tp, tp_rank=f.tp_rank, start=f.start, length=f.length, key=key)


def reshard(
    source: Path, to: Path, target: TargetLayout, *, overwrite: bool = False, processes: Processes = ALONE,
    advance: Advance = lambda done, total: None,
) -> Resharded:  # fmt: skip
    """Rewrite a checkpoint for another layout. Called by every process, each of which writes some ranks' files.

    Of a run's checkpoint a run directory is made: the checkpoint, the parked levels it needs, ``latest``, the
    configuration with the layout for all levels, and the metrics so far. It appears complete or not at all.

    Args:
        source: a checkpoint, a run directory (its latest), or RUN@STEP.
        to: directory to write.
        target: the layout; what it leaves open stays.
        overwrite: replace what an earlier call made there.
        processes: this one alone, or those of a launch.
        advance: told of the elements done and to do in this process.

    Raises:
        UserError: on every process, with the same text; nothing is left behind.
    """
    with ExitStack() as stack:

        def prepare() -> tuple[list[_Job], RunConfig]:
            checkpoint = stack.enter_context(open_checkpoint(locate_checkpoint(source)))
            form: WrittenForm = "run" if "position" in checkpoint.state else "store"
            check_target(to, [checkpoint], overwrite=overwrite, form=form)
            return _jobs(checkpoint, target, to, stack)

        jobs, config = together(processes, prepare)
        *_, job = jobs
        is_run = "position" in job.state
        done = _counter(jobs, processes, advance)
        if is_run:
            _write_run(to, jobs, config, processes, done)
        else:
            _write(to, job, (), processes, done, alone=False)
        return Resharded(
            directory=to, checkpoint=to / "checkpoints" / job.source.directory.name if is_run else to,
            layout=job.layout, parked=tuple(parked.source.directory.name for parked in jobs[:-1]),
            random_states=job.same_ranks and bool(job.source.extras(0)), is_run=is_run,
            micro_batches=lowered_micro_batches(recorded(job.source).config, config) if is_run else (),
        )  # fmt: skip


def _jobs(checkpoint: Checkpoint, target: TargetLayout, to: Path, stack: ExitStack) -> tuple[list[_Job], RunConfig]:
    """The parked levels first, the checkpoint last; all checks that need no tensor are done."""
    held = recorded(checkpoint)
    before = layout_of(held.level, held.config, checkpoint.world_size)
    wanted = target_layout(target, before)
    is_run = "position" in checkpoint.state
    config = relaid(held.config, wanted, run_dir=to if is_run else held.config.run_dir, where=checkpoint.directory)
    levels = resolve_levels(config)
    world = wanted.tp * wanted.dp
    origin = {"verb": "convert", "directory": str(checkpoint.directory), "identity": checkpoint.identity}
    state = {**checkpoint.state, "config": config.model_dump(mode="json"), "origin": origin}
    jobs = []
    for name in checkpoint.manifest.references:
        parked = stack.enter_context(open_checkpoint(settled(checkpoint.directory.parent / name)))
        level = levels[parked.state["parked_level"] - 1]
        jobs.append(_Job(source=parked, level=level, layout=layout_of(level, config, world), state=parked.state))
    level = levels[held.level.index - 1]
    jobs.append(_Job(source=checkpoint, level=level, layout=layout_of(level, config, world), state=state))
    for job in jobs:
        job.source.expect(job.table)
    return jobs, config


def _write_run(
    to: Path, jobs: Sequence[_Job], config: RunConfig, processes: Processes, done: Callable[[int], None]
) -> None:
    """A whole run directory under a temporary name, then its own."""

    def begin() -> Path:
        if processes.rank == 0:
            make_directory(to.parent)
            clean(to.parent, to.name)
        return to.parent / f".tmp-{to.name}-{uuid.uuid4().hex[:8]}"

    staging = next(iter(processes.gather(together(processes, begin))))
    try:
        for job in jobs:
            name = job.source.directory.name
            _write(staging / "checkpoints" / name, job, tuple(job.source.manifest.references), processes, done)
        together(processes, lambda: _finish(staging, to, jobs[-1], config) if processes.rank == 0 else True)
    except BaseException:
        if processes.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    processes.barrier()


def _finish(staging: Path, to: Path, job: _Job, config: RunConfig) -> bool:
    set_latest(staging / "checkpoints", job.source.directory.name)
    texts = {"config.yaml": yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode()}
    metrics = job.source.directory.parent.parent / "metrics.jsonl"
    if metrics.is_file():
        texts[metrics.name] = metrics.read_bytes()
    for name, text in texts.items():
        with (staging / name).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(staging)
    publish(staging, to)
    return True


def _write(
    directory: Path, job: _Job, references: Sequence[str], processes: Processes, done: Callable[[int], None], *,
    alone: bool = True,
) -> None:  # fmt: skip
    def write(staging: Path, identity: str) -> WrittenShard:
        shards = [_write_rank(staging, identity, job, rank, done) for rank in _ranks(job, processes)]
        described = {parameter.name: describe(parameter, job.layout.tp) for parameter in job.table}
        return WrittenShard(parameters=described, files=tuple(file for shard in shards for file in shard.files))

    save_written(
        directory, write, state=job.state, rank=processes.rank, world_size=job.layout.world_size,
        gather=processes.gather, barrier=processes.barrier, references=references, alone=alone,
    )  # fmt: skip


def _write_rank(staging: Path, identity: str, job: _Job, rank: int, done: Callable[[int], None]) -> WrittenShard:
    fragments = job.fragments(rank)
    extras = job.source.extras(rank) if job.same_ranks else {}
    return write_streamed(staging, identity, rank, fragments, _counted(job.tensors(fragments), done), extras)


def _counted(tensors: Iterator[Tensor], done: Callable[[int], None]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        done(tensor.numel())


def _ranks(job: _Job, processes: Processes) -> range:
    """The ranks of the new layout whose files this process writes."""
    return range(processes.rank, job.layout.world_size, processes.world_size)


def _counter(jobs: Sequence[_Job], processes: Processes, advance: Advance) -> Callable[[int], None]:
    announced = (f for job in jobs for rank in _ranks(job, processes) for f in job.fragments(rank))
    total, done = sum(f.length * len(f.keys) for f in announced), 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        advance(done, total)

    return count
