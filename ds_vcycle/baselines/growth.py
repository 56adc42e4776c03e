"""The growth methods that are gathers with a scale, as groupings and policies of the operators. Imports no torch.

What a rival copies where is what the groupings' parent maps say, so the transfer machinery does the rest.
"""

from __future__ import annotations

from dataclasses import replace

from ds_vcycle.config import ConfigError, GroupingsConfig, GrowthMethod, OperatorsConfig
from ds_vcycle.levels import Level

_COPY = OperatorsConfig(alpha=1.0, beta=0.0, depth_residual="copy", moments="reset")


def grows_by(method: GrowthMethod, fine: Level, coarse: Level) -> tuple[Level, OperatorsConfig]:
    """How ``method`` makes level ``fine`` of level ``coarse``: the coarse level with its groupings, and the policies.

    ``stackbert``: the coarse layers in their order, again and again, all else kept (Gong et al., ICML 2019; in one
    step by a factor of four it is G_stack, Du et al., NeurIPS 2024). Widths must be equal.

    Raises:
        ConfigError: the method cannot make the one of the other.
    """
    assert method == "stackbert", method
    for key in ("hidden", "heads", "kv_groups", "ffn"):
        have, want = getattr(coarse.shape, key), getattr(fine.shape, key)
        if have != want:
            raise ConfigError(
                f"cycle.growth.method={method} grows depth only, but {key} is {have} at level {coarse.index} and "
                f"{want} at level {fine.index}; set levels.{coarse.index - 1}.{key}={want}"
            )
    return replace(coarse, groupings=GroupingsConfig(layer="stack")), _COPY
