"""A plan is called lossless exactly when Megatron's own logits survive de-coalescing."""

import pytest

from ds_vcycle.config import UserError
from ds_vcycle.operators.apply import decoalesce
from tests.operator_cases import MODELS, divided, plan_for
from tests.operator_models import batch_for, filled_model, lively_weights, logits_of, single_process

process_group = pytest.fixture(scope="module", autouse=True)(single_process)

SIX = {"layers": 6}
UNEQUAL_FFN = [[0, 1, 2, 3, 4], [35], [*range(5, 34)], [34]]
UNEQUAL_LAYERS = [[0, 5], [1], [2, 3, 4]]
UNEQUAL = {
    "gpt": {"head": [[0, 11, 3], [1], [2, 4, 5, 6, 7, 8], [10, 9]], "ffn": UNEQUAL_FFN, "layer": UNEQUAL_LAYERS},
    "llama": {"head": [[0, 5, 2], [1], [3], [4]], "ffn": UNEQUAL_FFN, "layer": UNEQUAL_LAYERS},
}
UNEQUAL_COARSE = {
    "gpt": {"hidden": 8, "ffn": 4, "heads": 4, "layers": 3},
    "llama": {"hidden": 8, "ffn": 4, "heads": 8, "kv_groups": 4, "layers": 3},
}
STACK = dict.fromkeys(("hidden", "head", "ffn", "layer"), "stack")
# the norms of a post-LN model tie the layers of a group together, so these must be neighbours
STACK_POST = {**STACK, "layer": "adjacent"}
UNEQUAL_POST = {**UNEQUAL["gpt"], "layer": [[0, 1], [2], [3, 4, 5]]}
SAME = divided("gpt", 1, sizes=SIX)
REVERSED = {"hidden": [[23 - i] for i in range(24)]}


def difference(model, coarse, groupings=None, *, embedding="lossless", depth_residual="first"):
    """(plan, largest difference of the logits, which are of order one)."""
    plan = plan_for(
        model, coarse=coarse, groupings=groupings, sizes=SIX, embedding=embedding, depth_residual=depth_residual
    )
    small, large = plan.coarse, plan.fine
    y = lively_weights(small.shape, seed=1)
    batch = batch_for(small.shape, seed=2)
    want = logits_of(filled_model(small, y, model=model), batch, small.shape)
    got = logits_of(filled_model(large, decoalesce(plan, y), model=model), batch, large.shape)
    assert 0.5 < want.abs().max() < 10
    return plan, float((got - want).abs().max())


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_wider_and_deeper_by_m_keeps_the_logits(model, m):
    stack = STACK_POST if "post" in model else STACK
    plan, error = difference(model, divided(model, m, sizes=SIX), stack if m == 2 else None)
    assert error < 1e-5
    assert plan.lossless and plan.notes == ()


@pytest.mark.parametrize("model", MODELS)
def test_unequal_head_ffn_and_layer_groups_keep_the_logits(model):
    kind = "llama" if model.startswith("llama") else "gpt"
    groupings = UNEQUAL_POST if "post" in model else UNEQUAL[kind]
    plan, error = difference(model, UNEQUAL_COARSE[kind], groupings)
    assert error < 1e-5
    assert plan.lossless


@pytest.mark.parametrize(
    ("model", "coarse", "groupings", "policies"),
    [
        ("gpt_untied", divided("gpt", 2, width=False, sizes=SIX), None, {"embedding": "reference"}),
        ("gpt", SAME, REVERSED, {"embedding": "reference"}),
        ("gpt_untied", SAME, REVERSED, {"embedding": "reference"}),
        ("gpt", divided("gpt", 2, depth=False, sizes=SIX), None, {"depth_residual": "copy"}),
        ("bert_order", divided("gpt", 3, depth=False, sizes=SIX), None, {"depth_residual": "split"}),
        ("gpt", {**SAME, "layers": 2}, {"layer": [[0, 5], [1, 2, 3, 4]]}, {}),
        ("bert_post", divided("gpt", 2, sizes=SIX), STACK_POST, {"embedding": "reference"}),
        ("bert_post_untied", divided("gpt", 3, sizes=SIX), None, {"embedding": "reference"}),
        ("bert_post", divided("gpt", 3, depth=False, sizes=SIX), None, {"depth_residual": "copy"}),
        ("bert_post", divided("gpt", 2, depth=False, sizes=SIX), None, {"depth_residual": "split"}),
    ],
)
def test_policies_that_change_the_logits_elsewhere_keep_them_here(model, coarse, groupings, policies):
    plan, error = difference(model, coarse, groupings, **policies)
    assert error < 1e-5
    assert plan.lossless


@pytest.mark.parametrize(
    ("model", "coarse", "groupings", "policies", "note"),
    [
        ("gpt", divided("gpt", 2, depth=False, sizes=SIX), None, {"embedding": "reference"}, "embedding=reference"),
        (
            "bert_order",
            divided("gpt", 2, depth=False, sizes=SIX),
            STACK,
            {"embedding": "reference"},
            "embedding=reference",
        ),
        (
            "llama_tied",
            divided("llama", 2, depth=False, sizes=SIX),
            None,
            {"embedding": "reference"},
            "embedding=reference",
        ),
        ("gpt", {**SAME, "hidden": 2}, {"hidden": [[*range(8)], [*range(8, 24)]]}, {}, "unequal hidden groups"),
        ("gpt", divided("gpt", 2, width=False, sizes=SIX), None, {"depth_residual": "copy"}, "depth_residual=copy"),
        ("bert", divided("gpt", 2, width=False, sizes=SIX), None, {"depth_residual": "split"}, "depth_residual=split"),
        ("bert_post", divided("gpt", 2, width=False, sizes=SIX), None, {"depth_residual": "copy"}, "=copy"),
        ("bert_post", divided("gpt", 2, width=False, sizes=SIX), {"layer": "stack"}, {}, "neighbouring layers only"),
        ("gpt", {**SAME, "layers": 2}, {"layer": [[1, 2, 3, 4], [0, 5]]}, {}, "another order"),
        ("gpt", SAME, {"layer": [[1], [0], [2], [3], [4], [5]]}, {"depth_residual": "copy"}, "another order"),
    ],
)
def test_what_the_plan_does_not_call_lossless_moves_the_logits(model, coarse, groupings, policies, note):
    plan, error = difference(model, coarse, groupings, **policies)
    assert error > 0.03
    assert not plan.lossless
    assert len(plan.notes) == 1 and note in plan.notes[0]


def test_split_is_refused_for_layers_that_norm_their_sums():
    with pytest.raises(UserError, match=r"operators\.depth_residual=split.*norm_placement=post.*=first or copy"):
        plan_for("bert_post", coarse=divided("bert_post", 2), depth_residual="split")
