"""Which options of ``model.megatron`` leave what a model computes as transformers computes it. Imports no torch."""

from __future__ import annotations

from typing import Any

from ds_vcycle.config import ModelConfig

# They say how a model is computed (memory, communication, kernels, precision), not what.
HARMLESS = frozenset({
    "apply_rope_fusion", "attention_backend", "bias_activation_fusion", "bias_dropout_fusion", "deterministic_mode",
    "disable_bf16_reduced_precision_matmul", "distribute_saved_activations", "fp32_residual_connection", "fp8",
    "fp8_amax_compute_algo", "fp8_amax_history_len", "fp8_margin", "fp8_recipe", "memory_efficient_layer_norm",
    "persist_layer_norm", "recompute_method", "recompute_modules", "recompute_num_layers", "tp_comm_overlap",
})  # fmt: skip
# The values at which the others do nothing: Megatron's defaults.
WITHOUT_EFFECT: dict[str, Any] = {
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "no_rope_freq": None, "rotary_interleaved": False,
    "softmax_scale": None, "softmax_type": "vanilla", "window_size": None,
}  # fmt: skip


def changing(model: ModelConfig) -> dict[str, Any]:
    """The options of ``model.megatron``, with their values, that are not known to keep what the model computes."""
    return {key: value for key, value in model.megatron.items() if not _keeps(key, value, model.activation)}


def _keeps(key: str, value: Any, activation: str) -> bool:
    if key == "bias_activation_fusion":
        return not value or activation == "gelu_tanh"  # Megatron's fused kernel computes no other
    return key in HARMLESS or (key in WITHOUT_EFFECT and value == WITHOUT_EFFECT[key])
