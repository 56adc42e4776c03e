"""Adam's moments across a change of level, against what Adam itself holds on both levels' Megatron models."""

import numpy as np
import pytest
import torch

from ds_vcycle.operators.apply import coalesce, decoalesce
from tests.operator_cases import divided, plan_for, random_weights
from tests.operator_models import adam_moments, batch_for, filled_model, lively_weights, single_process

process_group = pytest.fixture(scope="module", autouse=True)(single_process)

SMALL = {"layers": 2}
DEEP = {"layers": 6}
WIDTH_CASES = [
    ("gpt", divided("gpt", 2, depth=False, sizes=SMALL), None),
    ("gpt_untied", divided("gpt", 3, depth=False, sizes=SMALL), dict.fromkeys(("hidden", "head", "ffn"), "stack")),
    (
        "gpt",
        {"hidden": 8, "ffn": 3, "heads": 4, "layers": 2},
        {"head": [[0, 11, 3], [1], [2, 4, 5, 6, 7, 8], [10, 9]], "ffn": [[0, 1, 2, 3, 4], [35], [*range(5, 35)]]},
    ),
    ("llama", divided("llama", 2, depth=False, sizes=SMALL), None),
    ("llama_tied", divided("llama", 3, depth=False, sizes=SMALL), None),
    ("bert_order", divided("bert", 2, depth=False, sizes=SMALL), dict.fromkeys(("hidden", "head", "ffn"), "stack")),
    ("bert_untied", divided("bert", 3, depth=False, sizes=SMALL), None),
    ("bert_post_untied", divided("bert", 3, depth=False, sizes=SMALL), None),
    ("bert_post", divided("bert", 2, depth=False, sizes=SMALL), dict.fromkeys(("hidden", "head", "ffn"), "stack")),
]


def moments_of_both(plan, model):
    """Adam's moments after the same three batches: of the coarse model, and of what it de-coalesces to."""
    y = lively_weights(plan.coarse.shape, seed=1)
    batches = [batch_for(plan.coarse.shape, seed=seed) for seed in (2, 3, 4)]
    return tuple(
        adam_moments(filled_model(level, weights, model=model, dtype=torch.float64), batches)
        for level, weights in ((plan.coarse, y), (plan.fine, decoalesce(plan, y)))
    )


def assert_close(got, want, *, names=None):
    assert got.keys() == want.keys()
    for name in names or want:
        a, b = got[name].double().numpy(), want[name].double().numpy()
        largest = np.abs(b).max()
        assert largest > 0, f"{name}: nothing to compare"
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest, err_msg=name)


@pytest.mark.parametrize(("model", "coarse", "groupings"), WIDTH_CASES)
def test_in_width_mapped_moments_are_the_other_level_s_own_both_ways(model, coarse, groupings):
    plan = plan_for(model, coarse=coarse, groupings=groupings, sizes=SMALL)
    (m_small, v_small), (m_large, v_large) = moments_of_both(plan, model)
    assert_close(decoalesce(plan, m_small, "exp_avg"), m_large)
    assert_close(decoalesce(plan, v_small, "exp_avg_sq"), v_large)
    assert_close(coalesce(plan, m_large, "exp_avg"), m_small)
    assert_close(coalesce(plan, v_large, "exp_avg_sq"), v_small)


@pytest.mark.parametrize("model", ["bert_post", "bert_post_untied"])
def test_the_reference_policy_keeps_a_post_ln_model_s_moments_too(model):
    plan = plan_for(model, coarse=divided(model, 2, depth=False, sizes=SMALL), sizes=SMALL, embedding="reference")
    (m_small, v_small), (m_large, v_large) = moments_of_both(plan, model)
    assert_close(decoalesce(plan, m_small, "exp_avg"), m_large)
    assert_close(coalesce(plan, v_large, "exp_avg_sq"), v_small)


def is_writer(name):
    return "linear_proj" in name or "linear_fc2" in name


def test_under_first_the_group_s_first_layer_keeps_its_moments_and_later_ones_start_at_rest():
    groupings = {"layer": [[0, 3], [1, 2, 4, 5]]}
    plan = plan_for("gpt", coarse=divided("gpt", 2, sizes=DEEP) | {"layers": 2}, groupings=groupings, sizes=DEEP)
    (m_small, v_small), (m_large, v_large) = moments_of_both(plan, "gpt")
    m, v = decoalesce(plan, m_small, "exp_avg"), decoalesce(plan, v_small, "exp_avg_sq")
    later = [name for name in m if any(f"layers.{i}." in name for i in (2, 3, 4, 5))]
    kept = [name for name in m if name not in later]
    assert_close(m, m_large, names=kept)
    assert_close(v, v_large, names=kept)
    for name in later:
        assert not m[name].any(), name
        # what does not write has no gradient either, as long as what writes behind it is zero
        assert is_writer(name) or not m_large[name].any(), name
        first = {"2": "1", "3": "0", "4": "1", "5": "1"}[name.split(".")[2]]
        assert torch.equal(v[name], v[name.replace(name.split(".")[2], first, 1)]), name


def test_under_first_a_post_ln_layer_that_reads_a_parameter_takes_its_moments():
    """The group's first layer reads all but the norm that ends a layer, which its last one reads."""
    coarse = divided("bert_post", 1, sizes=DEEP) | {"layers": 2}
    plan = plan_for("bert_post", coarse=coarse, groupings={"layer": [[0, 1], [2, 3, 4, 5]]}, sizes=DEEP)
    (m_small, v_small), (m_large, v_large) = moments_of_both(plan, "bert_post")
    m, v = decoalesce(plan, m_small, "exp_avg"), decoalesce(plan, v_small, "exp_avg_sq")
    readers = {name: reader_of(name) for name in m}
    assert_close(m, m_large, names=[name for name, reader in readers.items() if name == reader])
    assert_close(v, v_large, names=[name for name, reader in readers.items() if name == reader])
    for name, reader in readers.items():
        assert torch.equal(v[name], v[reader])
        assert name == reader or (not m[name].any() and m[reader].any()), name
    down = coalesce(plan, m_large, "exp_avg")
    for name in (name for name in down if "post_" in name):
        assert_close(down, m_small, names=[name])


def reader_of(name):
    if "layers." not in name:
        return name
    layer = int(name.split(".")[2])
    first, last = (0, 1) if layer < 2 else (2, 5)
    return name.replace(f"layers.{layer}.", f"layers.{last if 'post_mlp' in name else first}.")


def test_under_first_the_coarse_first_moment_is_the_transpose_of_the_fine_one():
    plan = plan_for("llama_tied", coarse=divided("llama", 3, sizes=DEEP), sizes=DEEP)
    (m_small, _), (m_large, _) = moments_of_both(plan, "llama_tied")
    assert_close(coalesce(plan, m_large, "exp_avg"), m_small)


@pytest.mark.parametrize("policy", ["copy", "split"])
def test_copied_layers_share_the_gradient_over_their_group(policy):
    coarse = divided("gpt", 1, sizes=DEEP) | {"layers": 2}
    plan = plan_for(
        "gpt", coarse=coarse, groupings={"layer": [[0], [1, 2, 3, 4, 5]]}, sizes=DEEP, depth_residual=policy
    )
    m = random_weights(plan.coarse.shape, seed=1)
    v = random_weights(plan.coarse.shape, seed=2, positive=True)
    up_m, up_v = decoalesce(plan, m, "exp_avg"), decoalesce(plan, v, "exp_avg_sq")
    for name in m:
        if "layers.1." not in name:
            assert torch.equal(up_m[name], m[name]) and torch.equal(up_v[name], v[name]), name
            continue
        k = 1 if policy == "split" and is_writer(name) else 5
        for layer in range(1, 6):
            fine = name.replace("layers.1.", f"layers.{layer}.")
            assert torch.equal(up_m[fine], m[name] / k) and torch.equal(up_v[fine], v[name] / k**2), fine


@pytest.mark.parametrize("policy", ["copy", "split", "first"])
def test_going_down_second_moments_add_as_standard_deviations(policy):
    """v = (sum s sqrt v)^2 with s the factors of the transpose: m of the same values is its signed root."""
    plan = plan_for("bert_order", coarse=divided("bert", 3, sizes=DEEP), sizes=DEEP, depth_residual=policy)
    m = {name: value.abs() for name, value in random_weights(plan.fine.shape, seed=3).items()}
    v = {name: value.square() for name, value in m.items()}
    down_m, down_v = coalesce(plan, m, "exp_avg"), coalesce(plan, v, "exp_avg_sq")
    for name, value in down_v.items():
        torch.testing.assert_close(value, down_m[name].square(), rtol=1e-6, atol=0)
