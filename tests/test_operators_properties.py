"""What must hold for any partition: C(P(x)) is x, the blend's corner cases, nothing used twice or left over."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vcycle.config import UserError
from ds_vcycle.operators.apply import coalesce, decoalesce, refine
from ds_vcycle.operators.maps import axis_map
from ds_vcycle.schema import parameters
from tests.operator_cases import MODELS, divided, plan_for, random_weights

TINY = {"layers": 4, "hidden": 8, "heads": 8, "kv_groups": 4, "head_dim": 2, "ffn": 6, "vocab_size": 9}


def tiny_plan(model="gpt", *, groupings, embedding="lossless", depth_residual="first", sizes=TINY):
    """A plan whose coarse sizes are the numbers of explicit groups."""
    count = {axis: len(groups) for axis, groups in groupings.items()}
    coarse = {"hidden": count["hidden"], "ffn": count["ffn"], "layers": count["layer"], "kv_groups": count["head"]}
    coarse["heads"] = count["head"] * (sizes["heads"] // sizes["kv_groups"])
    return plan_for(
        model, coarse=coarse, groupings=groupings, sizes=sizes, embedding=embedding, depth_residual=depth_residual
    )


def bits(x):
    return x.contiguous().view(torch.int32)


def assert_bits(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(bits(got[name]), bits(value)), name


def wide_weights(shape, *, seed):
    """Weights over 40 powers of two, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(shape, seed=seed)
    for value in weights.values():
        value *= torch.exp2(torch.randint(-20, 21, value.shape, generator=generator).float())
        value *= torch.rand(value.shape, generator=generator) > 0.1
        value += 0.0  # a sum of negative zeros is +0.0
    return weights


def partitions(size, allowed):
    """Shuffled partitions of range(size) into groups of the allowed sizes."""

    @st.composite
    def draw_partition(draw):
        order = draw(st.permutations(range(size)))
        groups, start = [], 0
        while start < size:
            members = draw(st.sampled_from([m for m in allowed if m <= size - start]))
            groups.append(list(order[start : start + members]))
            start += members
        return groups

    return draw_partition()


def groupings(allowed):
    axes = {"hidden": "hidden", "head": "kv_groups", "ffn": "ffn", "layer": "layers"}
    return st.fixed_dictionaries({axis: partitions(TINY[key], allowed) for axis, key in axes.items()})


POLICIES = {
    "embedding": st.sampled_from(["lossless", "reference"]),
    "depth_residual": st.sampled_from(["copy", "split", "first"]),
    "model": st.sampled_from(["gpt", "llama_tied", "bert_order"]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=20, deadline=None)
@given(groupings=groupings([1, 2, 4, 8]), **POLICIES)
def test_coalescing_the_decoalesced_gives_the_same_bits_for_groups_of_1_2_4_8(
    groupings, model, embedding, depth_residual, seed
):
    plan = tiny_plan(model, groupings=groupings, embedding=embedding, depth_residual=depth_residual)
    x = wide_weights(plan.coarse.shape, seed=seed)
    assert_bits(coalesce(plan, decoalesce(plan, x)), x)


@settings(max_examples=20, deadline=None)
@given(groupings=groupings([1, 2, 3, 4, 5, 6, 7]), **POLICIES)
def test_coalescing_the_decoalesced_is_within_one_ulp_for_any_groups(groupings, model, embedding, depth_residual, seed):
    plan = tiny_plan(model, groupings=groupings, embedding=embedding, depth_residual=depth_residual)
    x = wide_weights(plan.coarse.shape, seed=seed)
    for name, value in coalesce(plan, decoalesce(plan, x)).items():
        ulp = np.spacing(np.abs(x[name].numpy()))
        assert (np.abs(value.numpy() - x[name].numpy()) <= ulp).all(), name


@settings(max_examples=15, deadline=None)
@given(groupings=groupings([1, 2, 3, 5]), **POLICIES)
def test_the_plan_uses_every_fine_element_once_and_fills_every_coarse_one(
    groupings, model, embedding, depth_residual, seed
):
    plan = tiny_plan(model, groupings=groupings, embedding=embedding, depth_residual=depth_residual)
    fine = [child.parameter.name for item in plan.maps for child in item.children]
    assert sorted(fine) == sorted(parameter.name for parameter in parameters(plan.fine.shape))
    assert [item.coarse.name for item in plan.maps] == [p.name for p in parameters(plan.coarse.shape)]
    for item in plan.maps:
        for child in item.children:
            for dim, fine_dim, coarse_dim in zip(item.dims, child.parameter.dims, item.coarse.dims, strict=True):
                assert len(dim.parent) == fine_dim.real
                assert np.bincount(dim.parent, minlength=coarse_dim.real).tolist() == dim.sizes.tolist()
                assert dim.sizes.min() >= 1


@pytest.fixture(scope="module")
def levels():
    """(plan, fine weights x, coarse weights y) with unequal groups on every axis."""
    plan = tiny_plan(
        groupings={
            "hidden": [[0, 7, 3], [1], [2, 4, 5, 6]],
            "head": [[3, 0, 1], [2]],
            "ffn": [[5, 4], [0, 1, 2], [3]],
            "layer": [[0, 2], [1, 3]],
        }
    )
    return plan, random_weights(plan.fine.shape, seed=1), random_weights(plan.coarse.shape, seed=2)


def test_alpha_0_beta_1_is_the_identity_bit_for_bit(levels):
    plan, x, y = levels
    x = {name: torch.where(value > 0, value, -0.0) for name, value in x.items()}
    y = {name: torch.full_like(value, torch.inf) for name, value in y.items()}
    blended = refine(plan, x, y, alpha=0.0, beta=1.0)
    assert_bits(blended, x)
    assert all(blended[name].data_ptr() != x[name].data_ptr() for name in x)


def test_alpha_1_beta_0_is_the_decoalesced_bit_for_bit_whatever_was_kept(levels):
    plan, x, y = levels
    x = {name: torch.full_like(value, torch.nan) for name, value in x.items()}
    assert_bits(refine(plan, x, y, alpha=1.0, beta=0.0), decoalesce(plan, y))


@pytest.mark.parametrize(("alpha", "beta"), [(0.25, 0.75), (1.0, 0.25), (0.5, 0.1)])
def test_the_blend_is_affine_in_the_coarse_weights(levels, alpha, beta):
    plan, x, y0 = levels
    y1 = random_weights(plan.coarse.shape, seed=3)
    between = {name: 0.3 * y0[name] + 0.7 * y1[name] for name in y0}
    low, high, middle = (refine(plan, x, y, alpha=alpha, beta=beta) for y in (y0, y1, between))
    for name, value in middle.items():
        assert torch.allclose(value, 0.3 * low[name] + 0.7 * high[name], rtol=1e-5, atol=1e-6), name


def test_coalescing_the_blend_blends_the_coalesced(levels):
    """C z for z = blend is alpha y + (1 - alpha) C x: beta moves the fine-only part alone."""
    plan, x, y = levels
    cx = coalesce(plan, x)
    for beta in (0.0, 0.5, 1.0):
        got = coalesce(plan, refine(plan, x, y, alpha=0.6, beta=beta))
        for name, value in got.items():
            assert torch.allclose(value, 0.6 * y[name] + 0.4 * cx[name], rtol=1e-5, atol=2e-6), name


def test_inputs_are_never_written(levels):
    plan, x, y = levels
    before = [{name: value.clone() for name, value in weights.items()} for weights in (x, y)]
    for alpha, beta in [(0.0, 1.0), (1.0, 0.0), (0.5, 0.25), (1.0, 1.0)]:
        for value in refine(plan, x, y, alpha=alpha, beta=beta).values():
            value.fill_(5.0)
    for quantity in ("master", "exp_avg"):
        for weights in (coalesce(plan, x, quantity), decoalesce(plan, y, quantity)):
            for value in weights.values():
                value.fill_(5.0)
    assert_bits(x, before[0])
    assert_bits(y, before[1])


@pytest.mark.parametrize("model", MODELS)
def test_without_any_mapping_both_directions_keep_every_bit(model):
    plan = plan_for(model, coarse=divided(model, 1))
    x = wide_weights(plan.fine.shape, seed=4)
    assert plan.lossless
    for quantity in ("master", "exp_avg"):
        assert_bits(coalesce(plan, x, quantity), x)
        assert_bits(decoalesce(plan, x, quantity), x)


def test_what_is_left_over_or_missing_is_refused(levels):
    plan, x, y = levels
    extra = torch.zeros(3)
    with pytest.raises(ValueError, match="neither level: surplus"):
        coalesce(plan, {**x, "surplus": extra})
    with pytest.raises(ValueError, match="neither level: surplus"):
        decoalesce(plan, {**y, "surplus": extra})
    name = "decoder.final_layernorm.weight"
    for alpha, beta in [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (0.5, 0.25)]:
        with pytest.raises(ValueError, match="neither level: surplus"):
            refine(plan, {**x, "surplus": extra}, y, alpha=alpha, beta=beta)
        with pytest.raises(ValueError, match="neither level: surplus"):
            refine(plan, x, {**y, "surplus": extra}, alpha=alpha, beta=beta)
        for a, b in [(x, without(y, name)), (without(x, name), y)]:
            with pytest.raises(KeyError, match=name):
                refine(plan, a, b, alpha=alpha, beta=beta)
    with pytest.raises(KeyError, match=name):
        coalesce(plan, without(x, name))
    with pytest.raises(KeyError, match=name):
        decoalesce(plan, without(y, name))


def without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("grouping", "message"),
    [
        ([[0, 1], [2, 3], [4]], "index 5 is in no group"),
        ([[0, 1], [2, 3], [4, 5, 1]], "index 1 is in groups 0 and 2"),
        ([[0, 1], [2, 3, 3], [4, 5]], "index 3 is in groups 1 and 1"),
        ([[0, 1, 2], [], [3, 4, 5]], r"group 1 \(from 0\) is empty"),
        ([[0, 1], [2, 3], [4, 6]], r"group 2 \(from 0\) names 6, outside 0\.\.5"),
        ([[0, 1], [2, 3], [4, -1]], r"group 2 \(from 0\) names -1, outside 0\.\.5"),
        ([[0, 1, 2], [3, 4, 5]], "2 groups given for 3 coarse indices"),
    ],
)
def test_a_grouping_that_is_no_partition_is_refused(grouping, message):
    with pytest.raises(UserError, match=message) as error:
        axis_map("ffn", fine=6, coarse=3, grouping=grouping)
    assert str(error.value).startswith("groupings.ffn")


def test_named_groupings_that_do_not_divide_are_refused():
    for grouping in ("adjacent", "stack", "local_stack"):
        with pytest.raises(UserError, match="12 fine indices do not divide into 8 equal groups"):
            axis_map("head", fine=12, coarse=8, grouping=grouping)
    with pytest.raises(UserError, match="6 coarse indices do not divide over 4 tensor-parallel ranks"):
        axis_map("head", fine=12, coarse=6, grouping="local_stack", chunks=4)


def test_named_groupings_are_the_ones_of_the_paper():
    def groups(grouping, chunks=1):
        return axis_map("head", fine=12, coarse=4, grouping=grouping, chunks=chunks).groups

    assert groups("adjacent") == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    assert groups("stack") == ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))
    assert groups("local_stack", chunks=2) == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert groups("local_stack") == groups("stack")


def test_the_reference_policy_is_refused_for_untied_embeddings_only_where_it_scales_them():
    with pytest.raises(UserError, match=r"embedding=reference.*tied_embeddings=false.*embedding=lossless"):
        plan_for("gpt_untied", coarse=divided("gpt", 2), embedding="reference")
    assert plan_for("gpt_untied", coarse=divided("gpt", 2, width=False), embedding="reference").lossless


@pytest.mark.parametrize(
    ("coarse", "message"),
    [({"layers": 13}, "exceeds"), ({"hidden": 25}, "exceeds"), ({"heads": 5, "kv_groups": 5}, "do not divide")],
)
def test_a_coarse_level_that_is_larger_or_does_not_divide_is_refused(coarse, message):
    with pytest.raises(UserError, match=message):
        plan_for("gpt", coarse={**divided("gpt", 1), **coarse})
