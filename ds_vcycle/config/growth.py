"""How ``cycle.kind=growth`` goes up."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ds_vcycle.config.section import Section

GrowthMethod = Literal["decoalesce", "stackbert", "fpi", "aki", "network_expansion"]
Arrangement = Literal["insert", "stack"]


class GrowthConfig(Section):
    """How ``cycle.kind=growth`` goes up: by the V cycle's own de-coalescing, or as another paper does (baselines/).

    ``arrangement`` and ``ema_decay`` are Network Expansion's: where the new layers go, and of which average of the
    weights they are copies.
    """

    method: GrowthMethod = "decoalesce"
    arrangement: Arrangement = "insert"
    ema_decay: float = Field(0.99996, ge=0, lt=1, description="network_expansion: of the weights' moving average")

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        readers = {"arrangement": ("network_expansion",), "ema_decay": ("network_expansion",)}
        for key, methods in readers.items():
            value = getattr(self, key)
            if self.method not in methods and value != GrowthConfig.model_fields[key].default:
                raise ValueError(
                    f"{key}={value} is set, but method={self.method} does not read it; remove it (it is for "
                    f"{', '.join(methods)})"
                )
        return self
