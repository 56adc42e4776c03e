"""Sizes of every level: halved by default, overridden, checked against the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ds_vcycle.config import ConfigError, parse_config
from ds_vcycle.levels import Level, data_parallel, resolve_levels

MODEL = {"architecture": "gpt", "layers": 8, "hidden": 96, "heads": 8, "sequence_length": 16, "vocab_size": 1000}


def levels(*overrides: dict[str, Any], cycle: dict[str, Any] | None = None, **model: Any) -> tuple[Level, ...]:
    tree = {
        "model": {**MODEL, **model},
        "levels": list(overrides),
        "cycle": cycle or {"kind": "V", "levels": max(2, len(overrides))},
        "training": {"global_batch": 24, "micro_batch": 4, "zero_stage": 2},
        "data": {"path": "unused"},
    }
    return resolve_levels(parse_config(tree))


def sizes(level: Level) -> tuple[int, ...]:
    shape = level.shape
    return (shape.layers, shape.hidden, shape.heads, shape.kv_groups, shape.head_dim, shape.ffn)


def test_each_level_halves_the_one_above_and_keeps_the_head_size() -> None:
    assert [sizes(level) for level in levels(cycle={"kind": "V", "levels": 4})] == [
        (8, 96, 8, 8, 12, 384),
        (4, 48, 4, 4, 12, 192),
        (2, 24, 2, 2, 12, 96),
        (1, 12, 1, 1, 12, 48),
    ]


def test_query_heads_per_group_stay_the_same() -> None:
    assert [sizes(level) for level in levels({}, {}, {}, kv_groups=4, head_dim=16)] == [
        (8, 96, 8, 4, 16, 384),
        (4, 48, 4, 2, 16, 192),
        (2, 24, 2, 1, 16, 96),
    ]
    assert sizes(levels({}, {"heads": 2}, kv_groups=4)[1])[2:4] == (2, 1)
    assert sizes(levels({}, {"kv_groups": 3}, kv_groups=4)[1])[2:4] == (6, 3)
    with pytest.raises(ConfigError, match=r"level 2: heads=3 with kv_groups=1 changes the 2 query heads.*set heads=2"):
        levels({}, {"heads": 3}, kv_groups=4)


def test_overrides_hold_for_their_level_and_halving_goes_on_from_them() -> None:
    found = levels({}, {"layers": 6, "ffn": 100, "heads": 6}, {"hidden": 32})
    assert [sizes(level) for level in found[1:]] == [(6, 48, 6, 6, 12, 100), (3, 32, 3, 3, 12, 50)]


def test_precision_of_a_level_defaults_to_the_runs_and_fp16_is_refused() -> None:
    assert [level.precision for level in levels({}, {"precision": "bf16"}, {})] == ["fp32", "bf16", "fp32"]
    tree = {
        "model": MODEL,
        "levels": [{"precision": "fp32"}, {}],
        "training": {"global_batch": 4, "micro_batch": 4, "precision": "bf16"},
        "data": {"path": "unused"},
    }
    assert [level.precision for level in resolve_levels(parse_config(tree))] == ["fp32", "bf16"]
    with pytest.raises(ConfigError, match=r"levels\.1\.precision: fp16 is refused: its loss .* use bf16 or fp32"):
        levels({}, {"precision": "fp16"})
    with pytest.raises(ConfigError, match=r"levels\.1\.precision='fp8': should be 'fp32' or 'bf16'"):
        levels({}, {"precision": "fp8"})


def test_layout_and_training_of_a_level_default_to_the_run() -> None:
    first, second = levels({}, {"tensor_parallel": 1, "zero_stage": 0, "micro_batch": 8, "lr": 0.5, "steps": 0},
                           tensor_parallel=2)  # fmt: skip
    assert (first.tensor_parallel, first.zero_stage, first.micro_batch, first.lr, first.steps) == (2, 2, 4, None, None)
    assert (second.tensor_parallel, second.zero_stage, second.micro_batch) == (1, 0, 8)
    assert (second.lr, second.steps) == (0.5, 0)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (4, 2), (8, 2), (1, 4)])
def test_one_padded_vocabulary_serves_every_level(degrees: tuple[int, int]) -> None:
    first, second = levels(*({"tensor_parallel": tp} for tp in degrees))
    padded = first.shape.padded_vocab
    assert padded == second.shape.padded_vocab
    unit = 128 * math.lcm(*degrees)
    assert padded % unit == 0 and 1000 <= padded < 1000 + unit


def test_a_vocabulary_that_fits_is_not_padded() -> None:
    assert levels(vocab_size=1024)[0].shape.padded_vocab == 1024


def test_a_flat_run_has_one_level_whatever_else_the_file_holds() -> None:
    assert len(levels({}, {"hidden": 48}, cycle={"kind": "flat"})) == 1


def test_an_explicit_list_has_as_many_levels_as_it_visits() -> None:
    down = [{"coalesce": 1}, {"coalesce": 2}, {"train": 3, "steps": 1}, {"refine": 2}, {"refine": 1}]
    assert len(levels(cycle={"kind": "phases", "phases": down})) == 3


REFUSED: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any], str]] = {
    "odd layers": ((), {"layers": 7}, r"level 2: layers of level 1 is 7, .* set levels\.1\.layers"),
    "odd width": ((), {"hidden": 33, "head_dim": 4}, r"level 2: hidden of level 1 is 33, .* set levels\.1\.hidden"),
    "odd heads": ((), {"heads": 3}, r"level 2: heads of level 1 is 3, .* set levels\.1\.heads"),
    "odd groups": ((), {"heads": 6, "kv_groups": 3}, r"kv_groups of level 1 is 3, .* set levels\.1\.kv_groups"),
    "odd at level 3": (({}, {}, {}), {"layers": 6}, r"level 3: layers of level 2 is 3, .* set levels\.2\.layers"),
    "wider": (({}, {"hidden": 100}), {}, r"level 2: hidden=100 exceeds level 1's 96; lower it"),
    "more heads": (({}, {"heads": 16}), {}, r"level 2: kv_groups=16 exceeds level 1's 8"),
    "sizes of level 1": (({"ffn": 100},), {}, r"levels\.0 is the model itself"),
    "groupings of level 1": (({"groupings": {"head": "stack"}},), {}, r"levels\.0\.groupings: .* set levels\.1\.group"),
    "too many levels": (({}, {}, {}), {"cycle": {"kind": "V"}}, r"levels has 3 entries but the cycle visits 2"),
    "heads over ranks": (
        ({}, {"heads": 3}),
        {"tensor_parallel": 2},
        r"level 2: heads=3 is not divisible by tensor_par",
    ),
    "groups over ranks": ((), {"kv_groups": 2, "tensor_parallel": 2}, r"level 2: kv_groups=1 is not divisible by"),
    "ffn over ranks": (
        (),
        {"ffn": 130, "tensor_parallel": 2},
        r"level 2: ffn=65 is not divisible by tensor_parallel=2",
    ),
    "sequence over ranks": (
        (),
        {"sequence_length": 15, "tensor_parallel": 2, "sequence_parallel": True},
        r"model\.sequence_length=15 is not divisible by tensor_parallel=2, as model\.sequence_parallel=true needs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_cannot_be_had_are_refused(name: str) -> None:
    overrides, model, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        levels(*overrides, **model)


def test_data_parallel_ranks_and_micro_batches() -> None:
    level = levels(tensor_parallel=2)[0]
    assert data_parallel(level, world_size=2, global_batch=24) == (1, 6)
    assert data_parallel(level, world_size=6, global_batch=24) == (3, 2)
    assert data_parallel(level, world_size=12, global_batch=24) == (6, 1)
    with pytest.raises(ConfigError, match=r"level 1: tensor_parallel=2 does not divide the 3 ranks"):
        data_parallel(level, world_size=3, global_batch=24)
    with pytest.raises(ConfigError, match=r"training\.global_batch=24 is not a multiple of micro_batch=4 x 4 data-par"):
        data_parallel(level, world_size=8, global_batch=24)
    with pytest.raises(ConfigError, match=r"training\.global_batch=2 is not a multiple of micro_batch=4 x 1"):
        data_parallel(level, world_size=2, global_batch=2)
