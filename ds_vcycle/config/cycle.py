"""Which levels are trained when, at which learning rate, and what happens between them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ds_vcycle.config.growth import GrowthConfig
from ds_vcycle.config.model import GroupingsConfig
from ds_vcycle.config.section import DepthPolicy, EmbeddingPolicy, MomentPolicy, Section

CoarseSource = Literal["fine", "seed"]


class LrConfig(Section):
    """Learning rate of a phase: linear warm-up from 0 to ``peak``, then ``schedule`` down to ``minimum``."""

    peak: float = Field(1e-3, gt=0)
    minimum: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    rewarmup_steps: int | None = Field(
        None, ge=0, description="warm-up of a phase that follows a change of level; default warmup_steps"
    )
    schedule: Literal["cosine", "linear", "constant"] = "cosine"


class PhaseConfig(Section):
    """Settings of one kind of training phase; what is not given comes from the level, then from ``lr``."""

    steps: int | None = Field(None, ge=0)
    lr: float | None = Field(None, gt=0, description="peak learning rate")
    minimum_lr: float | None = Field(None, ge=0)
    warmup_steps: int | None = Field(None, ge=0)
    schedule: Literal["cosine", "linear", "constant"] | None = None
    until_loss: float | None = Field(None, gt=0, description="end early once the held-out loss is at or below")


class PhaseEntry(PhaseConfig):
    """One entry of an explicit phase list: exactly one of train, coalesce, refine names the (fine) level."""

    train: int | None = Field(None, ge=1)
    coalesce: int | None = Field(None, ge=1)
    refine: int | None = Field(None, ge=1)
    coarse_from: CoarseSource | None = None
    alpha: float | None = Field(None, ge=0, le=1)
    beta: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [k for k in ("train", "coalesce", "refine") if getattr(self, k) is not None]
        if len(kinds) != 1:
            raise ValueError(f"a phase is exactly one of train, coalesce, refine; this one has {kinds or 'none'}")
        training = [k for k in PhaseConfig.model_fields if getattr(self, k) is not None]
        if kinds != ["train"] and training:
            raise ValueError(f"{kinds[0]} takes no {training[0]}; remove it")
        if kinds == ["train"] and self.steps is None:
            raise ValueError("a train phase needs steps; add steps: N")
        if kinds != ["refine"] and (self.alpha is not None or self.beta is not None):
            raise ValueError(f"{kinds[0]} takes no alpha or beta; they belong to refine")
        if kinds != ["coalesce"] and self.coarse_from is not None:
            raise ValueError(f"{kinds[0]} takes no coarse_from; it belongs to coalesce")
        return self


class CycleConfig(Section):
    """Which levels are trained when.

    ``V``: down with ``initial``, up with ``coarse``, level 1 with ``final``. ``W``: as V, but from every level but the
    last two it goes down ``gamma`` times. ``F``: starts at the coarsest level, and makes a V cycle of every level that
    it reaches. ``growth``: from the coarsest level up, once.
    """

    kind: Literal["flat", "V", "W", "F", "growth", "phases"] = "V"
    levels: int = Field(2, ge=1)
    gamma: int = Field(2, ge=2, description="W: how often a level's coarser levels are visited")
    coarse_from: CoarseSource = Field(
        "fine", description="seed: coarse levels start from the seed, not coalesced; a control"
    )
    growth: GrowthConfig = GrowthConfig()
    flat: PhaseConfig = PhaseConfig()
    initial: PhaseConfig = PhaseConfig()
    coarse: PhaseConfig = PhaseConfig()
    final: PhaseConfig = PhaseConfig()
    phases: list[PhaseEntry] = Field(default_factory=list)
    park: Literal["host", "disk"] = Field(
        "host", description="where a kept fine level lives while coarse levels train; it is written to the disk anyway"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "phases" and not self.phases:
            raise ValueError("kind=phases needs a list phases; add it or choose another kind, e.g. kind=V")
        if self.kind != "phases" and self.phases:
            raise ValueError(f"phases is given but kind={self.kind}; remove phases or set kind=phases")
        least = {"flat": 1, "phases": 1, "W": 3}.get(self.kind, 2)
        if self.levels < least:
            instead = "kind=V, which is the same" if self.kind == "W" and self.levels == 2 else "kind=flat"
            raise ValueError(f"kind={self.kind} needs levels >= {least}, not {self.levels}; raise it or set {instead}")
        if self.kind == "phases" and self.levels not in (CycleConfig.model_fields["levels"].default, self.visited):
            raise ValueError(f"levels={self.levels} but the phases visit {self.visited}; remove levels")
        self._refuse_unused()
        return self

    def _refuse_unused(self) -> None:
        """Settings that only some kinds read; ``flat`` may have all, so that one word makes a baseline of a run."""
        readers = {"gamma": ("W",), "coarse_from": ("V", "W", "F"), "growth": ("growth",)}
        readers |= {"initial": ("V", "W", "F"), "coarse": ("V", "W", "F", "growth"), "final": ("V", "W", "F", "growth")}
        for key, kinds in readers.items():
            value = getattr(self, key)
            if self.kind not in ("flat", *kinds) and value != CycleConfig.model_fields[key].default:
                shown = "" if isinstance(value, Section) else f"={value}"
                raise ValueError(
                    f"{key}{shown} is set, but kind={self.kind} does not read it; remove cycle.{key} (it is for "
                    f"{', '.join(kinds)})"
                )

    @property
    def visited(self) -> int:
        """How many levels the cycle visits."""
        if self.kind == "flat":
            return 1
        if self.kind != "phases":
            return self.levels
        return max(max(p.train or 1, (p.coalesce or 0) + 1, (p.refine or 0) + 1) for p in self.phases)


class OperatorsConfig(Section):
    """Blend and policies of the transitions."""

    alpha: float = Field(1.0, ge=0, le=1)
    beta: float = Field(0.25, ge=0, le=1)
    embedding: EmbeddingPolicy = "lossless"
    depth_residual: DepthPolicy = "first"
    moments: MomentPolicy = "map"
    groupings: GroupingsConfig = GroupingsConfig()
    kernels: Literal["auto", "triton", "torch"] = Field(
        "auto", description="what sums and blends: triton on a GPU, torch anywhere, auto by the device; the same bits"
    )
