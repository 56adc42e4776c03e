"""What the steps of a phase cost in FLOPs: the run counts them so, and the plan foretells them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vcycle.baselines.inheritance import teachers_share
from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.phases import Phase, Train
from ds_vcycle.levels import Level
from ds_vcycle.train.flops import Flops, forward_flops, predicted_positions, step_flops


def step_cost(phase: Train, step: int, levels: Sequence[Level], config: RunConfig) -> Flops:
    """FLOPs of the step that follows ``step`` steps of the phase: of its level, and a teacher's forward pass."""
    shape, samples = levels[phase.level - 1].shape, config.training.global_batch
    positions = predicted_positions(shape, config.data.mask_probability)
    own = step_flops(shape, samples=samples, predicted_positions=positions)
    if phase.teacher is None or not teachers_share(step, phase.distill_steps):
        return own
    taught = forward_flops(levels[phase.teacher - 1].shape, samples=samples, predicted_positions=positions)
    return Flops(blocks=own.blocks + taught.blocks, head=own.head + taught.head)


def phase_cost(phase: Phase, levels: Sequence[Level], config: RunConfig) -> Flops:
    """FLOPs of all steps of a phase."""
    if not isinstance(phase, Train) or not phase.steps:
        return Flops(blocks=0, head=0)
    taught = min(phase.steps, phase.distill_steps)
    first, last = (step_cost(phase, step, levels, config) for step in (0, phase.steps + phase.distill_steps))
    blocks, head = ((taught * a + (phase.steps - taught) * b) for a, b in zip(_parts(first), _parts(last), strict=True))
    return Flops(blocks=blocks, head=head)


def _parts(flops: Flops) -> tuple[int, int]:
    return flops.blocks, flops.head
