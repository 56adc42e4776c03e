"""The post-LN transformer layer of the original BERT: x = norm(x + attention(x)), then x = norm(x + mlp(x))."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class PostNormLayer(TransformerLayer):
    """Megatron's layer without its norms computes x + branch(x); here each sum is normed (arXiv:1810.04805)."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *, norm: Any, **others: Any
    ) -> None:
        assert submodules.input_layernorm is IdentityOp and submodules.pre_mlp_layernorm is IdentityOp
        super().__init__(config, submodules, **others)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm = build_module(norm, config=config, hidden_size=size, eps=eps)
        self.post_mlp_layernorm = build_module(norm, config=config, hidden_size=size, eps=eps)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        hidden, context = super()._forward_attention(*args, **kwargs)
        return self.post_attention_layernorm(hidden), context

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.post_mlp_layernorm(super()._forward_mlp(*args, **kwargs))
        return hidden
