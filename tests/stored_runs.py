"""A run in the midst of its cycle as its checkpoints, for the tests of what reads and rewrites them; no training."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_vcycle.checkpoint.store import set_latest
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.saving import run_state
from ds_vcycle.cycle.schedule import expand
from ds_vcycle.levels import ModelShape, resolve_levels
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.placement import Layout
from ds_vcycle.train.metrics import Totals
from tests.operator_cases import config_for, divided
from tests.stored import Wholes, store_wholes

STEP, PARKED = "step-00000120-phase-02", "parked-01-level-1"
_SIZES = {"layers": 4, "hidden": 12, "heads": 8, "head_dim": 2, "ffn": 24}
_KEYS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Where it lies, its configuration, and what its two checkpoints hold."""

    run_dir: Path
    config: RunConfig
    fine: Wholes
    coarse: Wholes

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"


def stored_run(
    run_dir: Path, layout: Layout, *, model: str = "bert_order", groupings: dict[str, Any] | None = None
) -> StoredRun:
    """Level 2 with moments after 80 of its 100 steps, level 1 parked, as the ranks of a layout write them."""
    sizes = {**_SIZES, "tensor_parallel": layout.tp, **({"kv_groups": 8} if model == "llama_tied" else {})}
    tree = config_for(model, coarse=divided(model, 2, sizes=sizes), groupings=groupings, sizes=sizes).model_dump(
        mode="json"
    )
    tree["cycle"] |= {"initial": {"steps": 40}, "coarse": {"steps": 100}, "final": {"steps": 30}}
    tree["training"] |= {"zero_stage": layout.zero_stage, "global_batch": 12}
    config = parse_config({**tree, "run_dir": str(run_dir)})
    fine_level, coarse_level = resolve_levels(config)
    fine = {"master": _weights(fine_level.shape, 1)}
    coarse = {key: _weights(coarse_level.shape, seed) for seed, key in enumerate(_KEYS, 2)}
    root = run_dir / "checkpoints"
    store_wholes(root / PARKED, fine, fine_level.shape, layout, {"parked_level": 1})
    totals = Totals(steps=120, samples=240, tokens=1920)
    position = Position(phase=2, phase_step=80, level=2, totals=totals, parked={1: PARKED})
    state = run_state(config, expand(config), position) | {"adam_step": 120, "counters": {"global_steps": 120}}
    store_wholes(root / STEP, coarse, coarse_level.shape, layout, state, references=[PARKED])
    set_latest(root, STEP)
    return StoredRun(run_dir=run_dir, config=config, fine=fine, coarse=coarse)


def _weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """The same numbers whatever the padding is; pad rows zero."""
    found = {}
    for parameter in parameters(shape):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(parameter.name.encode()))
        found[parameter.name] = whole = torch.zeros(parameter.shape)
        real = tuple(dim.real for dim in parameter.dims)
        whole[: real[0]] = torch.randn(real, generator=generator)
    return found
