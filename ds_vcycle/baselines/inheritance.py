"""Knowledge Inheritance: the coarse level teaches the fine one (Qin et al., NAACL 2022). Imports no torch.

The fine level starts from the seed. For its first ``distill_steps`` steps its loss is
``(1 - a) CE + a temperature^2 KL(teacher || student)`` at the predicted positions, a falling from 1 to 0; then the
teacher goes. Rule and names after the authors' code, https://github.com/thunlp/Knowledge-Inheritance.
"""

from __future__ import annotations

from dataclasses import replace

from ds_vcycle.config import ConfigError
from ds_vcycle.levels import Level, undivided


def teachers_share(step: int, distill_steps: int) -> float:
    """``a`` in the loss of the step that follows ``step`` steps of the phase: ``max(0, 1 - step / distill_steps)``."""
    return max(0.0, 1 - step / distill_steps) if distill_steps else 0.0


def as_teacher(coarse: Level, fine: Level) -> Level:
    """The coarse level as it teaches the fine one: whole on each data-parallel rank, under the fine level's degree.

    Raises:
        ConfigError: the coarse level does not divide over so many tensor-parallel ranks.
    """
    tp = fine.tensor_parallel
    for name, value in undivided(coarse.shape, tp):
        raise ConfigError(
            f"cycle.growth.method=knowledge_inheritance: level {coarse.index} teaches level {fine.index} under its "
            f"tensor_parallel={tp}, which does not divide {name}={value} of level {coarse.index}; change "
            f"levels.{coarse.index - 1}.{name} or model.tensor_parallel"
        )
    return replace(coarse, tensor_parallel=tp, zero_stage=0)
