"""What the steps of a phase cost in FLOPs: the run counts them so, and the plan foretells them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vcycle.baselines.inheritance import teachers_share
from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.phases import Phase, Train, steps_at
from ds_vcycle.levels import Level
from ds_vcycle.train.flops import Flops, forward_flops, predicted_positions, step_flops


def step_cost(phase: Train, step: int, levels: Sequence[Level], config: RunConfig) -> Flops:
    """FLOPs of the step that follows ``step`` steps of the phase: of its level, and a teacher's forward pass."""
    own = level_cost(levels[phase.level - 1], config)
    if phase.teacher is None or not teachers_share(step, phase.distill_steps):
        return own
    shape = levels[phase.teacher - 1].shape
    positions = predicted_positions(shape, config.data.mask_probability)
    taught = forward_flops(shape, samples=config.training.global_batch, predicted_positions=positions)
    return Flops(blocks=own.blocks + taught.blocks, head=own.head + taught.head)


def level_cost(level: Level, config: RunConfig) -> Flops:
    """FLOPs of a step of a level alone, forward and backward."""
    positions = predicted_positions(level.shape, config.data.mask_probability)
    return step_flops(level.shape, samples=config.training.global_batch, predicted_positions=positions)


def phase_cost(phase: Phase, levels: Sequence[Level], config: RunConfig) -> Flops:
    """FLOPs of all steps of a phase, of what a growth method learns too: forward and backward at the fine level."""
    if not isinstance(phase, Train):
        index, steps = steps_at(phase)
        cost = level_cost(levels[index - 1], config)
        return Flops(blocks=steps * cost.blocks, head=steps * cost.head)
    taught = min(phase.steps, phase.distill_steps)
    first, last = (step_cost(phase, step, levels, config) for step in (0, phase.steps + phase.distill_steps))
    blocks, head = ((taught * a + (phase.steps - taught) * b) for a, b in zip(_parts(first), _parts(last), strict=True))
    return Flops(blocks=blocks, head=head)


def _parts(flops: Flops) -> tuple[int, int]:
    return flops.blocks, flops.head
