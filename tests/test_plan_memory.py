"""The memory formulas against what real engines hold: states, gradients, activations, and the peak of a step.

The peak is watched on one rank only: gloo's threads free memory that the profiler then counts as held.
"""

from __future__ import annotations

from typing import Any

import pytest

from ds_vcycle.cycle.memory import gradient_memory, rank_memory
from ds_vcycle.levels import resolve_levels
from tests.dist.cases_memory import config_of
from tests.dist.ranks import values

IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
LLAMA = {
    "kv_groups": 2, "activation": "swiglu", "ffn": 320, "position": "rope", "normalization": "rmsnorm", "bias": False,
    "tied_embeddings": False,
}  # fmt: skip
MODELS = {
    "recompute-full": {"recompute": "full", "layers": 6},
    "recompute-selective": {"recompute": "selective"},
    "dropout": {"dropout": 0.1},
    "dropout-recompute-full": {"dropout": 0.1, "recompute": "full", "layers": 6},
    "llama": LLAMA,
    "llama-qk-norm": {**LLAMA, "normalization": "layernorm", "qk_norm": True},
    "shared-keys": {"kv_groups": 2},
    "one-key": {"kv_groups": 1},
    "wide-heads": {"head_dim": 48},
}
BERTS = {"post": {"norm_placement": "post", "dropout": 0.1}, "sentence-order": {"sentence_order": True}}


def case(architecture: str, stage: int, precision: str, tp: int = 1, **others: Any) -> dict[str, Any]:
    return {"architecture": architecture, "stage": stage, "precision": precision, "tp": tp, **others}


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *(case("gpt", stage, "bf16", peak=True) for stage in range(4)),
        *(case("bert", stage, "fp32", peak=True) for stage in range(4)),
        case("gpt", 1, "fp32", accumulate=1, peak=True),
        case("gpt", 1, "bf16", extras=IN_FP32, peak=True),
        case("bert", 2, "bf16", accumulate=1, micro_batch=1, extras=IN_FP32, peak=True),
        *(case("gpt", 1, "bf16", accumulate=1, model=model) for model in MODELS.values()),
        *(case("bert", 1, "bf16", accumulate=1, model=model) for model in BERTS.values()),
    ],
    2: [
        *(case("gpt", stage, precision) for stage in range(4) for precision in ("fp32", "bf16")),
        *(case("bert", stage, precision, 2) for stage in range(4) for precision in ("fp32", "bf16")),
        case("bert", 2, "fp32"),  # a rank's part ends inside the word embedding
        case("gpt", 0, "bf16", 2),
        case("gpt", 3, "bf16", 2, extras=IN_FP32),
        case("gpt", 1, "bf16", extras=IN_FP32),
        case("gpt", 2, "bf16", extras=IN_FP32),
        case("gpt", 1, "fp32", 2, accumulate=1, model=LLAMA),
    ],
}
ALL = [(world, index) for world, cases in CASES.items() for index in range(len(cases))]


def label(world: int, index: int) -> str:
    one = CASES[world][index]
    words = [one["architecture"], f"zero{one['stage']}", one["precision"], f"tp{one['tp']}", f"ranks{world}"]
    return "-".join([*words, *one.get("extras", {}), *map(str, one.get("model", {}))])


@pytest.fixture(scope="module")
def measured() -> dict[int, list[dict[str, int]]]:
    """Per world size, for each case what the rank that holds most of it holds."""
    found = {}
    for world, cases in CASES.items():
        ranks = values(world, "tests.dist.cases_memory:run", [cases])
        found[world] = [{key: max(one[key] for one in same) for key in same[0]} for same in zip(*ranks, strict=True)]
    return found


@pytest.mark.parametrize(("world", "index"), ALL, ids=[label(*one) for one in ALL])
def test_formula_is_within_a_tenth_of_what_is_held(measured: Any, world: int, index: int) -> None:
    one, found = CASES[world][index], measured[world][index]
    config = config_of(one, found["dp"])
    level = resolve_levels(config)[0]
    layout = {"data_parallel": found["dp"], "micro_batches": one.get("accumulate", 2)}
    memory = rank_memory(level, config, **layout, device="cpu")
    assert memory.states == pytest.approx(found["states"], rel=0.02)
    assert gradient_memory(level, config, **layout).between == pytest.approx(found["between"], rel=0.02, abs=1e4)
    assert memory.activations + memory.logits == pytest.approx(found["kept"], rel=0.02)
    if one.get("peak"):
        assert memory.peak == pytest.approx(found["peak"] - found["before"] + found["states"], rel=0.1)


def test_parts_add_up_to_less_than_what_they_would_be_all_at_once() -> None:
    for one in CASES[2]:
        config = config_of(one, 2 // one["tp"])
        memory = rank_memory(resolve_levels(config)[0], config, data_parallel=2 // one["tp"], micro_batches=2)
        parts = memory.weights + memory.masters + memory.moments + memory.gradients
        assert memory.states < memory.peak <= 1.25 * (parts + memory.activations + memory.logits)
