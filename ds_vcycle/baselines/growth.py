"""The growth methods that are gathers with a scale, as plans of the transfer machinery. Imports no torch.

Each is a grouping of the axes and a policy of the operators: what a rival copies where is what ``parent`` says.
"""

from __future__ import annotations

from dataclasses import replace

from ds_vcycle.config import ConfigError, GroupingsConfig, GrowthMethod, OperatorsConfig
from ds_vcycle.levels import Level
from ds_vcycle.operators.plan import TransitionPlan, plan_transition

_STACKED = OperatorsConfig(alpha=1.0, beta=0.0, depth_residual="copy", moments="reset")


def plan_growth(method: GrowthMethod, fine: Level, coarse: Level) -> TransitionPlan:
    """The plan by which ``method`` makes level ``fine`` of level ``coarse``.

    ``stackbert``: the coarse layers in their order, again and again, all else kept (Gong et al., ICML 2019; in one
    step by a factor of four it is G_stack, Du et al., NeurIPS 2024). Widths must be equal.

    Raises:
        ConfigError: the method cannot make the one of the other.
    """
    assert method == "stackbert", method
    same = ("hidden", "heads", "kv_groups", "ffn")
    unequal = [key for key in same if getattr(fine.shape, key) != getattr(coarse.shape, key)]
    if unequal:
        key = unequal[0]
        raise ConfigError(
            f"cycle.growth.method={method} grows depth only, but {key} is {getattr(coarse.shape, key)} at level "
            f"{coarse.index} and {getattr(fine.shape, key)} at level {fine.index}; set levels.{coarse.index - 1}.{key}="
            f"{getattr(fine.shape, key)}"
        )
    stacked = replace(coarse, groupings=GroupingsConfig(layer="stack"))
    return plan_transition(fine, stacked, _STACKED)
