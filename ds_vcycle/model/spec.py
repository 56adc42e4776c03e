"""The layer specification: Megatron's layer, pre-LN or post-LN, of plain torch or of Transformer Engine modules.

Both put every norm in a module of its own (Transformer Engine's fused norm-and-linear would name the parameters
otherwise), so that :mod:`ds_vcycle.schema` describes both.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ds_vcycle.config import ConfigError, ModelConfig
from ds_vcycle.levels import ModelShape
from ds_vcycle.model.attention import CoreAttention
from ds_vcycle.model.post_norm import PostNormLayer
from ds_vcycle.parallel import Mesh


def uses_transformer_engine(model: ModelConfig, mesh: Mesh) -> bool:
    """Whether the layers are Transformer Engine's.

    Raises:
        ConfigError: they must be, and cannot.
    """
    possible = bool(HAVE_TE) and mesh.device.type == "cuda"
    if model.transformer_engine == "always" and not possible:
        reason = "it is not installed" if not HAVE_TE else "it needs a CUDA device"
        raise ConfigError(
            f"model.transformer_engine=always: Transformer Engine cannot be used here, {reason}; "
            "set model.transformer_engine=auto or never"
        )
    return possible and model.transformer_engine != "never"


def block_spec(shape: ModelShape, *, transformer_engine: bool) -> TransformerBlockSubmodules:
    """The layers of one level and the norm after them, which post-LN layers go without."""
    column, row, norm, core = _transformer_engine() if transformer_engine else _local()
    mask = AttnMaskType.causal if shape.architecture == "gpt" else AttnMaskType.padding
    head_norm = norm if shape.qk_norm else IdentityOp
    pre = shape.norm_placement == "pre"
    layer = ModuleSpec(
        module=TransformerLayer if pre else PostNormLayer,
        params={} if pre else {"norm": norm},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if pre else IdentityOp,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=core,
                    linear_proj=row,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if pre else IdentityOp,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * shape.layers, layer_norm=norm if pre else None)


def _local() -> tuple[Any, ...]:
    return ColumnParallelLinear, RowParallelLinear, WrappedTorchNorm, CoreAttention


def _transformer_engine() -> tuple[Any, ...]:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    backend = TESpecProvider()
    return (
        backend.column_parallel_linear(),
        backend.row_parallel_linear(),
        backend.layer_norm(),
        backend.core_attention(),
    )
