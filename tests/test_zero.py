"""The DeepSpeed adapter on real engines: every ZeRO stage, both precisions, odd sizes, on 1, 2 and 3 ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.dist.cases_zero import TABLE, local_weight, reference_steps
from tests.dist.ranks import values

SMALL = {"zero_optimization": {"sub_group_size": 40, "stage3_param_persistence_threshold": 0}}
DEALT = {"zero_optimization": {"round_robin_gradients": True}}
ALIGNED = {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}}
SUMMED = {"data_types": {"grad_accum_dtype": "fp32"}, **DEALT}

PLACED: dict[int, list[dict[str, Any]]] = {
    1: [
        {"stage": 0, "precision": "bf16"},
        {"stage": 1, "precision": "fp32"},
        {"stage": 3, "precision": "bf16"},
    ],
    2: [
        {"stage": 0, "precision": "fp32"},
        {"stage": 0, "precision": "bf16", "tp": 2},
        {"stage": 1, "precision": "fp32", "tp": 2, "clip": 0.0},
        {"stage": 1, "precision": "bf16", "extras": ALIGNED},
        {"stage": 1, "precision": "bf16", "extras": SUMMED},
        {"stage": 2, "precision": "fp32", "extras": DEALT},
        {"stage": 1, "precision": "bf16", "tp": 2, "extras": SUMMED},
        {"stage": 2, "precision": "bf16", "tp": 2, "batch": 2, "extras": SUMMED},
        {"stage": 3, "precision": "fp32", "extras": SMALL},
        {"stage": 3, "precision": "bf16", "tp": 2, "extras": SUMMED},
    ],
    3: [
        {"stage": 1, "precision": "fp32", "extras": DEALT},
        {"stage": 2, "precision": "bf16", "extras": ALIGNED},
        {"stage": 3, "precision": "fp32"},
        {"stage": 3, "precision": "bf16", "extras": SMALL},
    ],
}
RESUMED: dict[int, list[dict[str, Any]]] = {
    1: [{"stage": 0, "precision": "fp32"}],
    2: [
        {"stage": 0, "precision": "bf16"},
        {"stage": 1, "precision": "bf16"},
        {"stage": 1, "precision": "bf16", "extras": SUMMED},
        {"stage": 3, "precision": "fp32", "extras": SMALL},
    ],
    3: [],
}
RELEASED: dict[int, list[dict[str, Any]]] = {
    1: [],
    2: [{"stage": stage, "precision": "bf16", "rounds": 10, "wide": True, "batch": 2} for stage in (1, 3)],
    3: [],
}
CASES = {
    world: [
        *(("place_and_edit", case) for case in PLACED[world]),
        *(("resume", case) for case in RESUMED[world]),
        *(("cycles", case) for case in RELEASED[world]),
    ]
    for world in PLACED
}


def label(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    extras = value.get("extras", {})
    words = [*extras.get("zero_optimization", {}), *extras.get("data_types", {})]
    return "-".join([f"zero{value['stage']}", value["precision"], f"tp{value.get('tp', 1)}", *words])


def cases(name: dict[int, list[dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    return [(world, case) for world, list_of in name.items() for case in list_of]


@pytest.fixture(scope="module")
def results() -> dict[int, list[list[Any]]]:
    """Per world size, filled at first use: for each case the values of its ranks."""
    return {}


def ranks_of(results: dict[int, list[list[Any]]], world: int, name: str, case: dict[str, Any]) -> list[Any]:
    if world not in results:
        per_rank = values(world, "tests.dist.cases_zero:run", [CASES[world]])
        results[world] = [list(one) for one in zip(*per_rank, strict=True)]
    return results[world][CASES[world].index((name, case))]


@pytest.mark.parametrize(("world", "case"), cases(PLACED), ids=label)
def test_fragments_hold_every_element_once(results: Any, world: int, case: dict[str, Any]) -> None:
    ranks = ranks_of(results, world, "place_and_edit", case)
    tp = case.get("tp", 1)
    for tp_rank in range(tp):
        peers = [rank for rank in ranks if rank["tp_rank"] == tp_rank]
        for parameter in TABLE:
            numel = math.prod(parameter.local_shape(tp))
            runs = sorted((s, n) for rank in peers for name, s, n in rank["fragments"] if name == parameter.name)
            if case["stage"] == 0:
                assert runs == [(0, numel)] * len(peers)
                continue
            assert [s for s, _ in runs] == [sum(n for _, n in runs[:i]) for i in range(len(runs))]
            assert sum(n for _, n in runs) == numel
    assert all(rank["content"] for rank in ranks), "a master is not the weight the model was given there"


@pytest.mark.parametrize(("world", "case"), cases(PLACED), ids=label)
def test_an_edit_reaches_the_weights_and_the_steps_go_on_from_it(
    results: Any, world: int, case: dict[str, Any]
) -> None:
    ranks = ranks_of(results, world, "place_and_edit", case)
    assert all(rank["pushed"] for rank in ranks), "the weights are not the rounded masters after a push"
    assert all(rank["agree"] for rank in ranks), "the weights are not the rounded masters after two steps"
    tp, batch = case.get("tp", 1), case.get("batch", 6)
    scales = [float(1 + i) for i in range(batch // (world // tp) * (world // tp))]
    clip = case.get("clip", 1.0) or math.inf
    weights, first, norms = reference_steps(scales, clip)
    exact = case["precision"] == "fp32"
    for rank in ranks:
        assert rank["norms"] == pytest.approx(norms, rel=1e-5 if exact else 5e-3)
        assert rank["adam_step"] == 2
        assert rank["counters"] == {"global_steps": 2, "global_samples": 2 * batch, "skipped_steps": 0}
        for parameter in TABLE:
            if parameter.name not in rank["after"]:
                continue
            start, found, exp_avg = rank["after"][parameter.name]
            cut = slice(start, start + found.numel())
            wanted = local_weight(parameter, tp, rank["tp_rank"], whole=weights[parameter.name].float()).view(-1)[cut]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 if exact else 2e-4)
            wanted = local_weight(parameter, tp, rank["tp_rank"], whole=first[parameter.name].float()).view(-1)[cut]
            torch.testing.assert_close(exp_avg, wanted, rtol=1e-5 if exact else 2e-2, atol=0)


def test_the_matrix_meets_empty_fragments_and_all_classes(results: Any) -> None:
    small = ranks_of(results, 3, "place_and_edit", PLACED[3][2])
    held = ["binary_head.bias" in {name for name, _, _ in rank["fragments"]} for rank in small]
    assert held == [True, True, False]
    classes = {ranks_of(results, world, "place_and_edit", case)[0]["class"] for world, case in cases(PLACED)}
    assert classes == {
        "AdamW", "FP16_UnfusedOptimizer", "DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3",
    }  # fmt: skip


@pytest.mark.parametrize(("world", "case"), cases(RESUMED), ids=label)
def test_moments_moved_into_a_new_engine_continue_bit_for_bit(results: Any, world: int, case: dict[str, Any]) -> None:
    for rank in ranks_of(results, world, "resume", case):
        assert rank == dict.fromkeys(rank, True)


@pytest.mark.parametrize(("world", "case"), cases(RELEASED), ids=label)
def test_released_engines_leave_nothing(results: Any, world: int, case: dict[str, Any]) -> None:
    for rank in ranks_of(results, world, "cycles", case):
        assert rank["early"] == [True] * case["rounds"], "weights or optimizer outlive release()"
        assert rank["alive"] == [0] * case["rounds"]
        descriptors, threads, resident = zip(*rank["rounds"], strict=True)
        assert len(set(descriptors[1:])) == 1 and len(set(threads[1:])) == 1
        assert min(resident[-3:]) - resident[1] < 15e6, "not one engine's bytes; all that stayed would be 150e6"
