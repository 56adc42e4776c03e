"""The levels of a run with every size resolved: level 1 is the model, each further one halves it by default."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ds_vcycle.config import ConfigError, GroupingsConfig, LevelConfig, ModelConfig, Precision, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Everything that fixes the shapes and the mathematics of one level's parameters (all counts, no units)."""

    architecture: Literal["gpt", "bert"]
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    sequence_length: int
    vocab_size: int
    padded_vocab: int
    tied_embeddings: bool
    position: Literal["learned", "rope"]
    normalization: Literal["layernorm", "rmsnorm"]
    norm_placement: Literal["pre", "post"]
    activation: Literal["gelu", "gelu_tanh", "swiglu"]
    bias: bool
    qk_norm: bool
    sentence_order: bool

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key and one value head."""
        return self.heads // self.kv_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One level: its shape, its layout, its batch. ``index`` counts from 1 (the target model)."""

    index: int
    shape: ModelShape
    tensor_parallel: int
    zero_stage: int
    micro_batch: int
    precision: Precision
    lr: float | None
    steps: int | None
    groupings: GroupingsConfig


def resolve_levels(config: RunConfig) -> tuple[Level, ...]:
    """Resolve every level of the run.

    Raises:
        ConfigError: a size cannot be halved, does not divide over its tensor-parallel ranks, or an override is left
            over.
    """
    count = config.cycle.visited
    if config.cycle.kind != "flat" and len(config.levels) > count:
        raise ConfigError(f"levels has {len(config.levels)} entries but the cycle visits {count}; remove the rest")
    overrides = [*config.levels, *[LevelConfig()] * count][:count]
    levels: list[Level] = []
    for index, override in enumerate(overrides, 1):
        shape = _shape(config.model, override, levels[-1].shape if levels else None, index)
        levels.append(
            Level(
                index=index,
                shape=shape,
                tensor_parallel=override.tensor_parallel or config.model.tensor_parallel,
                zero_stage=config.training.zero_stage if override.zero_stage is None else override.zero_stage,
                micro_batch=override.micro_batch or config.training.micro_batch,
                precision=override.precision or config.training.precision,
                lr=override.lr,
                steps=override.steps,
                groupings=override.groupings or config.operators.groupings,
            )
        )
    unit = 128 * math.lcm(*(level.tensor_parallel for level in levels))
    padded = -(-config.model.vocab_size // unit) * unit
    levels = [replace(level, shape=replace(level.shape, padded_vocab=padded)) for level in levels]
    for level in levels:
        _check_tensor_parallel(level, config.model)
    return tuple(levels)


def data_parallel(level: Level, *, world_size: int, global_batch: int) -> tuple[int, int]:
    """(data-parallel size, micro-batches per step) of a level on ``world_size`` ranks.

    Raises:
        ConfigError: the ranks or the batch do not divide.
    """
    tp = level.tensor_parallel
    if world_size % tp:
        raise ConfigError(
            f"level {level.index}: tensor_parallel={tp} does not divide the {world_size} ranks of this launch; "
            f"start a multiple of {tp} ranks (deepspeed --num_gpus N) or change model.tensor_parallel or "
            f"levels.{level.index - 1}.tensor_parallel"
        )
    dp = world_size // tp
    if global_batch % (dp * level.micro_batch):
        raise ConfigError(
            f"level {level.index}: training.global_batch={global_batch} is not a multiple of micro_batch="
            f"{level.micro_batch} x {dp} data-parallel ranks; change one of them"
        )
    return dp, global_batch // (dp * level.micro_batch)


def lowered_micro_batch(micro_batch: int, share: int) -> int:
    """The micro-batch, or the largest below it that divides ``share``, a data-parallel rank's samples of a step."""
    return max(size for size in range(1, min(micro_batch, share) + 1) if share % size == 0)


def _shape(model: ModelConfig, override: LevelConfig, finer: ModelShape | None, index: int) -> ModelShape:
    kv_groups = model.kv_groups or model.heads
    if finer is None:
        if override.hidden or override.layers or override.heads or override.kv_groups or override.ffn:
            raise ConfigError("levels.0 is the model itself; give its sizes under model, not under levels.0")
        if override.groupings:
            raise ConfigError(
                "levels.0.groupings: a level's groupings map the level above to it, and there is none above level 1; "
                "set levels.1.groupings or operators.groupings"
            )
        sizes = {"layers": model.layers, "hidden": model.hidden, "ffn": model.ffn or 4 * model.hidden}
        per_group = model.heads // kv_groups
        head_dim = model.head_dim or model.hidden // model.heads
    else:
        sizes = {
            key: getattr(override, key) or _half(getattr(finer, key), key, index) for key in ("layers", "hidden", "ffn")
        }
        per_group, head_dim = finer.heads_per_group, finer.head_dim
        if override.kv_groups:
            kv_groups = override.kv_groups
        elif override.heads:
            kv_groups = max(1, override.heads // per_group)
        else:
            kv_groups = _half(finer.kv_groups, "heads" if per_group == 1 else "kv_groups", index)
        if override.heads and override.heads != kv_groups * per_group:
            raise ConfigError(
                f"level {index}: heads={override.heads} with kv_groups={kv_groups} changes the {per_group} query heads "
                f"per group, which all levels share; set heads={kv_groups * per_group}"
            )
        for key, value in (*sizes.items(), ("kv_groups", kv_groups)):
            if value > getattr(finer, key):
                raise ConfigError(
                    f"level {index}: {key}={value} exceeds level {index - 1}'s {getattr(finer, key)}; lower it"
                )
    return ModelShape(
        architecture=model.architecture, **sizes, heads=kv_groups * per_group, kv_groups=kv_groups, head_dim=head_dim,
        sequence_length=model.sequence_length, vocab_size=model.vocab_size, padded_vocab=0,
        tied_embeddings=model.tied_embeddings, position=model.position, normalization=model.normalization,
        norm_placement=model.norm_placement, activation=model.activation, bias=model.bias, qk_norm=model.qk_norm,
        sentence_order=model.sentence_order,
    )  # fmt: skip


def _half(value: int, key: str, index: int) -> int:
    if value % 2:
        raise ConfigError(
            f"level {index}: {key} of level {index - 1} is {value}, which cannot be halved; set "
            f"levels.{index - 1}.{key}"
        )
    return value // 2


def _check_tensor_parallel(level: Level, model: ModelConfig) -> None:
    tp = level.tensor_parallel
    if model.sequence_parallel and model.sequence_length % tp:
        raise ConfigError(
            f"level {level.index}: model.sequence_length={model.sequence_length} is not divisible by tensor_parallel="
            f"{tp}, as model.sequence_parallel=true needs; change one of them"
        )
    for name, value in undivided(level.shape, tp):
        raise ConfigError(
            f"level {level.index}: {name}={value} is not divisible by tensor_parallel={tp}; change {name} or "
            "tensor_parallel"
        )


def undivided(shape: ModelShape, tp: int) -> Iterator[tuple[str, int]]:
    """The sizes, by the key that sets them, that do not divide over ``tp`` tensor-parallel ranks."""
    for key in ("kv_groups", "ffn"):
        value = getattr(shape, key)
        if value % tp:
            yield "heads" if key == "kv_groups" and shape.heads_per_group == 1 else key, value
