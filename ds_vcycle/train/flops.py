"""Model FLOPs by formula: what the model's matrix products cost, whatever ran them. Imports no torch.

A multiply-add counts 2, attention counts in full (s x s, although a causal kernel may skip half), the backward pass
is twice the forward pass, the head is counted where logits are really computed. Embedding look-ups, norms,
activations and the optimizer count nothing. Recomputed activations are reported apart: they buy memory, not loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ds_vcycle.levels import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Floating-point operations of the transformer blocks and of the head (vocabulary projection and what feeds it)."""

    blocks: int
    head: int

    @property
    def total(self) -> int:
        """Blocks and head."""
        return self.blocks + self.head


def predicted_positions(shape: ModelShape, mask_probability: float) -> int:
    """Positions of one sample whose logits are computed: all for GPT, the fixed number of masked ones for BERT."""
    return shape.sequence_length if shape.architecture == "gpt" else math.ceil(mask_probability * shape.sequence_length)


def forward_flops(shape: ModelShape, *, samples: int, predicted_positions: int) -> Flops:
    """FLOPs of one forward pass.

    Args:
        shape: the level, vocabulary padded as built.
        samples: sequences of ``shape.sequence_length`` tokens.
        predicted_positions: of one sample, see :func:`predicted_positions`.
    """
    s, h, f = shape.sequence_length, shape.hidden, shape.ffn
    qkv = _product(s, h, (shape.heads + 2 * shape.kv_groups) * shape.head_dim)
    scores_and_values = 2 * _product(s, s, shape.heads * shape.head_dim)
    projection = _product(s, shape.heads * shape.head_dim, h)
    mlp = (3 if shape.activation == "swiglu" else 2) * _product(s, h, f)
    head = _product(predicted_positions, h, shape.padded_vocab)
    if shape.architecture == "bert":
        head += _product(predicted_positions, h, h)
        if shape.sentence_order:
            head += _product(1, h, h) + _product(1, h, 2)
    blocks = shape.layers * (qkv + scores_and_values + projection + mlp)
    return Flops(blocks=samples * blocks, head=samples * head)


def step_flops(shape: ModelShape, *, samples: int, predicted_positions: int) -> Flops:
    """FLOPs of forward and backward over one step's ``samples``: three forward passes, recompute left out."""
    forward = forward_flops(shape, samples=samples, predicted_positions=predicted_positions)
    return Flops(blocks=3 * forward.blocks, head=3 * forward.head)


def recompute_flops(shape: ModelShape, recompute: Literal["none", "selective", "full"], *, samples: int) -> int:
    """FLOPs that recompute adds to one step: core attention (selective) or the blocks' forward pass (full)."""
    if recompute == "none":
        return 0
    if recompute == "full":
        return forward_flops(shape, samples=samples, predicted_positions=0).blocks
    s = shape.sequence_length
    return samples * shape.layers * 2 * _product(s, s, shape.heads * shape.head_dim)


def _product(m: int, n: int, k: int) -> int:
    return 2 * m * n * k
