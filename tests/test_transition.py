"""Transitions on live engines over two ranks: bit for bit what one process does to whole tensors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.config import RunConfig
from tests.dist.ranks import values
from tests.tiny import tiny_run

LAYOUTS = [(tp, stage, precision) for tp, stage, precision in itertools.product((1, 2), (0, 1, 2, 3), ("fp32", "bf16"))]
SWIGLU = {
    "model.activation": "swiglu", "model.heads": 8, "model.kv_groups": 4, "model.position": "rope",
    "model.normalization": "rmsnorm",
}  # fmt: skip
STACKED = {"operators.groupings": {"hidden": "stack", "head": "stack", "ffn": "stack", "layer": "stack"}}
UNEQUAL = {
    "operators.groupings": {"head": [[0, 1, 2], [3]], "layer": [[0], [1, 2, 3]]}, "operators.depth_residual": "copy",
}  # fmt: skip
POST = {"model.norm_placement": "post", "model.norm_eps": 1e-12}
SPLIT = {"operators.depth_residual": "split", "operators.embedding": "reference"}
ROUND = {"deepspeed": {"zero_optimization": {"round_robin_gradients": True}}}
TP_2 = {"tensor_parallel": 2, "zero_stage": 1}
SUB_GROUPS = {"deepspeed": {"zero_optimization": {"sub_group_size": 500}}}
ALIGNED = {"deepspeed": {"zero_optimization": {"parameter_alignment": True}}}
SUMMED = {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}}
UNTIED = {"model.tied_embeddings": False, "operators.depth_residual": "split"}


# (fine level: architecture, TP, ZeRO stage, precision; the coarse one's overrides; further settings): the coarse level
# has the other precision, and mostly another layout
UNLIKE_PRECISIONS: list[tuple[str, int, int, str, dict[str, Any], dict[str, Any]]] = [
    ("gpt", 1, 0, "fp32", {"zero_stage": 0}, {}),
    ("gpt", 2, 1, "bf16", {"zero_stage": 3, "tensor_parallel": 1}, {}),
    ("bert", 1, 2, "fp32", TP_2, ROUND),
    ("gpt", 1, 3, "bf16", {"zero_stage": 0, "micro_batch": 1}, SUB_GROUPS),
    ("bert", 2, 2, "bf16", {"zero_stage": 2}, {}),
    ("gpt", 2, 3, "fp32", {"zero_stage": 3}, STACKED),
    ("gpt", 1, 1, "fp32", {"zero_stage": 2}, ALIGNED),  # to 16 bytes: other places for another precision
    ("bert", 1, 1, "bf16", {"zero_stage": 1}, SUMMED),  # DeepSpeed's other optimizer class at the bf16 level only
]


def _unlike(architecture: str, tp: int, stage: int, precision: str, coarse: dict[str, Any], more: Any) -> Any:
    coarse = {"precision": "fp32" if precision == "bf16" else "bf16", **coarse}
    name = f"-over-{coarse['precision']}-zero{coarse['zero_stage']}-unlike"
    return _case(architecture, tp, stage, precision, {"levels": [{}, coarse], **more}, name)


def _case(architecture: str, tp: int, stage: int, precision: str, changes: dict[str, Any], name: str = "") -> Any:
    return (f"{architecture}-tp{tp}-zero{stage}-{precision}{name}", (architecture, tp, stage, precision, changes))


CASES: dict[str, Any] = dict(
    [
        *(_case("gpt", tp, stage, precision, {}) for tp, stage, precision in LAYOUTS),
        _case("bert", 1, 0, "bf16", {}),
        _case("bert", 2, 1, "fp32", {}),
        _case("bert", 1, 2, "fp32", SPLIT, "-reference"),
        _case("bert", 2, 3, "bf16", {}),
        _case("bert", 2, 1, "fp32", POST, "-post"),
        _case("bert", 1, 3, "bf16", POST, "-post"),
        _case("gpt", 2, 1, "bf16", SWIGLU, "-swiglu"),
        _case("gpt", 2, 3, "fp32", STACKED, "-stacked"),
        _case("gpt", 1, 1, "fp32", UNEQUAL, "-unequal"),
        _case("gpt", 1, 3, "bf16", UNTIED, "-untied"),
        *itertools.starmap(_unlike, UNLIKE_PRECISIONS),
    ]
)
PRODUCT: dict[str, Any] = dict(
    _case(architecture, tp, stage, precision, changes, name)
    for architecture, (tp, stage, precision) in itertools.product(("gpt", "bert"), LAYOUTS)
    for name, changes in (("-stacked", STACKED), ("-unequal", UNEQUAL), ("-reference", SPLIT))
)


def _configs(cases: dict[str, Any], folder: Path) -> dict[str, RunConfig]:
    configs = {}
    for name, (architecture, tp, stage, precision, changes) in cases.items():
        changes = {"training.global_batch": 4, "training.micro_batch": 2, **changes}
        configs[name] = tiny_run(
            folder / name, architecture, tp=tp, zero_stage=stage, precision=precision, changes=changes
        )
    return configs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every rank's results by case."""
    return values(
        2, "tests.dist.cases_transition:run", [_configs(CASES, tmp_path_factory.mktemp("runs"))], timeout_s=600
    )


@pytest.fixture(scope="module")
def product_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every rank's results by case, of the full product."""
    configs = _configs(PRODUCT, tmp_path_factory.mktemp("runs"))
    return values(2, "tests.dist.cases_transition:run", [configs], timeout_s=1800)


@pytest.mark.parametrize("name", CASES)
def test_live_transitions_equal_the_operators_on_whole_tensors(results, name):
    assert [rank[name]["problems"] for rank in results] == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("name", PRODUCT)
def test_live_transitions_equal_the_operators_in_every_layout(product_results, name):
    assert [rank[name]["problems"] for rank in product_results] == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_down_and_up_with_alpha_0_and_beta_1_keeps_the_held_out_loss(results, name):
    for rank in results:
        assert rank[name]["after"] == rank[name]["before"]


def _adjacent_on_whole_ranks(name: str) -> bool:
    """Adjacent groups of equal sizes, and fragments that end where groups do: TP 2, ZeRO 0, or ZeRO 3's halves."""
    _, tp, stage, _, _ = CASES[name]
    return not name.endswith(("-stacked", "-unequal", "-unlike")) and (tp == 2 or stage in (0, 3))


@pytest.mark.parametrize("name", CASES)
def test_only_coarse_data_crosses_ranks_and_none_where_groups_do_not(results, name):
    for rank in results:
        crossed, elements = rank[name]["crossed"], rank[name]["coarse_elements"]
        down = [*crossed["down"].values(), *crossed["up"].values()]
        assert [len(sent) for sent in down] == [1, 3, 0, 1, 0, 1]  # C x is needed where alpha + beta is not 1
        assert [len(sent) for sent in crossed["into"].values()] == [0, 3, 3, 3]
        planned_down, planned_up = rank[name]["planned"]  # what `plan --ranks` says, to the byte, for each quantity
        first_moment = crossed["down"]["map"][1]
        assert crossed["down"]["reset"] == [planned_down] and first_moment == planned_down
        assert all(sent == [planned_up] * 3 for sent in list(crossed["into"].values())[1:])
        sums = [sent for exchange in down for sent in exchange]
        copies = [sent for exchange in crossed["into"].values() for sent in exchange]
        assert max(sums) <= 8 * elements and max(copies) <= 4 * elements
        if _adjacent_on_whole_ranks(name):
            assert sum(sums) + sum(copies) == 0


def test_bytes_do_cross_where_the_layout_makes_them(results):
    """The counter counts: flat ZeRO halves cut a layer group, stacked groups span tensor-parallel ranks."""
    for name in ("gpt-tp1-zero1-fp32", "gpt-tp1-zero2-bf16", "gpt-tp2-zero3-fp32-stacked"):
        assert all(sum(rank[name]["crossed"]["down"]["reset"]) > 0 for rank in results)


@pytest.mark.parametrize("name", CASES)
def test_staging_calls_no_collective_but_the_exchange_and_the_agreement_on_adams_step(results, name):
    for rank in results:
        others = [call for call in rank[name]["collectives"] if call[0] != "all_to_all_single"]
        assert set(others) <= {("all_reduce", 8)}
