"""Sharded coalesce and refine give the bits of the whole-tensor operators, for unlike layouts too."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from ds_vcycle.config import GroupingsConfig
from ds_vcycle.levels import Level, ModelShape
from ds_vcycle.operators import apply
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.geometry import Geometry, rectangles
from ds_vcycle.sharding.placement import Layout
from ds_vcycle.sharding.transfer import coalesce_fragments, refine_fragments
from tests.sharded import cut, run_threads

GPT = ModelShape(
    architecture="gpt", layers=4, hidden=24, heads=8, kv_groups=4, head_dim=4, ffn=24, sequence_length=7,
    vocab_size=101, padded_vocab=128, tied_embeddings=True, position="learned", normalization="layernorm",
    norm_placement="pre", activation="swiglu", bias=True, qk_norm=True, sentence_order=False,
)  # fmt: skip
BERT = replace(GPT, architecture="bert", kv_groups=8, activation="gelu", qk_norm=False, sentence_order=True)
POST = replace(BERT, norm_placement="post")
UNEQUAL = GroupingsConfig(
    hidden="stack", head=[[0, 1, 2], [3]], ffn=[[i, 23 - i] for i in range(12)], layer=[[0], [1, 2, 3]]
)


def level(shape: ModelShape, tp: int = 1, groupings: GroupingsConfig | None = None) -> Level:
    return Level(
        index=1, shape=shape, tensor_parallel=tp, zero_stage=0, micro_batch=1, precision="fp32", lr=None, steps=None,
        groupings=groupings or GroupingsConfig(),
    )  # fmt: skip


def halved(shape: ModelShape) -> ModelShape:
    return replace(
        shape, layers=shape.layers // 2, hidden=shape.hidden // 2, heads=shape.heads // 2,
        kv_groups=shape.kv_groups // 2, ffn=shape.ffn // 2,
    )  # fmt: skip


def random_weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    for p in parameters(shape):
        whole[p.name] = torch.randn(p.shape, generator=generator)
        whole[p.name][p.dims[0].real :] = 0
    return whole


LAYOUTS = [
    (Layout(world_size=1), Layout(world_size=1)),
    (Layout(world_size=2, zero_stage=1), Layout(world_size=2, zero_stage=1)),
    (Layout(world_size=2, tp=2, zero_stage=1), Layout(world_size=2, tp=2, zero_stage=1)),
    (Layout(world_size=2, tp=2, zero_stage=0), Layout(world_size=2, tp=1, zero_stage=3)),
    (Layout(world_size=3, zero_stage=3), Layout(world_size=3, zero_stage=2, round_robin=True)),
    (Layout(world_size=4, tp=2, zero_stage=3), Layout(world_size=4, tp=2, zero_stage=1)),
    (Layout(world_size=4, tp=4, zero_stage=2), Layout(world_size=4, tp=1, zero_stage=1)),
    (Layout(world_size=4, tp=1, zero_stage=0), Layout(world_size=4, tp=2, zero_stage=0)),
]
CASES = [
    (shape, groupings, layouts)
    for (shape, groupings), layouts in itertools.product(
        [
            (GPT, GroupingsConfig()),
            (BERT, GroupingsConfig(head="stack", ffn="stack", layer="stack")),
            (GPT, UNEQUAL),
            (POST, UNEQUAL.model_copy(update={"head": [[0, 1, 2], [3, 7], [4], [6, 5]]})),
        ],
        LAYOUTS,
    )
]


@pytest.mark.parametrize(("shape", "groupings", "layouts"), CASES)
@pytest.mark.parametrize("quantity", ["master", "exp_avg", "exp_avg_sq"])
def test_bits_do_not_depend_on_the_layout(shape, groupings, layouts, quantity):
    fine_layout, coarse_layout = layouts
    plan = plan_transition(level(shape, fine_layout.tp), level(halved(shape), coarse_layout.tp, groupings))
    x, y = random_weights(shape, 1), random_weights(halved(shape), 2)
    if quantity == "exp_avg_sq":
        x, y = {n: v.square() for n, v in x.items()}, {n: v.square() for n, v in y.items()}
    down = apply.coalesce(plan, x, quantity)
    if quantity == "master":
        beta, up = 0.25, apply.refine(plan, x, y, alpha=0.75, beta=0.25)
        y = {n: apply.blend_coarse(v, None, alpha=0.75, beta=0.25) for n, v in y.items()}
    else:
        beta, up = 0.0, apply.decoalesce(plan, y, quantity)

    fine_held = cut(parameters(shape), x, fine_layout)
    coarse_held = cut(parameters(halved(shape)), y, coarse_layout)
    geometry = Geometry(plan=plan, fine=fine_layout, coarse=coarse_layout)

    def work(rank, exchange):
        result = coalesce_fragments(geometry, fine_held[rank], quantity, exchange, bucket=300)
        refine_fragments(geometry, coarse_held[rank], fine_held[rank], quantity, exchange, beta=beta, bucket=300)
        return result

    coalesced = run_threads(fine_layout.world_size, work)
    for rank, expected in enumerate(cut(parameters(halved(shape)), down, coarse_layout)):
        assert expected.keys() == coalesced[rank].keys()
        for name, value in expected.items():
            assert torch.equal(value, coalesced[rank][name]), (rank, name)
    for rank, expected in enumerate(cut(parameters(shape), up, fine_layout)):
        for name, value in expected.items():
            assert torch.equal(value, fine_held[rank][name]), (rank, name)


def test_adjacent_groups_on_the_same_tensor_parallel_ranks_send_nothing():
    layout = Layout(world_size=2, tp=2, zero_stage=1)
    plan = plan_transition(level(GPT, 2), level(halved(GPT), 2))
    held = cut(parameters(GPT), random_weights(GPT, 3), layout)
    geometry = Geometry(plan=plan, fine=layout, coarse=layout)

    def work(rank, exchange):
        coalesce_fragments(geometry, held[rank], "master", exchange)
        return exchange.sent_bytes

    assert run_threads(2, work) == [0, 0]


def test_rectangles_cover_a_flat_range_once():
    for width, start, length in itertools.product((1, 3, 8), range(10), range(1, 30)):
        seen = [
            r * width + c
            for first, last, left, right in rectangles(start, length, width)
            for r in range(first, last)
            for c in range(left, right)
        ]
        assert seen == list(range(start, start + length))


def test_parameters_are_handled_in_buckets_and_larger_ones_in_runs_of_rows() -> None:
    alone = Layout(world_size=1)
    geometry = Geometry(plan=plan_transition(level(GPT), level(halved(GPT))), fine=alone, coarse=alone)
    buckets = list(geometry.buckets(300))
    sizes = [sum(block.numel for item in items for block in item.blocks(0)) for items in buckets]
    assert max(sizes) <= 300
    assert sum(sizes) == sum(
        p.numel - p.dims[1].size * p.dims[0].pad for p in parameters(halved(GPT)) if len(p.dims) > 1
    ) + sum(p.numel for p in parameters(halved(GPT)) if len(p.dims) == 1)
    embedding = [items for items in buckets if items[0].item.coarse.template == "embedding.word_embeddings.weight"]
    assert [len(items[0].blocks(0)[0].rows) for items in embedding] == [25, 25, 25, 25, 1]
    unordered = GroupingsConfig(hidden="stack")
    geometry = Geometry(
        plan=plan_transition(level(GPT), level(halved(GPT), groupings=unordered)), fine=alone, coarse=alone
    )
    whole = [items for items in geometry.buckets(100) if "linear_proj.weight" in items[0].item.coarse.template]
    assert [items[0].blocks(0)[0].numel for items in whole] == [12 * 16] * 2
