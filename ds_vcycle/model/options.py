"""From our configuration to Megatron's TransformerConfig, ``model.megatron`` included."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from ds_vcycle.config import ConfigError, ModelConfig
from ds_vcycle.levels import Level
from ds_vcycle.parallel import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "swiglu": functional.silu,
}

_OUR_KEYS = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_groups",
    "kv_channels": "model.head_dim",
    "ffn_hidden_size": "model.ffn",
    "hidden_dropout": "model.dropout",
    "attention_dropout": "model.attention_dropout",
    "layernorm_epsilon": "model.norm_eps",
    "normalization": "model.normalization",
    "activation_func": "model.activation",
    "gated_linear_unit": "model.activation",
    "add_bias_linear": "model.bias",
    "qk_layernorm": "model.qk_norm",
    "init_method_std": "model.init_std",
    "tensor_model_parallel_size": "model.tensor_parallel",
    "sequence_parallel": "model.sequence_parallel",
    "recompute_granularity": "model.recompute",
    "transformer_impl": "model.transformer_engine",
    "params_dtype": "training.precision",
    "bf16": "training.precision",
    "fp16": "training.precision",
}
_ANYWHERE = {
    "softmax_scale",
    "rotary_interleaved",
    "no_rope_freq",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "disable_bf16_reduced_precision_matmul",
    "deterministic_mode",
}
_TRANSFORMER_ENGINE_ONLY = {
    "attention_backend",
    "window_size",
    "softmax_type",
    "fp32_residual_connection",
    "memory_efficient_layer_norm",
    "persist_layer_norm",
    "tp_comm_overlap",
    "fp8",
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
}
_REASONS = {
    "layernorm_zero_centered_gamma": "zero-centred norm weights do not survive averaging and copying",
    "pipeline_model_parallel_size": "levels are not split over pipeline stages",
    "context_parallel_size": "sequences are not split over ranks",
    "num_moe_experts": "experts have no mapping between levels",
    "multi_latent_attention": "latent attention has no mapping between levels",
}


def transformer_config(level: Level, model: ModelConfig, *, mesh: Mesh, transformer_engine: bool) -> TransformerConfig:
    """Megatron's configuration of one level.

    Raises:
        ConfigError: a key of ``model.megatron`` is unknown, contradicts one of ours, or would have no effect; or
            sequence parallelism is asked for where it cannot run.
    """
    _check_sequence_parallel(model, mesh, transformer_engine)
    _check_fused_activation(model)
    _check_recomputed_norms(model)
    extra = _checked_extra(model.megatron, transformer_engine)
    try:
        return TransformerConfig(**_from_ours(level, model, mesh, transformer_engine) | extra)
    except (ValueError, AssertionError, TypeError) as error:
        given = ", ".join(f"model.megatron.{key}={value!r}" for key, value in model.megatron.items())
        raise ConfigError(f"Megatron refuses this model ({given or 'no model.megatron keys'}): {error}") from error


def _from_ours(level: Level, model: ModelConfig, mesh: Mesh, transformer_engine: bool) -> dict[str, Any]:
    shape = level.shape
    recompute: dict[str, Any] = {"none": {}, "selective": {"recompute_granularity": "selective"}}.get(
        model.recompute,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    )
    return recompute | {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_groups,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "layernorm_epsilon": model.norm_eps,
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[shape.normalization],
        "activation_func": _activation(model),
        "gated_linear_unit": shape.activation == "swiglu",
        "add_bias_linear": shape.bias,
        "qk_layernorm": shape.qk_norm,
        "init_method_std": model.init_std,
        "tensor_model_parallel_size": mesh.tp_size,
        "sequence_parallel": model.sequence_parallel and mesh.tp_size > 1,
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "params_dtype": DTYPES[level.precision],
        "bf16": level.precision == "bf16",
        "use_cpu_initialization": True,
        "perform_initialization": False,  # initial.py's does not depend on the layout
    }


def _check_sequence_parallel(model: ModelConfig, mesh: Mesh, transformer_engine: bool) -> None:
    if not model.sequence_parallel:
        return
    reason = ""
    if mesh.device.type == "cpu":
        reason = "Megatron's sequence parallelism needs CUDA, and this run is on CPU"
    elif not transformer_engine:
        reason = "it needs Transformer Engine's norm, which is not installed or switched off"
    elif model.architecture == "bert":
        reason = "bert's head reads masked positions from the whole sequence"
    if reason:
        raise ConfigError(f"model.sequence_parallel=true: {reason}; set model.sequence_parallel=false")


def _activation(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Megatron's fused kernel goes by the name of the exact gelu, and computes the tanh approximation."""
    fused = model.activation == "gelu_tanh" and model.megatron.get("bias_activation_fusion")
    return functional.gelu if fused else ACTIVATIONS[model.activation]


def _check_fused_activation(model: ModelConfig) -> None:
    if model.activation == "gelu" and model.megatron.get("bias_activation_fusion"):
        raise ConfigError(
            "model.megatron.bias_activation_fusion=true: Megatron's fused kernel computes gelu's tanh approximation, "
            "which is not model.activation=gelu; set model.activation=gelu_tanh, or remove bias_activation_fusion"
        )


def _check_recomputed_norms(model: ModelConfig) -> None:
    """Megatron recomputes the norms before the branches only, and says nothing where there are none."""
    modules = model.megatron.get("recompute_modules") or ()
    if model.norm_placement == "post" and "layernorm" in modules:
        raise ConfigError(
            f"model.megatron.recompute_modules={modules!r}: the norms of model.norm_placement=post are not recomputed "
            "alone; remove layernorm, or set model.recompute=full"
        )


def _checked_extra(extra: dict[str, Any], transformer_engine: bool) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for key in extra:
        name = f"model.megatron.{key}"
        if key not in known:
            close = difflib.get_close_matches(key, sorted(_ANYWHERE | _TRANSFORMER_ENGINE_ONLY), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"possible: {', '.join(sorted(_ANYWHERE))}"
            raise ConfigError(f"unknown key {name!r}: Megatron's TransformerConfig has no such option; {hint}")
        if key in _OUR_KEYS:
            raise ConfigError(f"{name}={extra[key]!r} contradicts {_OUR_KEYS[key]}; remove it and set {_OUR_KEYS[key]}")
        if key in _TRANSFORMER_ENGINE_ONLY and not transformer_engine:
            raise ConfigError(
                f"{name}={extra[key]!r} acts with Transformer Engine only, which is not in use here; remove it"
            )
        if key not in _ANYWHERE | _TRANSFORMER_ENGINE_ONLY:
            reason = _REASONS.get(key, "it would have no effect here, or change parameters the levels do not map")
            raise ConfigError(f"{name}={extra[key]!r} is not supported: {reason}; remove it")
    if "attention_backend" not in extra:
        return dict(extra)
    try:
        return {**extra, "attention_backend": AttnBackend[extra["attention_backend"]]}
    except KeyError as error:
        names = ", ".join(backend.name for backend in AttnBackend)
        raise ConfigError(
            f"model.megatron.attention_backend={extra['attention_backend']!r}: choose one of {names}"
        ) from error
