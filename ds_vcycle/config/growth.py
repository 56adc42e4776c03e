"""How ``cycle.kind=growth`` goes up."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ds_vcycle.config.section import Section

GrowthMethod = Literal["decoalesce", "stackbert", "fpi", "aki", "network_expansion", "knowledge_inheritance", "ligo"]
Arrangement = Literal["insert", "stack"]


class GrowthConfig(Section):
    """How ``cycle.kind=growth`` goes up: by the V cycle's own de-coalescing, or as another paper does (baselines/).

    ``arrangement`` and ``ema_decay`` are Network Expansion's: where the new layers go, and of which average of the
    weights they are copies. ``distill_steps`` and ``temperature`` are Knowledge Inheritance's, for every level that a
    coarser one teaches. ``ligo_steps`` and ``ligo_lr`` are LiGO's, whose maps between two levels are learned.
    """

    method: GrowthMethod = "decoalesce"
    arrangement: Arrangement = "insert"
    ema_decay: float = Field(0.99996, ge=0, lt=1, description="network_expansion: of the weights' moving average")
    distill_steps: int | None = Field(
        None, ge=1, description="knowledge_inheritance: steps in which the teacher's part of the loss falls from 1 to 0"
    )
    temperature: float = Field(2.0, gt=0, description="knowledge_inheritance: of the teacher's and student's logits")
    ligo_steps: int = Field(100, ge=1, description="ligo: steps that learn the maps, through the fine level")
    ligo_lr: float = Field(2e-4, gt=0, description="ligo: learning rate of the maps, constant")

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        readers = {"arrangement": ("network_expansion",), "ema_decay": ("network_expansion",)}
        readers |= {"distill_steps": ("knowledge_inheritance",), "temperature": ("knowledge_inheritance",)}
        readers |= {"ligo_steps": ("ligo",), "ligo_lr": ("ligo",)}
        for key, methods in readers.items():
            value = getattr(self, key)
            if self.method not in methods and value != GrowthConfig.model_fields[key].default:
                raise ValueError(
                    f"{key}={value} is set, but method={self.method} does not read it; remove it (it is for "
                    f"{', '.join(methods)})"
                )
        if self.method == "knowledge_inheritance" and self.distill_steps is None:
            raise ValueError(
                "method=knowledge_inheritance needs distill_steps, the steps that the coarser level teaches; set it "
                "(the paper's are 0.44 of the taught level's)"
            )
        return self
