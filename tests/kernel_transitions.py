"""Whole changes of level with ``kernels: triton`` in Triton's interpreter and with ``kernels: torch``: the same bits.

Run by ``tests.kernel_interpreted`` under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from ds_vcycle_kernels import Implementation, coalesce_triton, refine_triton

from ds_vcycle.config import DepthPolicy, OperatorsConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.apply import Quantity
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import Layout
from ds_vcycle.sharding.transfer import coalesce_fragments, refine_fragments
from tests.operator_cases import config_for, random_weights
from tests.sharded import cut, run_threads

SIZES = {"layers": 2, "hidden": 8, "heads": 4, "head_dim": 4, "ffn": 12, "sequence_length": 5, "vocab_size": 61}
HALF = {"layers": 1, "hidden": 4, "heads": 2, "ffn": 6}
STACK = {"hidden": "stack", "head": "stack", "ffn": "stack", "layer": "stack"}
UNEQUAL = {
    "hidden": [[0, 7], [1, 2, 3], [6], [5, 4]], "head": [[3, 0, 1], [2]], "ffn": [[i, 11 - i] for i in range(6)],
    "layer": [[0, 2], [1]],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of level: the model, what differs from the usual sizes, policies, both layouts, and what is mapped."""

    model: str
    depth: DepthPolicy
    above: Layout
    below: Layout
    groupings: dict[str, Any] = field(default_factory=dict)
    fine: dict[str, int] = field(default_factory=dict)
    coarse: dict[str, int] = field(default_factory=dict)
    quantities: tuple[Quantity, ...]

    @property
    def geometry(self) -> Geometry:
        config = config_for(
            self.model, coarse=HALF | self.coarse, groupings=self.groupings, sizes=SIZES | self.fine
        ).model_dump()
        for level, layout in zip(config["levels"], (self.above, self.below), strict=True):
            level["tensor_parallel"] = layout.tp
        plan = plan_transition(*resolve_levels(parse_config(config)), OperatorsConfig(depth_residual=self.depth))
        return Geometry(plan=plan, fine=self.above, coarse=self.below)


CHANGES = (
    Change(
        model="gpt", depth="first", above=Layout(world_size=2, tp=2, zero_stage=1),
        below=Layout(world_size=2, zero_stage=3), quantities=("exp_avg", "exp_avg_sq"),
    ),
    Change(
        model="llama", depth="copy", above=Layout(world_size=2, zero_stage=3),
        below=Layout(world_size=2, tp=2, zero_stage=1), groupings=STACK, fine={"kv_groups": 4},
        coarse={"kv_groups": 2}, quantities=("master", "exp_avg_sq"),
    ),
    Change(
        model="bert_order", depth="split", above=Layout(world_size=3, zero_stage=1),
        below=Layout(world_size=3, zero_stage=2, round_robin=True), groupings=UNEQUAL, fine={"layers": 3},
        coarse={"layers": 2}, quantities=("master", "exp_avg"),
    ),
)  # fmt: skip


def written(geometry: Geometry, quantity: Quantity, kernels: Implementation) -> list[dict[str, torch.Tensor]]:
    """All that a way down and a way up write, of every rank."""
    fine, coarse = geometry.plan.fine.shape, geometry.plan.coarse.shape
    positive, beta = quantity == "exp_avg_sq", 0.3 if quantity == "master" else 0.0
    x = cut(parameters(fine), random_weights(fine, seed=1, positive=positive), geometry.fine)
    y = cut(parameters(coarse), random_weights(coarse, seed=2, positive=positive), geometry.coarse)

    def work(rank: int, exchange: Any) -> dict[str, torch.Tensor]:
        found = coalesce_fragments(geometry, x[rank], quantity, exchange, bucket=500, kernels=kernels)
        refine_fragments(geometry, y[rank], x[rank], quantity, exchange, beta=beta, bucket=500, kernels=kernels)
        return {f"coarse {name}": value for name, value in found.items()} | x[rank]

    return run_threads(geometry.fine.world_size, work)


def check_transitions() -> None:
    """Weights and both moments, down and up, on ranks that are threads. The interpreter serves one at a time."""
    turn, launches = threading.Lock(), []

    def alone(launch: Callable[..., None], *args: Any, **options: Any) -> None:
        with turn:
            launches.append(launch.__name__)
            launch(*args, **options)

    for module, name in ((coalesce_triton, "launch_coalesce"), (refine_triton, "launch_refine")):
        patch.object(module, name, partial(alone, getattr(module, name))).start()
    for change in CHANGES:
        geometry = change.geometry
        for quantity in change.quantities:
            launches.clear()
            expected = written(geometry, quantity, "torch")
            assert not launches
            found = written(geometry, quantity, "triton")
            assert set(launches) == {"launch_coalesce", "launch_refine"}
            for rank, (held, wanted) in enumerate(zip(found, expected, strict=True)):
                assert held.keys() == wanted.keys()
                for fragment, value in wanted.items():
                    same = torch.equal(held[fragment].view(torch.int32), value.view(torch.int32))
                    assert same, (change.model, quantity, rank, fragment)
    patch.stopall()
