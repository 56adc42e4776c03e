"""The placement rule against a literal model of ZeRO: lists of elements, laid out and cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ds_vcycle.config import parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.schema import Dim, Parameter, parameters
from ds_vcycle.sharding.placement import Layout, Placement, layout_of, optimizer_groups, placements, rank_placements

Element = tuple[str, int]


def parameter(name: str, *sizes: int, tp_dim: int | None = None) -> Parameter:
    dims = tuple(Dim(axis="hidden", role="produces", length=size) for size in sizes)
    return Parameter(template=name, layer=None, dims=dims, tp_dim=tp_dim)


ODD = (
    parameter("a", 3, 5), parameter("a.bias", 3), parameter("b", 2, 2), parameter("c", 7, 3), parameter("c.bias", 1),
    parameter("d", 1, 1), parameter("d.bias", 11), parameter("e", 4, 4),
)  # fmt: skip


def laid_out(group: list[Parameter], layout: Layout) -> list[Element | None]:
    """The flat buffer of one optimizer group, element by element; None is padding."""
    if layout.round_robin:
        hands: dict[int, list[Parameter]] = {hand: [] for hand in range(layout.dp)}
        for turn, card in enumerate(group):
            hands[turn % layout.dp].append(card)
        group = [card for hand in hands.values() for card in hand]
    flat: list[Element | None] = []
    for member in group:
        while len(flat) % layout.alignment:
            flat.append(None)
        flat += [(member.name, i) for i in range(math.prod(member.local_shape(layout.tp)))]
    while len(flat) % (2 * layout.dp):
        flat.append(None)
    return flat


def elements(held: tuple[Placement, ...]) -> list[Element]:
    return [(p.name, i) for p in held for i in range(p.start, p.start + p.length)]


@pytest.mark.parametrize("alignment", [1, 4, 8])
@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 3, 5, 64])
def test_flat_groups_are_cut_as_lists_of_elements_are(dp: int, round_robin: bool, alignment: int) -> None:
    layout = Layout(world_size=dp, zero_stage=2, round_robin=round_robin, alignment=alignment)
    flats = [laid_out([p for p in ODD if (len(p.dims) > 1) is decays], layout) for decays in (True, False)]
    for rank in range(dp):
        wanted: list[Element] = []
        for flat in flats:
            run = len(flat) // dp
            wanted += [element for element in flat[rank * run : (rank + 1) * run] if element is not None]
        held = rank_placements(ODD, layout, rank)
        assert sorted(elements(held)) == sorted(wanted)
        assert all(p.length > 0 for p in held)
        assert len({p.name for p in held}) == len(held)


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 64])
def test_stage_three_cuts_every_parameter(dp: int) -> None:
    everyone = placements(ODD, Layout(world_size=dp, zero_stage=3))
    for member in ODD:
        numel = math.prod(member.shape)
        padded = [i if i < numel else None for i in range(-(-numel // dp) * dp)]
        run = len(padded) // dp
        for rank, held in enumerate(everyone):
            wanted = [i for i in padded[rank * run : (rank + 1) * run] if i is not None]
            assert [i for name, i in elements(held) if name == member.name] == wanted


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_has_one_owner_in_each_data_parallel_group(stage: int) -> None:
    table = (parameter("rows", 6, 5, tp_dim=0), parameter("columns", 3, 4, tp_dim=1), *ODD)
    layout = Layout(world_size=6, tp=2, zero_stage=stage)
    everyone = placements(table, layout)
    for tp_rank in range(2):
        found = sorted(element for dp_rank in range(3) for element in elements(everyone[dp_rank * 2 + tp_rank]))
        assert found == sorted((p.name, i) for p in table for i in range(math.prod(p.local_shape(2))))
    assert everyone[0] == everyone[1] and everyone[4] == everyone[5]


def test_stage_zero_holds_everything_everywhere() -> None:
    table = (parameter("rows", 6, 5, tp_dim=0), parameter("bias", 3))
    whole = (Placement(name="rows", start=0, length=15), Placement(name="bias", start=0, length=3))
    assert placements(table, Layout(world_size=4, tp=2, zero_stage=0)) == (whole,) * 4


def test_a_parameter_is_cut_in_the_middle_of_a_row() -> None:
    held = placements((parameter("w", 3, 5), parameter("b", 2)), Layout(world_size=2, zero_stage=1))
    assert held[0] == (Placement(name="w", start=0, length=8), Placement(name="b", start=0, length=2))
    assert held[1] == (Placement(name="w", start=8, length=7),)


def test_matrices_decay_and_vectors_do_not() -> None:
    decayed, plain = optimizer_groups(ODD)
    assert [p.name for p in decayed] == ["a", "b", "c", "d", "e"]
    assert [p.name for p in plain] == ["a.bias", "c.bias", "d.bias"]
    assert optimizer_groups(decayed) == (decayed,)


def config_with(stage: int, precision: str, extras: dict[str, Any]) -> Any:
    return parse_config(
        {
            "model": {
                "architecture": "gpt",
                "layers": 2,
                "hidden": 8,
                "heads": 2,
                "sequence_length": 4,
                "vocab_size": 9,
            },
            "training": {"global_batch": 4, "micro_batch": 1, "zero_stage": stage, "precision": precision},
            "deepspeed": extras,
            "data": {"path": "nowhere"},
        }
    )


@pytest.mark.parametrize(
    ("stage", "precision", "extras", "round_robin", "alignment"),
    [
        (1, "fp32", {}, False, 1),
        (2, "bf16", {"zero_optimization": {"round_robin_gradients": True}}, True, 1),
        (1, "bf16", {"zero_optimization": {"parameter_alignment": True}}, False, 8),
        (2, "fp32", {"zero_optimization": {"parameter_alignment": True}}, False, 4),
        (3, "bf16", {"zero_optimization": {"round_robin_gradients": True}}, False, 1),
        (
            1,
            "bf16",
            {"zero_optimization": {"round_robin_gradients": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            False,
            1,
        ),
    ],
)
def test_layout_follows_the_settings_that_move_elements(
    stage: int, precision: str, extras: dict[str, Any], round_robin: bool, alignment: int
) -> None:
    config = config_with(stage, precision, extras)
    level = resolve_levels(config)[0]
    wanted = Layout(world_size=6, tp=1, zero_stage=stage, round_robin=round_robin, alignment=alignment)
    assert layout_of(level, config, 6) == wanted
    assert layout_of(replace(level, tensor_parallel=2), config, 6) == replace(wanted, tp=2)


def test_thousands_of_ranks_are_answered_at_once() -> None:
    shape = replace(resolve_levels(config_with(3, "bf16", {}))[0].shape, layers=96, hidden=1024, ffn=4096)
    table = parameters(shape)
    layout = Layout(world_size=1024, tp=8, zero_stage=2)
    everyone = placements(table, layout)
    assert len(everyone) == 1024
    assert sum(p.length for held in everyone[::8] for p in held) == sum(math.prod(p.local_shape(8)) for p in table)
