"""Coalesce and refine between any two layouts: the same bits as whole tensors, and the bytes that the plan foretold.

CI runs a pairwise covering list over all factors; ``full`` every pair of layouts with two models and three groupings.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_vcycle.config import OperatorsConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators import apply
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import Layout
from ds_vcycle.sharding.traffic import traffic
from ds_vcycle.sharding.transfer import coalesce_fragments, refine_fragments
from tests.operator_cases import config_for
from tests.pairwise import covering, product
from tests.sharded import cut, run_threads

# Divisible by 1, 2 and 4 where tensor parallelism asks for it; odd everywhere else. 101 rows of the vocabulary are
# padded to 512, so that some tensor-parallel ranks hold pad rows only.
MODELS = {
    "gpt-gated": ("llama", {"kv_groups": 8, "heads": 16, "qk_norm": True}),
    "gpt": ("gpt", {"heads": 8}),
    "bert": ("bert_order", {"heads": 8}),
}
SIZES = {"layers": 3, "hidden": 15, "head_dim": 4, "ffn": 24, "sequence_length": 7, "vocab_size": 101}
GROUPINGS = {
    "adjacent": ({}, {}),
    "stack": (dict.fromkeys(("hidden", "head", "ffn", "layer"), "stack"), {}),
    "local-stack": ({"head": "local_stack", "ffn": "local_stack"}, {}),
    "unequal": (
        {
            "hidden": [[0, 14], [1, 2, 3], [13], [5, 4, 6, 7, 8, 9, 10, 11, 12]],
            "head": [[7, 0, 3], [1], [2, 4], [5, 6]],
            "ffn": [[i, 23 - i] for i in range(12)],
            "layer": [[0, 2], [1]],
        },
        {"hidden": 4, "layers": 2},
    ),
    "width-only": ({}, {"layers": 3}),
    "depth-only": ({}, {"hidden": 15, "heads": None, "ffn": 24}),
}  # name: groupings, and the coarse sizes that are not the usual ones


def _coarse(name: str, heads: int, kv_groups: int | None) -> dict[str, int]:
    sizes = {"layers": 1, "hidden": 5, "heads": heads // 2, "ffn": 12, **GROUPINGS[name][1]}
    if sizes["heads"] is None:
        sizes["heads"] = heads
    if kv_groups:
        sizes["kv_groups"] = kv_groups * sizes["heads"] // heads
    return sizes


# Elements to 16 bytes, of the fine and of the coarse level: 4 in fp32, 8 in bf16 (all that a level's precision moves)
ALIGNED = {"aligned-fp32-bf16": (4, 8), "aligned-bf16-fp32": (8, 4), "aligned-bf16-bf16": (8, 8)}
FACTORS = {
    "model": list(MODELS),
    "grouping": list(GROUPINGS),
    "world": [1, 2, 3, 4],
    "fine_tp": [1, 2, 4],
    "coarse_tp": [1, 2, 4],
    "fine_stage": [0, 1, 2, 3],
    "coarse_stage": [0, 1, 2, 3],
    "arrangement": ["plain", "round-robin", *ALIGNED],
    "depth": ["copy", "split", "first"],
    "quantity": ["master", "exp_avg", "exp_avg_sq"],
}


def _allowed(case) -> bool:
    return case["world"] % case["fine_tp"] == 0 and case["world"] % case["coarse_tp"] == 0


LAYOUTS = {name: FACTORS[name] for name in ("world", "fine_tp", "coarse_tp", "fine_stage", "coarse_stage")}


def _full() -> list[dict]:
    """Every pair of layouts with every model and grouping; the other factors take turns."""
    turns = itertools.cycle(itertools.product(*(FACTORS[name] for name in ("arrangement", "depth", "quantity"))))
    cases = product({name: FACTORS[name] for name in ("model", "grouping")} | LAYOUTS, _allowed)
    return [case | dict(zip(("arrangement", "depth", "quantity"), turn)) for case, turn in zip(cases, turns)]


def _covering() -> list[dict]:
    """Pairwise over all factors, from the cases of the full product."""
    return covering(_full())


def _name(case: dict) -> str:
    return "-".join(map(str, case.values()))


def _layouts(case: dict) -> dict[str, Layout]:
    alignments = ALIGNED.get(case["arrangement"], (1, 1))
    return {
        which: Layout(
            world_size=case["world"],
            tp=case[f"{which}_tp"],
            zero_stage=case[f"{which}_stage"],
            round_robin=case[f"{which}_stage"] in (1, 2) and case["arrangement"] == "round-robin",
            alignment=alignment if case[f"{which}_stage"] in (1, 2) else 1,
        )
        for which, alignment in zip(("fine", "coarse"), alignments)
    }


def _levels(case: dict):
    model, sizes = MODELS[case["model"]]
    coarse = _coarse(case["grouping"], sizes["heads"], sizes.get("kv_groups"))
    config = config_for(model, coarse=coarse, groupings=GROUPINGS[case["grouping"]][0], sizes=SIZES | sizes)
    tree = config.model_dump()
    for level, tp in zip(tree["levels"], (case["fine_tp"], case["coarse_tp"])):
        level["tensor_parallel"] = tp
    return resolve_levels(parse_config(tree))


def _random(shape, quantity: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    for p in parameters(shape):
        whole[p.name] = torch.randn(p.shape, generator=generator)
        if quantity == "exp_avg_sq":
            whole[p.name].square_()
        whole[p.name][p.dims[0].real :] = 0
    return whole


def _check(case: dict) -> None:
    fine, coarse = _levels(case)
    plan = plan_transition(fine, coarse, OperatorsConfig(depth_residual=case["depth"]))
    geometry = Geometry(plan=plan, **_layouts(case))
    quantity = case["quantity"]
    beta = 0.25 if quantity == "master" else 0.0
    x, y = _random(fine.shape, quantity, 1), _random(coarse.shape, quantity, 2)
    down, up = apply.coalesce(plan, x, quantity), apply.decoalesce(plan, y, quantity)
    for name, value in up.items():
        up[name] = x[name] * beta + value if beta else value
    fine_held = cut(parameters(fine.shape), x, geometry.fine)
    coarse_held = cut(parameters(coarse.shape), y, geometry.coarse)

    def work(rank, exchange):
        found = coalesce_fragments(geometry, fine_held[rank], quantity, exchange, bucket=2000)
        sent = exchange.sent_bytes
        refine_fragments(geometry, coarse_held[rank], fine_held[rank], quantity, exchange, beta=beta, bucket=2000)
        return found, sent, exchange.sent_bytes - sent

    done = run_threads(case["world"], work)
    _same([found for found, _, _ in done], cut(parameters(coarse.shape), down, geometry.coarse))
    _same(fine_held, cut(parameters(fine.shape), up, geometry.fine))
    rows = traffic(geometry)
    assert [sent for _, sent, _ in done] == [sum(row.coalesce[rank] for row in rows) for rank in range(case["world"])]
    assert [sent for _, _, sent in done] == [sum(row.refine[rank] for row in rows) for rank in range(case["world"])]
    # Coarse data only: a rank sends a partial sum of each element once to each copy that the coarse layout keeps of it,
    # and receives each coarse element at most once.
    elements = sum(p.numel for p in parameters(coarse.shape))
    kept = sum(p.numel * _copies(p, geometry.coarse) for p in parameters(coarse.shape))
    assert max(sent for _, sent, _ in done) <= 8 * kept
    assert sum(sent for _, _, sent in done) <= 4 * elements * case["world"]


def _copies(parameter, layout: Layout) -> int:
    return (layout.dp if layout.zero_stage == 0 else 1) * (layout.tp if parameter.tp_dim is None else 1)


def _same(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    for rank, (held, expected) in enumerate(zip(found, wanted, strict=True)):
        assert held.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(held[name], value), (rank, name)


@pytest.mark.parametrize("case", _covering(), ids=_name)
def test_bits_and_bytes_of_a_pairwise_covering_list(case):
    _check(case)


@pytest.mark.full
@pytest.mark.parametrize("grouping", ["adjacent", "stack", "unequal"])
@pytest.mark.parametrize("model", ["gpt-gated", "bert"])
def test_bits_and_bytes_of_every_pair_of_layouts(model, grouping):
    for case in _full():
        if (case["model"], case["grouping"]) == (model, grouping):
            _check(case)
