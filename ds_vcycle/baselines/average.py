"""A moving average of the weights, kept while they are trained: what Network Expansion's new layers are copies of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_vcycle.sharding.zero import Engine, fragments
from ds_vcycle.train.loop import AfterStep


def following(average: Mapping[str, Tensor], decay: float) -> AfterStep:
    """An after-step function: average <- decay x average + (1 - decay) x weights, each rank its own fragments in place.

    Args:
        average: float32 [length] by parameter name, of every fragment of this rank, where the weights are.
        decay: in [0, 1); 0 keeps the weights themselves.

    Source: Ding et al., "Network Expansion for Practical Training Acceleration", CVPR 2023.
    """

    @torch.no_grad()
    def follow(engine: Engine) -> None:
        held = fragments(engine)
        torch._foreach_lerp_([average[f.name] for f in held], [f.master for f in held], 1 - decay)

    return follow
