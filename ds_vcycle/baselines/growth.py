"""The growth methods that are gathers, as groupings and policies of the operators. Imports no torch.

What a rival copies where is what the groupings' parent maps say, so the transfer machinery does the rest. Two of them
are two gathers: a :class:`SecondSource` says what is read from elsewhere than the plan's coarse level.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from ds_vcycle.config import Arrangement, ConfigError, Grouping, GroupingsConfig, GrowthMethod, OperatorsConfig
from ds_vcycle.levels import Level

_COPY = OperatorsConfig(alpha=1.0, beta=0.0, depth_residual="copy", moments="reset")
_WIDTHS = ("hidden", "heads", "kv_groups", "ffn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What a growth phase does. ``arrangement``: Network Expansion's. ``seed``: draws what FPI and AKI copy."""

    method: GrowthMethod
    arrangement: Arrangement | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondSource:
    """What some of the fine elements are copies of, in place of what the plan gives them.

    ``weights``: ``next_layer``, the coarse layer after the plan's (after the last there is none: itself); ``average``,
    the moving average of the coarse weights. ``elements``: ``new_outputs``, of the matrices of a layer and their biases
    what produces a feature that is a copy; ``new_layers``, whole layers that are copies. A copy is any member of its
    group but the first.
    """

    weights: Literal["next_layer", "average"]
    elements: Literal["new_outputs", "new_layers"]


def grows_by(growth: Growth, fine: Level, coarse: Level) -> tuple[Level, OperatorsConfig]:
    """How a method makes level ``fine`` of level ``coarse``: the coarse level with its groupings, and the policies.

    ``stackbert``: the coarse layers in their order, again and again, all else kept (Gong et al., ICML 2019; in one
    step by a factor of four it is G_stack, Du et al., NeurIPS 2024). ``network_expansion``: the same layers, or each
    followed by its copies (Ding et al., CVPR 2023). Both want equal widths.

    ``fpi`` and ``aki`` (bert2BERT, Chen et al., ACL 2022): of each width the first indices are the coarse ones, every
    further one is a copy of a coarse one drawn at random, whole heads, one draw for the residual stream; what reads
    copies is divided by their number. The paper draws the MLP's features anew in each layer; here one draw serves all.
    Layers are stacked.

    Raises:
        ConfigError: the method cannot make the one of the other.
    """
    if growth.method in ("fpi", "aki"):
        assert growth.seed is not None
        return replace(coarse, groupings=_drawn(growth.seed, fine, coarse)), _COPY
    assert growth.method in ("stackbert", "network_expansion"), growth.method
    for key in _WIDTHS:
        have, want = getattr(coarse.shape, key), getattr(fine.shape, key)
        if have != want:
            raise ConfigError(
                f"cycle.growth.method={growth.method} grows depth only, but {key} is {have} at level {coarse.index} "
                f"and {want} at level {fine.index}; set levels.{coarse.index - 1}.{key}={want}"
            )
    inserted = growth.arrangement == "insert"
    return replace(coarse, groupings=GroupingsConfig(layer="adjacent" if inserted else "stack")), _COPY


def second_source(method: GrowthMethod) -> SecondSource | None:
    """The second gather of a method that has one."""
    if method == "aki":
        return SecondSource(weights="next_layer", elements="new_outputs")
    if method == "network_expansion":
        return SecondSource(weights="average", elements="new_layers")
    return None


def _drawn(seed: int, fine: Level, coarse: Level) -> GroupingsConfig:
    """``parent[i] = i`` below the coarse size, else drawn; layers in turn."""
    a, b = fine.shape, coarse.shape
    counts = {"hidden": (a.hidden, b.hidden), "head": (a.kv_groups, b.kv_groups), "ffn": (a.ffn, b.ffn)}
    widths = {
        axis: _groups([*range(small), *_draws(f"{seed} {fine.index} {axis}", small, large - small)], small)
        for axis, (large, small) in counts.items()
    }
    return GroupingsConfig(**widths, layer=_groups([index % b.layers for index in range(a.layers)], b.layers))


def _draws(key: str, count: int, draws: int) -> list[int]:
    drawn = random.Random(key)
    return [drawn.randrange(count) for _ in range(draws)]


def _groups(parent: list[int], count: int) -> Grouping:
    return [[fine for fine, coarse in enumerate(parent) if coarse == index] for index in range(count)]
