"""The DeepSpeed engine of a level: the only ``deepspeed.initialize`` of the program, and its monitor."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from pydantic import ValidationError
from torch import Tensor, nn

from ds_vcycle.config import ConfigError, RunConfig
from ds_vcycle.levels import Level
from ds_vcycle.parallel import Mesh
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.placement import layout_of, optimizer_groups
from ds_vcycle.sharding.self_test import self_test
from ds_vcycle.sharding.zero import reset_moments
from ds_vcycle.train.deepspeed_config import MONITORS, deepspeed_config

Monitor = MonitorMaster


def build_engine(model: nn.Module, level: Level, config: RunConfig, mesh: Mesh) -> DeepSpeedEngine:
    """Wrap a level's model for training and prove the adapter on it. Collective over all ranks.

    The learning rate is 0 until :func:`set_lr` sets it, before each step. ``engine.backward`` divides the loss by the
    accumulation steps and gradients are averaged over the data-parallel group.

    Raises:
        ConfigError: see :func:`ds_vcycle.train.deepspeed_config.deepspeed_config`, or DeepSpeed refuses a value.
        AdapterError: DeepSpeed keeps the weights otherwise than ``sharding.zero`` knows.
    """
    settings = deepspeed_config(level, config, mesh.world_size)
    _quiet(config)
    table = parameters(level.shape, config.operators.embedding)
    optimizer = _adamw(model, level, config)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, mpu=mesh.mpu, dist_init_required=False
        )
    except ValidationError as error:
        raise _refused(error) from error
    reset_moments(engine)  # at stage 0 in bf16 DeepSpeed has made an empty step already
    if level.zero_stage == 0:
        _clip_before_step(engine, config.optimizer.grad_clip, mesh)
    self_test(engine, table, layout_of(level, config, mesh.world_size))
    return engine


def check_settings(level: Level, config: RunConfig, mesh: Mesh) -> None:
    """Let DeepSpeed read its settings before anything is built or written.

    Raises:
        ConfigError: see :func:`ds_vcycle.train.deepspeed_config.deepspeed_config`, or DeepSpeed refuses a value.
    """
    _quiet(config)
    monitors = {key: config.deepspeed[key] for key in MONITORS if key in config.deepspeed}
    try:
        DeepSpeedConfig({**deepspeed_config(level, config, mesh.world_size), **monitors}, mpu=mesh.mpu)
    except ValidationError as error:
        raise _refused(error) from error
    except (AttributeError, TypeError, ValueError) as error:  # sections it reads without a schema
        given = ", ".join(config.deepspeed)
        raise ConfigError(f"deepspeed ({given}): DeepSpeed cannot read it ({error}); correct the values") from error


def set_lr(engine: DeepSpeedEngine, lr: float) -> None:
    """Set the learning rate of all parameter groups for the next step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(engine: DeepSpeedEngine) -> Tensor:
    """Global norm of the last step's gradients before clipping: a fp32 scalar, the same on every rank.

    Inf where ZeRO found a gradient that is not finite (it then leaves the step out). Not read back from the device.
    """
    return torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32)


def build_monitor(config: RunConfig, run_dir: Path) -> MonitorMaster:
    """DeepSpeed's monitor of a run: TensorBoard in ``run_dir/tensorboard`` and what ``deepspeed:`` asks for besides.

    One per run, whatever the number of engines. ``write_events([(name, value, step), ...])`` writes on rank 0 only.
    """
    settings: dict[str, Any] = {key: config.deepspeed[key] for key in MONITORS if key in config.deepspeed}
    if config.logging.tensorboard:
        settings["tensorboard"] = {"enabled": True, "output_path": str(run_dir), "job_name": "tensorboard"}
    try:
        return MonitorMaster(get_monitor_config(settings))
    except ValidationError as error:
        raise _refused(error) from error


def _refused(error: ValidationError) -> ConfigError:
    problems = "; ".join(f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors())
    return ConfigError(f"deepspeed: {problems}; correct it under deepspeed: in the configuration")


def _adamw(model: nn.Module, level: Level, config: RunConfig) -> torch.optim.AdamW:
    """Torch's fused AdamW (on CPU too 3 times faster than foreach); matrices with weight decay, vectors without."""
    held = dict(model.named_parameters())
    table = parameters(level.shape, config.operators.embedding)
    assert list(held) == [p.name for p in table], "the model's parameters are not the schema's, in its order"
    settings = config.optimizer
    groups = [
        {
            "params": [held[p.name] for p in group],
            "weight_decay": settings.weight_decay if len(group[0].dims) > 1 else 0.0,
        }
        for group in optimizer_groups(table)
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def _clip_before_step(engine: DeepSpeedEngine, max_norm: float, mesh: Mesh) -> None:
    """Norm and clipping at stage 0, on the fp32 gradients right before Adam uses them.

    A parameter that is the same on all tensor-parallel ranks counts once.
    """
    wrapped = engine.optimizer
    masters = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    groups = wrapped.fp16_groups if isinstance(wrapped, FP16_UnfusedOptimizer) else [masters]
    weights = [weight for group in groups for weight in group]
    counted = [
        master
        for weight, master in zip(weights, masters, strict=True)
        if mesh.tp_rank == 0 or getattr(weight, "tensor_model_parallel", False)
    ]

    @torch.no_grad()
    def clip(*_: object) -> None:
        norms = torch._foreach_norm([p.grad for p in counted if p.grad is not None])
        squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=mesh.device)
        dist.all_reduce(squares, group=mesh.tp_group)
        wrapped._global_grad_norm = squares.sqrt()
        if max_norm:
            scale = (max_norm / (wrapped._global_grad_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([p.grad for p in masters if p.grad is not None], scale)

    engine.basic_optimizer.register_step_pre_hook(clip)


def _quiet(config: RunConfig) -> None:
    """Warnings only from DeepSpeed, unless ``deepspeed.log_level`` asks for more."""
    level = str(config.deepspeed.get("log_level", "warning")).upper()
    deepspeed.utils.logger.setLevel(getattr(logging, level, logging.WARNING))
    # DeepSpeed calls collectives under names that newer torch releases warn about, at every single call
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
