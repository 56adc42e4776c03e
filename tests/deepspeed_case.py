"""What an engine of DeepSpeed's is built from in the tests of its checkpoints; importable without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import Level, resolve_levels
from tests.model_level import SIZES


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on two ranks. ``tp`` 2 leaves one data-parallel rank, 1 leaves two."""

    name: str
    tp: int = 1
    stage: int = 1
    precision: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    steps: int = 2

    @property
    def config(self) -> RunConfig:
        return parse_config(
            {
                "model": SIZES | {"hidden": 24, "ffn": 36, "tensor_parallel": self.tp} | self.model,
                "training": {
                    "global_batch": 4, "micro_batch": 2, "zero_stage": self.stage, "precision": self.precision,
                    "device": "cpu",
                },
                "data": {"path": "unused"},
                "cycle": {"kind": "flat"},
                "deepspeed": self.extras,
            }
        )  # fmt: skip

    @property
    def level(self) -> Level:
        return resolve_levels(self.config)[0]
