"""Core attention over torch's ``scaled_dot_product_attention``: runs on CPU, takes the flash kernels on GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from torch.nn import functional


class CoreAttention(torch.nn.Module):
    """What Megatron's layer spec calls ``core_attention``; it has no parameters.

    Megatron's own allocates on CUDA and holds the full score matrix.
    """

    def __init__(
        self,
        *,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        attention_dropout: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        assert attention_type == "self" and not config.apply_query_key_layer_scaling
        self.layer_number = layer_number
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout: float = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, heads of this rank, head_dim].
            key: [s, b, KV groups of this rank, head_dim].
            value: as ``key``.
            attention_mask: bool [b, 1, 1, s], True where a key must not be seen; None sees all (or all earlier) keys.
            attn_mask_type: Megatron passes the layer's own again.
            attention_bias: not supported.
            packed_seq_params: not supported.

        Returns:
            [s, b, heads x head_dim].
        """
        assert attention_bias is None and packed_seq_params is None
        dropout = self.dropout if self.training else 0.0
        # Each tensor-parallel rank holds other heads, so each must draw other masks than its neighbours.
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            attended = functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=dropout,
                is_causal=self.causal,
                scale=self.scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return attended.permute(2, 0, 1, 3).flatten(2)
