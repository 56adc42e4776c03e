"""What DeepSpeed is told: our settings, and the user's extras under ``deepspeed:`` checked key by key. No torch.

DeepSpeed ignores a top-level key it does not know, so a key passes only if it is listed here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ds_vcycle.config import ConfigError, RunConfig
from ds_vcycle.levels import Level, data_parallel

MONITORS = ("wandb", "csv_monitor", "comet")

_OURS = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.global_batch and training.micro_batch, whose ratio it is",
    "managed_gradient_accumulation": "training.global_batch and training.micro_batch",
    "gradient_clipping": "optimizer.grad_clip",
    "optimizer": "optimizer",
    "scheduler": "lr",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "fp16": "training.precision (bf16 or fp32; fp16 is refused)",
    "torch_autocast": "training.precision",
    "tensorboard": "logging.tensorboard",
    "activation_checkpointing": "model.recompute",
    "tensor_parallel": "model.tensor_parallel",
    "sequence_parallel_size": "model.sequence_parallel",
    "zero_optimization.stage": "training.zero_stage",
    "checkpoint": "saving",
    "gradient_allreduce_op": "nothing: gradients are averaged, as the learning rate assumes",
}
_PASSED = (
    "zero_optimization", "data_types", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "log_level",
    "steps_per_print", "timers", *MONITORS,
)  # fmt: skip
_OFFLOAD = (
    "weights and moments are edited in place when the level changes, and DeepSpeed swaps offloaded ones out in "
    "between; use a higher training.zero_stage or more ranks instead"
)
_ROUNDED = "it exchanges rounded weights or gradients, so levels would no longer be mapped exactly"
_REFUSED_ZERO = {
    "offload_param": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "cpu_offload_param": _OFFLOAD,
    "cpu_offload_use_pin_memory": _OFFLOAD,
    "zenflow": _OFFLOAD,
    "zero_hpz_partition_size": "it keeps a second copy of the weights that a change of level would leave stale",
    "zero_quantized_weights": _ROUNDED,
    "zero_quantized_nontrainable_weights": _ROUNDED,
    "zero_quantized_gradients": _ROUNDED,
    "compute_grad_norm": "the gradient norm is recorded at every step",
    "elastic_checkpoint": "checkpoints are written in this program's own format",
    "load_from_fp32_weights": "checkpoints are written in this program's own format",
    "legacy_stage1": "DeepSpeed has removed it",
}
_PASSED_ZERO = (
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "sub_group_size", "prefetch_bucket_size",
    "stage3_prefetch_bucket_size", "param_persistence_threshold", "stage3_param_persistence_threshold",
    "model_persistence_threshold", "stage3_model_persistence_threshold", "max_live_parameters",
    "stage3_max_live_parameters", "max_reuse_distance", "stage3_max_reuse_distance", "module_granularity_threshold",
    "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential", "stage3_allgather_sequential", "ignore_unused_parameters", "round_robin_gradients",
    "parameter_alignment", "memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
)  # fmt: skip


def deepspeed_config(level: Level, config: RunConfig, world_size: int) -> dict[str, Any]:
    """The dictionary ``deepspeed.initialize`` gets for a level on ``world_size`` ranks.

    At stage 0 DeepSpeed's own clipping stays off: there it does not report the norm (fp32) or counts only the first
    tensor-parallel rank's gradients (bf16). ``train.engine`` clips instead.

    Raises:
        ConfigError: an extra is ours, unknown or refused; ranks or batch do not divide.
    """
    check_extras(level, config)
    _, accumulation = data_parallel(level, world_size=world_size, global_batch=config.training.global_batch)
    extras = {key: value for key, value in config.deepspeed.items() if key not in MONITORS}
    return {
        **extras,
        "train_batch_size": config.training.global_batch,
        "train_micro_batch_size_per_gpu": level.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.grad_clip if level.zero_stage else 0.0,
        "bf16": {"enabled": level.precision == "bf16"},
        "zero_optimization": {**(extras.get("zero_optimization") or {}), "stage": level.zero_stage},
    }


def check_extras(level: Level, config: RunConfig) -> None:
    """Refuse what must not stand under ``deepspeed:`` (raises :class:`ConfigError` naming the key and the remedy)."""
    for key in config.deepspeed:
        if key in _OURS:
            raise ConfigError(f"deepspeed.{key} is set from {_OURS[key]}; remove it and set that")
        if key not in _PASSED:
            raise ConfigError(f"deepspeed.{key} is not passed on to DeepSpeed; {_advice(key, _PASSED)}")
    zero = _section(config.deepspeed, "zero_optimization")
    for key in zero:
        if key == "stage":
            raise ConfigError(
                f"deepspeed.zero_optimization.stage is set from {_OURS['zero_optimization.stage']}; set that"
            )
        if key in _REFUSED_ZERO:
            raise ConfigError(f"deepspeed.zero_optimization.{key} is refused: {_REFUSED_ZERO[key]}")
        if key not in _PASSED_ZERO:
            raise ConfigError(f"deepspeed.zero_optimization.{key} is not passed on; {_advice(key, _PASSED_ZERO)}")
    _check_data_types(level, config)


def _check_data_types(level: Level, config: RunConfig) -> None:
    for key, value in _section(config.deepspeed, "data_types").items():
        if key != "grad_accum_dtype":
            raise ConfigError(f"deepspeed.data_types.{key} is set from training.precision; remove it")
        if value not in ("fp32", "bf16"):
            raise ConfigError(f"deepspeed.data_types.grad_accum_dtype={value!r}: expected fp32 or bf16")
        if value != level.precision and (value == "bf16" or level.zero_stage == 0):
            raise ConfigError(
                f"deepspeed.data_types.grad_accum_dtype={value} does not go with precision={level.precision} and "
                f"zero_stage={level.zero_stage} of level {level.index}; "
                "remove it, or accumulate bf16 gradients in fp32 with zero_stage 1 to 3"
            )


def _section(extras: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = extras.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"deepspeed.{key}={value!r}: expected a section of keys")
    return value


def _advice(key: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it"
