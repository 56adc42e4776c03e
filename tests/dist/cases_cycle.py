"""Whole runs of the cycle, several in one process group, and what they leave alive."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle import live
from ds_vcycle.cycle.runner import run_training
from ds_vcycle.parallel import init_distributed
from ds_vcycle.sharding.zero import Engine, fragments
from tests.memory import resident_bytes, return_what_is_freed


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended, and what starting it once more in the same directory said.

    ``unlike``: replicated parameters whose masters differed between tensor-parallel ranks when an engine was released.
    """

    ended: str
    again: str
    unlike: list[str]


def runs(configs: dict[str, RunConfig]) -> dict[str, Outcome]:
    """Run every configuration to its end."""
    init_distributed("cpu")
    gc.freeze()  # each collection would otherwise walk everything torch and Megatron have imported
    return {name: _run(config) for name, config in configs.items()}


def _run(config: RunConfig) -> Outcome:
    again, unlike, original = "", [], live.free

    def checked(engine: Engine) -> None:
        unlike.extend(_unlike(engine))
        original(engine)

    live.free = checked
    try:
        ended = run_training(config)
    finally:
        live.free = original
    try:
        run_training(config)
    except UserError as error:
        again = str(error)
    return Outcome(ended=ended, again=again, unlike=unlike)


def _unlike(engine: Engine) -> list[str]:
    """The replicated parameters that this rank's tensor-parallel peers hold otherwise."""
    split = {name for weight, name in engine.param_names.items() if getattr(weight, "tensor_model_parallel", False)}
    mine = {f.name: f.master.numpy() for f in fragments(engine) if f.name not in split}
    peers: list[Any] = [None] * engine.mpu.get_model_parallel_world_size()
    dist.all_gather_object(peers, mine, group=engine.mpu.get_model_parallel_group())
    return [name for name, value in mine.items() if any((peer[name] != value).any() for peer in peers)]


@dataclass(kw_only=True)
class Census:
    """Taken before each engine is built, when none must be alive, and at the end.

    ``alive``: parts of past engines still alive; ``shells``: at the end, engines (emptied ones) that are.
    """

    past: list[weakref.ref[Any]] = field(default_factory=list)
    engines: list[weakref.ref[Any]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    shells: int = 0

    def count(self) -> None:
        """Note what lives and what is open now."""
        self.alive.append(_living(self.past))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(len(os.listdir("/proc/self/task")))
        self.resident.append(resident_bytes())

    def watch(self, engine: Engine) -> None:
        """Remember an engine weakly, with all that it holds."""
        parts = [engine.module, engine.optimizer, engine.basic_optimizer, *engine.module.parameters()]
        self.past += [weakref.ref(part) for part in (*parts, *(f.master for f in fragments(engine)))]
        self.engines.append(weakref.ref(engine))

    def end(self) -> Census:
        """The last count, without references."""
        gc.collect()
        self.count()
        self.shells = _living(self.engines)
        return replace(self, past=[], engines=[])


def leaks(configs: dict[str, RunConfig]) -> dict[str, Census]:
    """Run every configuration under a census."""
    init_distributed("cpu")
    gc.freeze()
    return_what_is_freed()
    return {name: _counted(config) for name, config in configs.items()}


def _counted(config: RunConfig) -> Census:
    census, build = Census(), live.build_engine

    def watched(*args: Any) -> Engine:
        census.count()
        engine = build(*args)
        census.watch(engine)
        return engine

    live.build_engine = watched
    try:
        run_training(config)
    finally:
        live.build_engine = build
    return census.end()


def _living(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)
