"""``embedding=reference, depth_residual=copy`` against the published method's rules on separate Q, K, V tensors.

The rules (W is [out, in]; a map matrix M has rows that sum to one; n() normalises rows): coalescing uses M = F,
de-coalescing M = n(F^T); an output side is multiplied by M, an input side by n(M^T); embeddings are multiplied by
M^T and then by 2 going down and by 0.5 going up; layers are summed with R or n(R^T). Width first, then depth.
"""

import numpy as np
import pytest

from ds_vcycle.operators.apply import coalesce, decoalesce
from tests.operator_cases import plan_for, random_weights

HEADS, HEAD, LAYERS, VOCAB = 4, 4, 4, 61
HIDDEN, FFN = HEADS * HEAD, 4 * HEADS * HEAD
SIZES = {
    "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "head_dim": HEAD, "ffn": FFN, "vocab_size": VOCAB,
    "sentence_order": False,
}  # fmt: skip
COARSE = {"layers": LAYERS // 2, "hidden": HIDDEN // 2, "heads": HEADS // 2, "ffn": FFN // 2}


def pairs(kind, n):
    return [(i, i + n // 2) for i in range(n // 2)] if kind == "stack" else [(2 * i, 2 * i + 1) for i in range(n // 2)]


def chunked(kind, n, width):
    """Lists of single indices that pair whole chunks of ``width``, as the published code pairs heads everywhere."""
    return [[a * width + j, b * width + j] for a, b in pairs(kind, n) for j in range(width)]


def normalised(matrix):
    return matrix / matrix.sum(axis=1, keepdims=True)


def average(groups):
    """F [coarse, fine] with rows that sum to one."""
    matrix = np.zeros((len(groups), sum(map(len, groups))))
    for row, members in enumerate(groups):
        matrix[row, list(members)] = 1
    return normalised(matrix)


def published(tensors, *, embed, head, inter, layers, down):
    """The published width rules on every tensor, then the depth rule; keys are (name, layer or None)."""
    E, Q, F, R = (average(g) if down else normalised(average(g).T) for g in (embed, head, inter, layers))
    E_in, Q_in, F_in = (normalised(m.T) for m in (E, Q, F))
    factor = 2.0 if down else 0.5
    out = {}
    for (name, layer), w in tensors.items():
        match name:
            case "word.weight" | "position.weight" | "token_type.weight":
                mapped = w @ E.T * factor
            case "query.weight" | "key.weight" | "value.weight":
                mapped = Q @ w @ E_in
            case "query.bias" | "key.bias" | "value.bias":
                mapped = Q @ w
            case "attention_output.weight":
                mapped = E @ w @ Q_in
            case "fc1.weight":
                mapped = F @ w @ E_in
            case "fc1.bias":
                mapped = F @ w
            case "fc2.weight":
                mapped = E @ w @ F_in
            case "transform.weight":
                mapped = E @ w @ E_in
            case "decoder.bias":
                mapped = w
            case _:  # layer norms, and the biases of what writes to the residual stream
                assert name.endswith(("norm.weight", "norm.bias", "output.bias", "fc2.bias", "transform.bias")), name
                mapped = E @ w
        out[name, layer] = mapped
    stacked = {name for name, layer in out if layer is not None}
    deep = {key: value for key, value in out.items() if key[1] is None}
    for name in stacked:
        for target in range(R.shape[0]):
            deep[name, target] = sum(R[target, source] * out[name, source] for source in range(R.shape[1]))
    return deep


PLAIN_NAMES = {
    "embedding.word_embeddings.weight": "word.weight",
    "embedding.position_embeddings.weight": "position.weight",
    "embedding.tokentype_embeddings.weight": "token_type.weight",
    "self_attention.linear_proj": "attention_output",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
    "lm_head.dense": "transform",
    "lm_head.layer_norm": "transform_norm",
    "output_layer.bias": "decoder.bias",
    "input_layernorm": "first_norm",
    "pre_mlp_layernorm": "second_norm",
    "final_layernorm": "final_norm",
    "embedding.layernorm": "embedding_norm",
    "post_attention_layernorm": "attention_norm",
    "post_mlp_layernorm": "mlp_norm",
}


def separate(weights, heads):
    """Megatron's tensors under plain names, (head, [q, k, v], head_dim) rows taken apart, pad rows left out."""
    tensors = {}
    for name, value in weights.items():
        array = value.double().numpy()
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
        if "linear_qkv" in name:
            rest = array.shape[1:]
            per_head = array.reshape(heads, 3, HEAD, *rest)
            for index, part in enumerate(("query", "key", "value")):
                key = f"{part}.{name.rsplit('.', 1)[1]}"
                tensors[key, layer] = per_head[:, index].reshape(heads * HEAD, *rest)
            continue
        megatron, plain = next((m, p) for m, p in PLAIN_NAMES.items() if m in name)
        key = plain if megatron.endswith((".weight", ".bias")) else f"{plain}.{name.rsplit('.', 1)[1]}"
        tensors[key, layer] = array[:VOCAB] if key in ("word.weight", "decoder.bias") else array
    return tensors


HEAD_PAIRS = {kind: chunked(kind, HEADS, HEAD) for kind in ("stack", "adjacent")}
INTER_PAIRS = {kind: chunked(kind, HEADS, 4 * HEAD) for kind in ("stack", "adjacent")}
# what the run asks for, and the published code's map for the hidden, head, ffn and layer axes
CASES = {
    "their pairs (i, i + n/2), written as named groupings": (
        {"hidden": "stack", "head": "stack", "ffn": "stack", "layer": "adjacent"},
        (HEAD_PAIRS["stack"], HEAD_PAIRS["stack"], INTER_PAIRS["stack"], pairs("adjacent", LAYERS)),
    ),
    "their example's layers (i, i + n/2)": (
        {"hidden": "stack", "head": "stack", "ffn": "stack", "layer": "stack"},
        (HEAD_PAIRS["stack"], HEAD_PAIRS["stack"], INTER_PAIRS["stack"], pairs("stack", LAYERS)),
    ),
    "their adjacent heads, pairing whole chunks everywhere": (
        {"hidden": HEAD_PAIRS["adjacent"], "head": "adjacent", "ffn": INTER_PAIRS["adjacent"], "layer": "adjacent"},
        (HEAD_PAIRS["adjacent"], HEAD_PAIRS["adjacent"], INTER_PAIRS["adjacent"], pairs("adjacent", LAYERS)),
    ),
    "our adjacent: single dims of hidden and ffn": (
        {},
        (pairs("adjacent", HIDDEN), HEAD_PAIRS["adjacent"], pairs("adjacent", FFN), pairs("adjacent", LAYERS)),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["gpt", "bert", "bert_post"])
def test_the_reference_policy_is_the_published_method_for_pairs(model, case):
    groupings, (embed, head, inter, layers) = CASES[case]
    plan = plan_for(
        model, coarse=COARSE, groupings=groupings, sizes=SIZES, embedding="reference", depth_residual="copy"
    )
    maps = {"embed": embed, "head": head, "inter": inter, "layers": layers}
    fine, coarse = random_weights(plan.fine.shape, seed=1), random_weights(plan.coarse.shape, seed=2)
    down = published(separate(fine, HEADS), **maps, down=True)
    up = published(separate(coarse, HEADS // 2), **maps, down=False)
    assert_same(separate(coalesce(plan, fine), HEADS // 2), down)
    assert_same(separate(decoalesce(plan, coarse), HEADS), up)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-7, atol=1e-7, err_msg=str(key))
