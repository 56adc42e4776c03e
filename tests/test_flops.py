"""The FLOP formula against the products that torch really dispatches, on the built models."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ds_vcycle import parallel
from ds_vcycle.config import parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.train.flops import Flops, forward_flops, predicted_positions, recompute_flops, step_flops

SAMPLES, SEQUENCE, VOCAB = 3, 32, 200
GPT = {"architecture": "gpt", "layers": 3, "hidden": 48, "heads": 4, "sequence_length": SEQUENCE, "vocab_size": VOCAB}
BERT = {**GPT, "architecture": "bert", "ffn": 100}
LLAMA = {
    "kv_groups": 2, "activation": "swiglu", "ffn": 72, "position": "rope", "normalization": "rmsnorm", "bias": False,
    "tied_embeddings": False,
}  # fmt: skip
MODELS = {
    "gpt": GPT,
    "gpt-wide-heads": {**GPT, "head_dim": 20},
    "gpt-swiglu-gqa": {**GPT, **LLAMA},
    "bert": BERT,
    "bert-sentence-order": {**BERT, "sentence_order": True},
}


def build(name):
    tree = {
        "model": {**MODELS[name], "dropout": 0.0, "attention_dropout": 0.0},
        "training": {"global_batch": SAMPLES, "micro_batch": SAMPLES},
        "data": {"path": "data/x"},
        "cycle": {"kind": "flat"},
    }
    config = parse_config(tree)
    (level,) = resolve_levels(config)
    parallel.init_distributed("cpu")
    module = build_model(level, config.model, mesh=parallel.mesh_for(1), seed=1)
    return level.shape, module, predicted_positions(level.shape, config.data.mask_probability)


def batch(shape, positions):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQUENCE))
    inputs = {"tokens": tokens, "labels": tokens[:, :positions], "weights": torch.ones(SAMPLES, positions)}
    if shape.architecture == "bert":
        inputs["token_types"] = torch.zeros_like(tokens)
        inputs["padding_mask"] = torch.ones(SAMPLES, SEQUENCE, dtype=torch.bool)
        inputs["masked_positions"] = torch.arange(positions).expand(SAMPLES, positions)
        if shape.sentence_order:
            inputs["sentence_order"] = torch.zeros(SAMPLES, dtype=torch.int64)
    return inputs


def counted(module, inputs):
    """(blocks forward, everything forward, everything forward and backward) as torch counts it."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        losses = module(**inputs)
        name = f"{type(module).__name__}.{'encoder' if hasattr(module, 'encoder') else 'decoder'}"
        blocks, forward = sum(counter.get_flop_counts()[name].values()), counter.get_total_flops()
        sum(losses).backward()
    return blocks, forward, counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_formula_against_torch(name):
    shape, module, positions = build(name)
    blocks, forward, step = counted(module, batch(shape, positions))
    formula = forward_flops(shape, samples=SAMPLES, predicted_positions=positions)
    assert formula.blocks == pytest.approx(blocks, rel=0.01)
    assert formula.head == pytest.approx(forward - blocks, rel=0.01)
    assert step_flops(shape, samples=SAMPLES, predicted_positions=positions).total == pytest.approx(step, rel=0.01)


def test_predicted_positions_are_all_for_gpt_and_the_fixed_share_for_bert():
    gpt, bert = build("gpt")[0], build("bert")[0]
    assert predicted_positions(gpt, 0.15) == SEQUENCE
    assert [predicted_positions(bert, share) for share in (0.15, 0.5, 0.01)] == [math.ceil(4.8), 16, 1]


def test_recompute_is_apart():
    shape, _, positions = build("gpt")
    blocks = forward_flops(shape, samples=SAMPLES, predicted_positions=positions).blocks
    attention = SAMPLES * shape.layers * 2 * (2 * SEQUENCE * SEQUENCE * shape.hidden)
    assert [recompute_flops(shape, kind, samples=SAMPLES) for kind in ("none", "selective", "full")] == [
        0,
        attention,
        blocks,
    ]


def test_total_is_blocks_and_head():
    assert Flops(blocks=3, head=4).total == 7
