"""Everything about a run that can be refused before any work: levels, phases, plans, batches, data, run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_vcycle.config import ConfigError, RunConfig
from ds_vcycle.cycle.phases import Phase, Train
from ds_vcycle.cycle.schedule import expand, mapping_of
from ds_vcycle.data.samples import Samples, open_samples
from ds_vcycle.levels import Level, data_parallel, resolve_levels
from ds_vcycle.model.options import transformer_config
from ds_vcycle.model.spec import uses_transformer_engine
from ds_vcycle.operators.plan import TransitionPlan, plan_transition
from ds_vcycle.parallel import Mesh
from ds_vcycle.train.deepspeed_config import deepspeed_config
from ds_vcycle.train.engine import check_settings


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that has been checked. ``transitions`` by the fine level's index."""

    config: RunConfig
    levels: tuple[Level, ...]
    phases: tuple[Phase, ...]
    transitions: Mapping[int, TransitionPlan]
    training: Samples
    held_out: Samples

    def level(self, index: int) -> Level:
        """Level ``index``, counting from 1."""
        return self.levels[index - 1]


def check_run(config: RunConfig, world_size: int) -> RunPlan:
    """Check all that needs no process group and no weights, and open the data.

    Raises:
        UserError: the first thing that is wrong, with the key or file, the value and the remedy.
    """
    levels = resolve_levels(config)
    phases = expand(config)
    for level in levels:
        data_parallel(level, world_size=world_size, global_batch=config.training.global_batch)
        deepspeed_config(level, config, world_size)
    transitions = _transitions(config, levels, phases)
    held_out = open_samples(config.data, config.model, "validation")
    if config.evaluation.samples > len(held_out):
        raise ConfigError(
            f"evaluation.samples={config.evaluation.samples}, but the validation split of {_paths(config)} has "
            f"{len(held_out)}; set evaluation.samples={len(held_out)}, or prepare more text or a larger share for it"
        )
    return RunPlan(
        config=config,
        levels=levels,
        phases=phases,
        transitions=transitions,
        training=open_samples(config.data, config.model, "train"),
        held_out=held_out,
    )


def check_models(plan: RunPlan, meshes: Mapping[int, Mesh]) -> None:
    """Check what depends on the device and the libraries: Megatron's and DeepSpeed's options of every level.

    Args:
        plan: a run that :func:`check_run` has passed.
        meshes: the mesh of each tensor-parallel degree among the levels.

    Raises:
        ConfigError: an option that cannot be had here, or a value that a library refuses.
    """
    config = plan.config
    for level in plan.levels:
        mesh = meshes[level.tensor_parallel]
        engine = uses_transformer_engine(config.model, mesh)
        transformer_config(level, config.model, mesh=mesh, transformer_engine=engine)
        check_settings(level, config, mesh)


def check_run_dir(run_dir: Path, *, resuming: bool) -> None:
    """Refuse to mix two runs in one directory.

    Raises:
        ConfigError: the directory holds a run and ``--resume`` is not given, or it is a file.
    """
    for path in (run_dir, *run_dir.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run_dir={run_dir}: {path} is a file; set run_dir to a directory")
    held = [name for name in ("metrics.jsonl", "checkpoints") if (run_dir / name).exists()]
    if held and not resuming:
        raise ConfigError(
            f"run_dir={run_dir} already holds a run ({', '.join(held)}); continue it with --resume, set another "
            "run_dir, or remove the directory"
        )


def _paths(config: RunConfig) -> str:
    return ", ".join(str(blend.path) for blend in config.data.blend)


def _transitions(config: RunConfig, levels: Sequence[Level], phases: Sequence[Phase]) -> dict[int, TransitionPlan]:
    plans = {}
    for phase in phases:
        if isinstance(phase, Train):
            continue
        mapping = mapping_of(phase, levels, config.operators)
        if mapping is not None:
            plans[phase.fine] = plan_transition(levels[phase.fine - 1], *mapping)
    return plans
