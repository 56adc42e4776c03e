"""Optimizer, batch, data, and what is measured, saved and logged along the way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Tag

from ds_vcycle.config.section import Precision, Section, list_or_one


class OptimizerConfig(Section):
    """AdamW."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="global norm; 0 switches clipping off")


class TrainingConfig(Section):
    """Batch, precision, ZeRO and seed."""

    global_batch: int = Field(ge=1, description="samples of one step")
    micro_batch: int = Field(ge=1, description="samples of one forward pass on one data-parallel rank")
    zero_stage: int = Field(1, ge=0, le=3)
    precision: Precision = Field("fp32", description="of the weights computed with; the masters are always fp32")
    seed: int = Field(1234, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rank_timeout_seconds: float = Field(
        600, gt=0, description="a rank that others have waited for so long ends the run, with its name"
    )
    init_from: Path | None = Field(
        None,
        description="checkpoint or run directory that level 1 starts from instead of from the seed: its weights and, "
        "unless operators.moments=reset, Adam's moments and step if it has them",
    )


class Blend(Section):
    """One prepared corpus and its share of the samples."""

    path: Path
    weight: float = Field(1.0, gt=0)


class DataConfig(Section):
    """Directories written by ``ds-vcycle prepare``."""

    path: Annotated[
        Annotated[Path, Tag("#one")] | Annotated[list[Blend], Field(min_length=1), Tag("#list")], list_or_one
    ] = Field(description="one prepared directory, or a list of {path, weight}")
    mask_probability: float = Field(0.15, gt=0, lt=1, description="BERT: share of tokens predicted")
    seed: int = Field(1234, ge=0)

    @property
    def blend(self) -> tuple[Blend, ...]:
        """The corpora as a list, a single path having weight 1."""
        return tuple(self.path) if isinstance(self.path, list) else (Blend(path=self.path),)


class EvaluationConfig(Section):
    """Held-out loss on a fixed set."""

    every_steps: int = Field(100, ge=1)
    samples: int = Field(256, ge=1)
    micro_batch: int | None = Field(None, ge=1, description="default training.micro_batch")
    transitions: bool = Field(
        True, description="also inside each refine, of the model de-coalesced at alpha 1 before it is blended"
    )


class SavingConfig(Section):
    """When to write a checkpoint besides each phase's end."""

    every_steps: int = Field(0, ge=0, description="0: at phase ends only")
    keep_last: int = Field(2, ge=1)
    keep_phase_ends: bool = Field(False, description="never remove the checkpoint at the end of a phase")
    background: bool = Field(
        False, description="write while training goes on, from a copy of masters and moments in host memory"
    )


class LoggingConfig(Section):
    """What is written besides metrics.jsonl."""

    every_steps: int = Field(10, ge=1, description="how many steps' metrics are read back from the device at once")
    tensorboard: bool = True
