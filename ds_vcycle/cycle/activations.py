"""What a forward pass leaves in a rank's memory for the backward pass, by formula. Imports no torch.

After "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., arXiv 2205.05198, section 4),
with what our model does put in place of what theirs did: core attention is ``scaled_dot_product_attention``, which
keeps queries, keys, values and one number a row instead of scores and their dropout mask; the loss keeps one fp32
buffer at the vocabulary; BERT's head runs at the masked positions only. Counted per tensor that autograd saves: a
tensor that two operations save counts once.

A GPU's kernels are meant, or a CPU's by ``device="cpu"``, which keeps a dropout mask in the weights' type instead of
one byte an element, and what the single operations of RMSNorm keep. Attention with dropout keeps its scores on a CPU;
that is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_vcycle.config import ModelConfig
from ds_vcycle.levels import Level
from ds_vcycle.train.flops import predicted_positions

Device = Literal["cuda", "cpu"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
_FP32 = 4
_POSITION_EMBEDDING_FACTORS = 4  # cosine and sine, for queries and keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes on one rank for one micro-batch.

    ``layer``: of one layer as it runs. ``blocks``: kept by all layers, the embedding and the last norm.
    ``logits``: kept by the loss and BERT's head.
    ``head_forward``, ``head_backward``: besides, while logits are turned into a loss and back into a gradient.
    ``working``: besides, while one layer is gone through backward (with full recompute all that it keeps).
    """

    layer: int
    blocks: int
    logits: int
    head_forward: int
    head_backward: int
    working: int


def activations(
    level: Level, model: ModelConfig, *, micro_batch: int, mask_probability: float, device: Device = "cuda"
) -> Activations:
    """What a micro-batch of ``micro_batch`` samples leaves on a rank of a level."""
    shape, element = level.shape, ELEMENT_BYTES[level.precision]
    tokens = micro_batch * shape.sequence_length
    layer, outside = _layer(level, model, tokens, device), _outside(level, model, tokens, device)
    stream = tokens * shape.hidden * element // _sequence_ranks(level, model)
    kept = stream if model.recompute == "full" else layer
    if model.recompute == "selective":  # queries, keys and values stay; what attention says of its rows goes
        kept -= _FP32 * tokens * shape.heads // level.tensor_parallel
    logits = micro_batch * predicted_positions(shape, mask_probability) * shape.padded_vocab // level.tensor_parallel
    rounded = element if level.precision == "bf16" else 0  # in fp32 the logits are what the loss works on
    return Activations(
        layer=layer,
        blocks=shape.layers * kept + outside,
        logits=_FP32 * logits + _bert_head(level, micro_batch * predicted_positions(shape, mask_probability)),
        head_forward=(rounded + (_FP32 if level.tensor_parallel == 1 else 0)) * logits,
        head_backward=rounded * logits + element * shape.padded_vocab * shape.hidden // level.tensor_parallel,
        working=_gradients(level, tokens) + (layer if model.recompute == "full" else 0),
    )


def _layer(level: Level, model: ModelConfig, tokens: int, device: Device) -> int:
    """Inputs and outputs of two norms (before or after the branches: the same), attention, MLP, dropout masks."""
    shape, tp, element = level.shape, level.tensor_parallel, ELEMENT_BYTES[level.precision]
    sequence_ranks = _sequence_ranks(level, model)
    stream = tokens * shape.hidden // sequence_ranks
    normed = 2 * stream * (2 * element + _composite_norm(level, device))
    statistics = 2 * 2 * _FP32 * tokens // sequence_ranks
    masks = 2 * stream * _mask_bytes(level, model, device)
    table = _POSITION_EMBEDDING_FACTORS * shape.sequence_length * shape.head_dim if shape.position == "rope" else 0
    kept = element * (tokens * (_attention(level) + _mlp(level, model)) // tp + table)
    return normed + kept + statistics + masks + _FP32 * tokens * shape.heads // tp


def _attention(level: Level) -> int:
    """Elements of a token over all tensor-parallel ranks: the fused projection, its copies, what is attended.

    Queries of several groups that share keys are copied out of the projection, and queries and keys are copied when
    they are turned or normed; values stay in it.
    """
    shape = level.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_groups * shape.head_dim
    shared = shape.heads_per_group > 1 and shape.kv_groups > level.tensor_parallel
    changed = shape.position == "rope" or shape.qk_norm
    copies = (queries + keys) * changed + queries * (shared and (shape.qk_norm or not changed))
    return queries + 2 * keys + copies + queries


def _mlp(level: Level, model: ModelConfig) -> int:
    """Elements of a token over all tensor-parallel ranks: before the activation, its factors if gated, after it."""
    shape = level.shape
    if shape.activation != "swiglu":
        return 2 * shape.ffn
    fused = bool(model.megatron.get("bias_activation_fusion"))
    return (3 if fused else 5) * shape.ffn


def _outside(level: Level, model: ModelConfig, tokens: int, device: Device) -> int:
    """The last norm and the head's input, or with norms after branches the embedding's norm; the embedding's mask."""
    shape, element = level.shape, ELEMENT_BYTES[level.precision]
    per_feature = 2 * element + _composite_norm(level, device) + _mask_bytes(level, model, device)
    return tokens * shape.hidden * per_feature // _sequence_ranks(level, model)


def _bert_head(level: Level, positions: int) -> int:
    """Inputs of BERT's dense layer, its gelu, its norm and the vocabulary projection."""
    if level.shape.architecture == "gpt":
        return 0
    return 4 * positions * level.shape.hidden * ELEMENT_BYTES[level.precision]


def _gradients(level: Level, tokens: int) -> int:
    """Gradients in flight while the MLP is gone through backward: of its two wide tensors and of the stream twice."""
    shape = level.shape
    wide = (3 if shape.activation == "swiglu" else 2) * shape.ffn // level.tensor_parallel
    return ELEMENT_BYTES[level.precision] * tokens * (wide + 2 * shape.hidden)


def _composite_norm(level: Level, device: Device) -> int:
    """Bytes a feature that RMSNorm keeps besides its input and output: on a CPU it runs as several operations."""
    if level.shape.normalization == "layernorm" or device == "cuda":
        return 0
    return 4 if level.precision == "fp32" else 6


def _mask_bytes(level: Level, model: ModelConfig, device: Device) -> int:
    if not model.dropout:
        return 0
    return ELEMENT_BYTES[level.precision] if device == "cpu" else 1


def _sequence_ranks(level: Level, model: ModelConfig) -> int:
    """Over how many ranks the residual stream is split."""
    return level.tensor_parallel if model.sequence_parallel else 1
