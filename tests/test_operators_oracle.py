"""Every parameter's maps against dense matrices in float64."""

import numpy as np
import pytest
import torch

from ds_vcycle.operators.apply import coalesce, decoalesce, refine
from tests.operator_cases import divided, plan_for, random_weights
from tests.oracle import oracle_for

UNEQUAL = {
    "hidden": [[0, 23, 1], [2], [3, 4, 5, 6], [22, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17, 18, 19, 21, 20]],
    "ffn": [[35], [0, 1, 2, 3, 4], [*range(6, 35)], [5]],
    "layer": [[0, 1, 2], [3], [5, 4], [6, 7, 8, 9, 10, 11]],
}
UNEQUAL_12 = {**UNEQUAL, "head": [[0, 11], [1], [2, 3, 4, 5, 6, 7], [10, 9, 8]]}
UNEQUAL_6 = {**UNEQUAL, "head": [[0, 5], [1], [2], [4, 3]]}
UNEQUAL_SIZES = {"hidden": 7, "ffn": 4, "layers": 4}


def all_axes(kind):
    return dict.fromkeys(("hidden", "head", "ffn", "layer"), kind)


# model, coarse sizes, groupings, tensor-parallel runs, embedding policy, depth policy
CASES = [
    ("gpt", divided("gpt", 2), all_axes("adjacent"), 1, "lossless", "first"),
    ("gpt", divided("gpt", 2), all_axes("stack"), 1, "reference", "copy"),
    ("gpt", divided("gpt", 3), all_axes("adjacent"), 1, "reference", "split"),
    ("gpt", divided("gpt", 4), all_axes("stack"), 1, "lossless", "split"),
    ("gpt", divided("gpt", 3, depth=False), {"head": "local_stack", "ffn": "local_stack"}, 2, "lossless", "first"),
    ("gpt", divided("gpt", 4, width=False), {"layer": "stack"}, 1, "lossless", "first"),
    ("gpt", divided("gpt", 2, width=False), {"layer": "adjacent"}, 1, "reference", "copy"),
    ("gpt", {**UNEQUAL_SIZES, "heads": 4}, UNEQUAL_12, 1, "lossless", "first"),
    ("gpt", {**UNEQUAL_SIZES, "heads": 4}, UNEQUAL_12, 1, "reference", "split"),
    ("gpt_untied", divided("gpt", 2), all_axes("local_stack"), 3, "lossless", "split"),
    ("gpt_untied", {**UNEQUAL_SIZES, "heads": 4}, UNEQUAL_12, 1, "lossless", "copy"),
    ("gpt_no_bias", divided("gpt", 3), all_axes("stack"), 1, "reference", "first"),
    ("llama", divided("llama", 3), {"head": "local_stack", "ffn": "local_stack"}, 2, "lossless", "first"),
    ("llama", {**UNEQUAL_SIZES, "heads": 8, "kv_groups": 4}, UNEQUAL_6, 1, "lossless", "split"),
    ("llama_tied", divided("llama", 2), all_axes("stack"), 1, "reference", "copy"),
    ("llama_tied", {**UNEQUAL_SIZES, "heads": 8, "kv_groups": 4}, UNEQUAL_6, 1, "lossless", "first"),
    ("bert", divided("bert", 4), all_axes("adjacent"), 1, "lossless", "copy"),
    ("bert", divided("bert", 2), all_axes("stack"), 1, "reference", "copy"),
    ("bert_order", divided("bert", 3), all_axes("stack"), 1, "lossless", "first"),
    ("bert_order", {**UNEQUAL_SIZES, "heads": 4}, UNEQUAL_12, 1, "reference", "first"),
    ("bert_post", divided("bert", 3), all_axes("stack"), 1, "lossless", "first"),
    ("bert_post", {**UNEQUAL_SIZES, "heads": 4}, UNEQUAL_12, 1, "reference", "first"),
    ("bert_post_untied", divided("bert", 2), all_axes("adjacent"), 1, "reference", "copy"),
    ("bert_untied", divided("bert", 2, depth=False), all_axes("local_stack"), 2, "lossless", "split"),
    ("bert_untied", {**UNEQUAL_SIZES, "heads": 4}, UNEQUAL_12, 1, "lossless", "split"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}-{case[5]}")
def pair(request):
    """(plan, oracle) of a case."""
    model, coarse, groupings, runs, embedding, depth = request.param
    sizes = {"tensor_parallel": runs}
    plan = plan_for(model, coarse=coarse, groupings=groupings, sizes=sizes, embedding=embedding, depth_residual=depth)
    return plan, oracle_for(plan, groupings, runs=runs, embedding=embedding, depth=depth)


def real(weights, vocab=61):
    """As float64 arrays without the pad rows of the vocabulary."""
    padded = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
    return {
        name: value[:vocab].double().numpy() if name.endswith(padded) else value.double().numpy()
        for name, value in weights.items()
    }


def assert_same(got, want, *, rounding):
    got = real(got)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        np.testing.assert_allclose(got[name], value, rtol=rounding, atol=rounding, err_msg=name)


@pytest.mark.parametrize("quantity", ["master", "exp_avg", "exp_avg_sq"])
def test_coalesce_is_the_product_with_the_dense_matrices(pair, quantity):
    plan, oracle = pair
    fine = random_weights(plan.fine.shape, seed=1, positive=quantity == "exp_avg_sq")
    want = oracle.apply(real(fine), direction="down", quantity=quantity)
    assert_same(coalesce(plan, fine, quantity), want, rounding=1e-7)


@pytest.mark.parametrize("quantity", ["master", "exp_avg", "exp_avg_sq"])
def test_decoalesce_is_the_product_with_the_dense_matrices(pair, quantity):
    plan, oracle = pair
    coarse = random_weights(plan.coarse.shape, seed=2, positive=quantity == "exp_avg_sq")
    want = oracle.apply(real(coarse), direction="up", quantity=quantity)
    assert_same(decoalesce(plan, coarse, quantity), want, rounding=1e-7)


BLENDS = [(0.25, 0.75), (0.4, 0.3), (1.0, 1.0), (0.5, 0.0), (0.0, 0.5)]


def test_refine_is_the_blend_of_the_dense_products(pair):
    plan, oracle = pair
    fine = random_weights(plan.fine.shape, seed=3)
    coarse = random_weights(plan.coarse.shape, seed=4)
    # with and without a share of C x in every case, the others where the parameters are few
    for alpha, beta in BLENDS if plan.coarse.shape.layers == 3 else BLENDS[:2]:
        want = oracle.refine(real(fine), real(coarse), alpha=alpha, beta=beta)
        assert_same(refine(plan, fine, coarse, alpha=alpha, beta=beta), want, rounding=1e-6)


def test_pad_rows_of_the_vocabulary_are_zero_whatever_they_held(pair):
    plan, _ = pair
    fine = random_weights(plan.fine.shape, seed=5)
    coarse = random_weights(plan.coarse.shape, seed=6)
    for weights in (fine, coarse):
        weights["embedding.word_embeddings.weight"][61:] = 7.0
    name = "embedding.word_embeddings.weight"
    assert torch.equal(coalesce(plan, fine)[name][61:], torch.zeros_like(coarse[name][61:]))
    assert torch.equal(decoalesce(plan, coarse)[name][61:], torch.zeros_like(fine[name][61:]))
