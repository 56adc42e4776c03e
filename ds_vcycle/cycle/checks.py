"""Everything about a run that can be refused before any work: levels, phases, plans, batches, data, run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_vcycle.config import ConfigError, RunConfig
from ds_vcycle.cycle.schedule import Coalesce, Phase, Refine, expand
from ds_vcycle.data.samples import Samples, open_samples
from ds_vcycle.levels import Level, data_parallel, resolve_levels
from ds_vcycle.operators.plan import TransitionPlan, plan_transition
from ds_vcycle.train.deepspeed_config import deepspeed_config


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
    return RunPlan(
        config=config,
        levels=levels,
        phases=phases,
        transitions=_transitions(config, levels, phases),
        training=open_samples(config.data, config.model, "train"),
        held_out=open_samples(config.data, config.model, "validation"),
    )


def check_run_dir(run_dir: Path, *, resuming: bool) -> None:
    """Refuse to mix two runs in one directory.

    Raises:
        ConfigError: the directory holds a run and ``--resume`` is not given, or it is a file.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={run_dir} is a file; set run_dir to a directory")
    held = [name for name in ("metrics.jsonl", "checkpoints") if (run_dir / name).exists()]
    if held and not resuming:
        raise ConfigError(
            f"run_dir={run_dir} already holds a run ({', '.join(held)}); continue it with --resume, set another "
            "run_dir, or remove the directory"
        )


def _transitions(config: RunConfig, levels: Sequence[Level], phases: Sequence[Phase]) -> dict[int, TransitionPlan]:
    operators = config.operators
    fine_levels = {phase.fine for phase in phases if isinstance(phase, Coalesce | Refine)}
    return {
        fine: plan_transition(
            levels[fine - 1], levels[fine], embedding=operators.embedding, depth_residual=operators.depth_residual
        )
        for fine in sorted(fine_levels)
    }
