"""What to change when a level does not fit into a GPU's memory: keys and values, tried by formula. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from ds_vcycle.config import ConfigError, RunConfig
from ds_vcycle.cycle.memory import rank_memory
from ds_vcycle.cycle.network import Nodes
from ds_vcycle.levels import Level, data_parallel

_SMALL_BUCKET = 50_000_000
_MOST_NODES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The cluster, and what a level's peak may take of a GPU."""

    nodes: Nodes
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A level under changed keys; ``text`` names them."""

    text: tuple[str, ...]
    level: Level
    config: RunConfig


Change: TypeAlias = Callable[[Setting, Room], Iterator[Setting]]


def changes_that_fit(level: Level, config: RunConfig, room: Room) -> tuple[str, ...]:
    """Single changes under which the level fits; else the shortest run of them together; else so many more nodes."""
    start = Setting(text=(), level=level, config=config)
    single = [found for change in _CHANGES if (found := _first_that_fits(change(start, room), room))]
    if single:
        return tuple(_said(found, room) for found in single)
    combined = start
    for change in _CHANGES:
        strongest = combined
        for found in change(combined, room):
            if _peak(found, room) is None:
                continue
            strongest = found
            if _fits(found, room):
                return (_said(found, room),)
        combined = strongest
    return (_more_nodes(start, combined, room),)


def _buckets(now: Setting, room: Room) -> Iterator[Setting]:
    zero = dict(now.config.deepspeed.get("zero_optimization") or {})
    if now.level.zero_stage and zero.get("reduce_bucket_size", 10 * _SMALL_BUCKET) > _SMALL_BUCKET:
        extras = now.config.deepspeed | {"zero_optimization": zero | {"reduce_bucket_size": _SMALL_BUCKET}}
        text = f"deepspeed.zero_optimization.reduce_bucket_size={_SMALL_BUCKET}"
        yield replace(now, text=(*now.text, text), config=now.config.model_copy(update={"deepspeed": extras}))


def _zero_stages(now: Setting, room: Room) -> Iterator[Setting]:
    for stage in range(now.level.zero_stage + 1, 4):
        key = _key(now, "zero_stage", "training")
        yield replace(now, text=(*now.text, f"{key}={stage}"), level=replace(now.level, zero_stage=stage))


def _recompute(now: Setting, room: Room) -> Iterator[Setting]:
    if now.config.model.recompute != "full":
        model = now.config.model.model_copy(update={"recompute": "full"})
        config = now.config.model_copy(update={"model": model})
        yield replace(now, text=(*now.text, "model.recompute=full"), config=config)


def _micro_batches(now: Setting, room: Room) -> Iterator[Setting]:
    for size in range(now.level.micro_batch - 1, 0, -1):
        key = _key(now, "micro_batch", "training")
        yield replace(now, text=(*now.text, f"{key}={size}"), level=replace(now.level, micro_batch=size))


def _tensor_parallel(now: Setting, room: Room) -> Iterator[Setting]:
    shape, degree = now.level.shape, 2 * now.level.tensor_parallel
    while degree <= room.nodes.gpus:
        if room.nodes.gpus % degree == 0 and not (shape.kv_groups % degree or shape.ffn % degree):
            key = _key(now, "tensor_parallel", "model")
            level = replace(now.level, tensor_parallel=degree)
            yield replace(now, text=(*now.text, f"{key}={degree}"), level=level)
        degree *= 2


# In the order of what they cost: nothing, traffic, computing, smaller matrix products.
_CHANGES: tuple[Change, ...] = (_buckets, _zero_stages, _recompute, _micro_batches, _tensor_parallel)


def _first_that_fits(settings: Iterator[Setting], room: Room) -> Setting | None:
    return next((setting for setting in settings if _fits(setting, room)), None)


def _fits(setting: Setting, room: Room) -> bool:
    peak = _peak(setting, room)
    return peak is not None and peak <= room.bytes


def _peak(setting: Setting, room: Room) -> int | None:
    """The level's peak in bytes; None if batch or ranks do not divide so."""
    try:
        ranks, micro_batches = data_parallel(
            setting.level, world_size=room.nodes.ranks, global_batch=setting.config.training.global_batch
        )
    except ConfigError:
        return None
    return rank_memory(setting.level, setting.config, data_parallel=ranks, micro_batches=micro_batches).peak


def _said(setting: Setting, room: Room) -> str:
    peak = _peak(setting, room)
    assert peak is not None
    return f"{' '.join(setting.text)}: {peak / 1e9:.1f} GB"


def _more_nodes(start: Setting, strongest: Setting, room: Room) -> str:
    """The smallest doubling of the nodes on which the level fits, under all changes if it takes them."""
    nodes = room.nodes
    while nodes.count < _MOST_NODES:
        nodes = replace(nodes, count=2 * nodes.count)
        larger = replace(room, nodes=nodes)
        for setting in (start, strongest):
            if _fits(setting, larger):
                return f"--nodes {nodes.count}{' with ' * bool(setting.text)}{_said(setting, larger)}"
    return "nothing that is tried here; make the level smaller"


def _key(setting: Setting, name: str, section: str) -> str:
    """The key that decides: the level's own entry if the file has one, else the one for all levels."""
    index = setting.level.index
    return f"levels.{index - 1}.{name}" if len(setting.config.levels) >= index else f"{section}.{name}"
