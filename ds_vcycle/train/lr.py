"""Learning rate as a pure function of a phase's step: nothing to save, nothing to restore.

A scheduler object with its own counter is one more state that a checkpoint can lose; here the step decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class LrSchedule:
    """Learning rate of one phase: linear warm-up to ``peak``, then ``kind`` down to ``minimum``.

    ``steps`` is the planned length of the phase; a phase that ends early (``until_loss``) does not change the curve.
    """

    peak: float
    minimum: float
    warmup_steps: int
    kind: Literal["cosine", "linear", "constant"]
    steps: int


def learning_rate(schedule: LrSchedule, step: int) -> float:
    """Learning rate of one step of a phase.

    The warm-up never takes a step at 0: step i of w has ``peak * (i + 1) / w``, so the last warm-up step is at the
    peak, and without a warm-up step 0 is. The decay reaches ``minimum`` on the phase's last step.

    Args:
        schedule: the phase's schedule.
        step: steps of the phase already made, from 0; from ``schedule.steps`` on the last value holds.
    """
    assert step >= 0, step
    if step < schedule.warmup_steps:
        return schedule.peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return schedule.peak
    at_peak = max(schedule.warmup_steps - 1, 0)
    decay_steps = schedule.steps - 1 - at_peak
    if decay_steps <= 0:
        return schedule.peak
    progress = min((step - at_peak) / decay_steps, 1.0)
    weight = (1 - progress) if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.minimum + (schedule.peak - schedule.minimum) * weight
