"""Saving a run's state to the shard store, and what a resumed run takes from there."""

from __future__ import annotations

import platform
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_vcycle
from ds_vcycle.checkpoint.recorded import missing_parameters
from ds_vcycle.checkpoint.store import (
    Checkpoint,
    FlatRange,
    StoredFragment,
    is_writer,
    open_checkpoint,
    save,
)
from ds_vcycle.config import EmbeddingPolicy, RunConfig
from ds_vcycle.cycle.phases import Phase, to_records
from ds_vcycle.cycle.position import Position, position_from
from ds_vcycle.cycle.transition import Fragments, Staged, common_step
from ds_vcycle.levels import Level
from ds_vcycle.model.initial import initial_slice
from ds_vcycle.parallel import Mesh, mesh_for, together
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.placement import Layout, layout_of, rank_placements
from ds_vcycle.sharding.zero import Engine, Fragment, counters, fragments


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a checkpoint held for this rank; no random states if other ranks or another degree wrote it.

    ``average``: of the weights, where the phase keeps one.
    """

    directory: Path
    position: Position
    staged: Staged
    parked: dict[int, Fragments]
    random_states: dict[str, Tensor] | None
    counters: Mapping[str, int]
    average: Fragments | None = None


def versions() -> dict[str, str]:
    """What the run was made with."""
    names = ("torch", "deepspeed", "megatron-core")
    return {"ds-vcycle": ds_vcycle.__version__, "python": platform.python_version()} | {n: version(n) for n in names}


def engine_fragments(
    engine: Engine, level: Level, layout: Layout, mesh: Mesh, average: Fragments | None = None
) -> list[StoredFragment]:
    """The masters, the moments and any average that this rank is the writer of, as they are: views, on the device."""
    held = {fragment.name: _tensors(fragment) for fragment in fragments(engine)}
    for name, value in (average or {}).items():
        held[name]["average"] = value
    return list(_stored(held, level, layout, mesh))


def engine_state(engine: Engine, mesh: Mesh) -> dict[str, Any]:
    """Adam's step and DeepSpeed's counters, for a checkpoint's record. Collective."""
    return {"adam_step": common_step(engine, mesh), "counters": counters(engine)}


def save_parked(directory: Path, parked: Fragments, level: Level, layout: Layout, mesh: Mesh) -> None:
    """Write a parked level once; the checkpoints of the coarse levels refer to it by name. Collective."""
    tensors = {name: {"master": value} for name, value in parked.items()}
    save(
        directory,
        fragments=_stored(tensors, level, layout, mesh),
        extras={},
        state={"parked_level": level.index},
        rank=mesh.rank,
        world_size=mesh.world_size,
        gather=lambda value: gather_objects(mesh, value),
        barrier=lambda: dist.barrier(group=mesh.host_group),
    )


def run_state(config: RunConfig, phases: Sequence[Phase], position: Position) -> dict[str, Any]:
    """What a checkpoint records beside tensors: the position, the phase list, the configuration, versions."""
    return {
        "position": position.record(),
        "phases": to_records(phases),
        "config": config.model_dump(mode="json"),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def all_finite(engine: Engine) -> bool:
    """Whether this rank's masters and moments are numbers throughout."""
    return all(bool(value.isfinite().all()) for held in fragments(engine) for value in _tensors(held).values())


def read_run(checkpoint: Checkpoint, config: RunConfig, levels: Sequence[Level]) -> Restored:
    """Read what a checkpoint holds for this rank, checksums verified. Collective: all ranks return, or all raise.

    Raises:
        CheckpointError: on every rank, naming the file and the parameter.
    """
    with checkpoint:
        return together(lambda: _read_run(checkpoint, config, levels))


def read_initial(checkpoint: Checkpoint, config: RunConfig, level: Level) -> Staged:
    """What ``training.init_from`` gives this rank: weights and, under ``operators.moments=map``, moments. Collective.

    Heads that a converted model came without are drawn from the seed, as all weights of a run without ``init_from``.

    Raises:
        CheckpointError: on every rank, naming the file and the parameter.
    """
    with checkpoint:
        held = together(lambda: _staged(checkpoint, config, level))
    drawn = initial_fragments(config, level, missing_parameters(checkpoint))
    if drawn or config.operators.moments == "reset":
        return Staged(master=held.master | drawn)
    return held


def initial_fragments(config: RunConfig, level: Level, names: Container[str] | None = None) -> Fragments:
    """This rank's fragments of a level (of the parameters ``names`` only) at their initial values from the seed."""
    mesh = mesh_for(level.tensor_parallel)
    ranges = _ranges(parameters(level.shape), layout_of(level, config, mesh.world_size), mesh)
    held: Fragments = {}
    for name, at in ranges.items():
        if names is None or name in names:
            whole = initial_slice(
                at.parameter, seed=config.training.seed, std=config.model.init_std, layers=level.shape.layers,
                tp_size=mesh.tp_size, tp_rank=mesh.tp_rank,
            )  # fmt: skip
            held[name] = whole.reshape(-1)[at.start : at.start + at.length].clone()
    return held


def fragments_of(slices: Mapping[str, Tensor], level: Level, layout: Layout, mesh: Mesh) -> Fragments:
    """This rank's fragments of a level, on the host, from its tensor-parallel slices of all parameters."""
    held = rank_placements(parameters(level.shape), layout, mesh.rank)
    return {p.name: slices[p.name].reshape(-1)[p.start : p.start + p.length].cpu().clone() for p in held}


def read_parked(directory: Path, config: RunConfig, level: Level) -> Fragments:
    """A parked level's fragments of this rank from the disk. Collective: all ranks return, or all raise.

    Raises:
        CheckpointError: on every rank, naming the file and the parameter.
    """
    return together(lambda: _parked(directory, config, level))


def _read_run(checkpoint: Checkpoint, config: RunConfig, levels: Sequence[Level]) -> Restored:
    position = position_from(checkpoint.state["position"])
    level = levels[position.level - 1]
    root = checkpoint.directory.parent
    parked: dict[int, Fragments] = {}
    for index, name in position.parked.items():
        if config.cycle.park == "host" and index < position.level:  # a teacher is read when it is needed
            parked[index] = _parked(root / name, config, levels[index - 1])
        else:  # it is read at the refine, perhaps days from now: what is damaged is told now
            _verify_parked(root / name, config, levels[index - 1])
    same_ranks = (checkpoint.world_size, checkpoint.tensor_parallel) == (dist.get_world_size(), level.tensor_parallel)
    return Restored(
        directory=checkpoint.directory,
        position=position,
        staged=_staged(checkpoint, config, level),
        parked=parked,
        random_states=(checkpoint.extras(dist.get_rank()) or None) if same_ranks else None,
        counters=checkpoint.state["counters"],
        average=_average(checkpoint, config, level),
    )


def _average(checkpoint: Checkpoint, config: RunConfig, level: Level) -> Fragments | None:
    table = parameters(level.shape, config.operators.embedding)
    if "average" not in checkpoint.keys(table[0]):
        return None
    mesh = mesh_for(level.tensor_parallel)
    return _read(checkpoint, _ranges(table, layout_of(level, config, mesh.world_size), mesh), "average")


def _parked(directory: Path, config: RunConfig, level: Level) -> Fragments:
    with open_checkpoint(directory) as checkpoint:
        return _staged(checkpoint, config, level).master


def _verify_parked(directory: Path, config: RunConfig, level: Level) -> None:
    mesh = mesh_for(level.tensor_parallel)
    with open_checkpoint(directory) as checkpoint:
        layout = layout_of(level, config, mesh.world_size)
        checkpoint.verify(_expected(checkpoint, level, layout, mesh, config.operators.embedding).values())


def _staged(checkpoint: Checkpoint, config: RunConfig, level: Level) -> Staged:
    mesh = mesh_for(level.tensor_parallel)
    layout = layout_of(level, config, mesh.world_size)
    return read_staged(checkpoint, level, layout, mesh, config.operators.embedding)


def read_staged(checkpoint: Checkpoint, level: Level, layout: Layout, mesh: Mesh, embedding: EmbeddingPolicy) -> Staged:
    """This rank's fragments of a checkpoint, on the host; each is compared with its checksum as it is read.

    Raises:
        CheckpointError: something is damaged, missing or of another shape; names the file and the parameter.
    """
    ranges = _expected(checkpoint, level, layout, mesh, embedding)
    step = int(checkpoint.state.get("adam_step", 0))
    read = {key: _read(checkpoint, ranges, key) for key in ("master", *(("exp_avg", "exp_avg_sq") if step else ()))}
    return Staged(master=read["master"], exp_avg=read.get("exp_avg"), exp_avg_sq=read.get("exp_avg_sq"), step=step)


def _expected(
    checkpoint: Checkpoint, level: Level, layout: Layout, mesh: Mesh, embedding: EmbeddingPolicy
) -> dict[str, FlatRange]:
    """What this rank reads of a checkpoint, which must hold the level's parameters and no others."""
    table, absent = parameters(level.shape, embedding), missing_parameters(checkpoint)
    checkpoint.expect(parameter for parameter in table if parameter.name not in absent)
    ranges = {name: at for name, at in _ranges(table, layout, mesh).items() if name not in absent}
    return ranges


def gather_objects(mesh: Mesh, value: Any) -> list[Any]:
    """Every rank's picklable value in rank order, on every rank. Collective."""
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, value, group=mesh.host_group)
    return found


def _stored(
    tensors: Mapping[str, Mapping[str, Tensor]], level: Level, layout: Layout, mesh: Mesh
) -> Iterable[StoredFragment]:
    table = {parameter.name: parameter for parameter in parameters(level.shape)}
    for placement in rank_placements(tuple(table.values()), layout, mesh.rank):
        parameter = table[placement.name]
        if is_writer(parameter, tp_rank=mesh.tp_rank, dp_rank=mesh.dp_rank, zero_stage=layout.zero_stage):
            yield StoredFragment(
                parameter=parameter, tp=layout.tp, tp_rank=mesh.tp_rank, start=placement.start,
                length=placement.length, tensors=tensors[placement.name],
            )  # fmt: skip


def _tensors(fragment: Fragment) -> dict[str, Tensor]:
    held = {"master": fragment.master, "exp_avg": fragment.exp_avg, "exp_avg_sq": fragment.exp_avg_sq}
    return {key: value.detach() for key, value in held.items() if value is not None}


def _ranges(table: Sequence[Parameter], layout: Layout, mesh: Mesh) -> dict[str, FlatRange]:
    by_name = {parameter.name: parameter for parameter in table}
    return {
        p.name: FlatRange(parameter=by_name[p.name], tp=layout.tp, tp_rank=mesh.tp_rank, start=p.start, length=p.length)
        for p in rank_placements(table, layout, mesh.rank)
    }


def _read(checkpoint: Checkpoint, ranges: Mapping[str, FlatRange], key: str) -> Fragments:
    return {
        name: checkpoint.read(r.parameter, tp=r.tp, tp_rank=r.tp_rank, start=r.start, length=r.length, key=key)
        for name, r in ranges.items()
    }
