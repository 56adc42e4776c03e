"""What a level needs of a rank's memory while it is trained, by formula. Imports no torch.

Weights, fp32 masters and Adam's moments after ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3); gradients and
buffers as DeepSpeed 0.19.8 really holds them per stage, precision and ``data_types.grad_accum_dtype``; activations from
:mod:`ds_vcycle.cycle.activations`. Not everything is at its most at once, so the peak is the largest of six moments of
a step. What is outside of it: the process's own share of the device (context, NCCL), and gaps of the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.activations import ELEMENT_BYTES, Activations, Device, activations
from ds_vcycle.levels import Level, ModelShape
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.placement import layout_of, placements, separate_bf16_optimizer

MASTER_BYTES = 4
MOMENT_BYTES = 8  # two of fp32
_NORM_BYTES = 8  # DeepSpeed squares a gradient in fp64
_STAGE_0_BUCKET = 500_000_000  # elements, fixed in DeepSpeed's engine
_ZERO_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}

Moment = Literal["gather", "forward", "backward", "layer", "gradients", "update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on the rank that holds most.

    ``weights``: computed with; under ZeRO 3 with what is gathered for a while. ``masters``: 0 where the weights are
    fp32 and whole, as they are then the masters themselves. ``gradients``: at their most, with DeepSpeed's buckets and
    the fp32 copies for the update. ``activations``, ``logits``: kept from forward to backward. ``states``: what stays
    between steps. ``peak``: at most at once, at ``peak_at``.
    """

    weights: int
    masters: int
    moments: int
    gradients: int
    activations: int
    logits: int
    states: int
    peak: int
    peak_at: Moment

    @property
    def checkpointed(self) -> int:
        """What a rank writes to a checkpoint at most: masters and moments."""
        return (self.masters or self.weights) + self.moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Bytes of gradients and of the buffers for them, at the moments of a step.

    ``persistent``: allocated once. ``between``: kept from one micro-batch to the next. ``bucket``: from the start of a
    backward pass. ``reducing``: from its first full bucket. ``reduced``: at the end of the last pass. ``update``: while
    Adam steps.
    """

    persistent: int
    between: int
    bucket: int
    reducing: int
    reduced: int
    update: int

    @property
    def most(self) -> int:
        """At most at once."""
        return self.persistent + max(self.between + self.bucket + self.reducing, self.reduced, self.update)


def rank_memory(
    level: Level, config: RunConfig, *, data_parallel: int, micro_batches: int, device: Device = "cuda"
) -> RankMemory:
    """The memory of a rank that trains ``level`` with ``micro_batches`` a step, over ``data_parallel`` ranks."""
    kept = activations(
        level,
        config.model,
        micro_batch=level.micro_batch,
        mask_probability=config.data.mask_probability,
        device=device,
    )
    local = local_elements(level)
    gathered, prefetched = _gathered(level, config, data_parallel)
    weights = _weights(level, config, data_parallel)
    gradients = gradient_memory(level, config, data_parallel=data_parallel, micro_batches=micro_batches)
    shared = data_parallel if level.zero_stage else 1
    masters = 0 if level.zero_stage == 0 and level.precision == "fp32" else MASTER_BYTES * -(-local // shared)
    moments = MOMENT_BYTES * -(-local // shared)
    states = weights + masters + moments + gradients.persistent
    peak_at, peak = _peak(gradients, kept, gathered=gathered, prefetched=prefetched)
    return RankMemory(
        weights=weights + gathered,
        masters=masters,
        moments=moments,
        gradients=gradients.most,
        activations=kept.blocks,
        logits=kept.logits,
        states=states,
        peak=states + peak,
        peak_at=peak_at,
    )


def local_elements(level: Level) -> int:
    """Elements of all parameters on one tensor-parallel rank, before ZeRO splits them."""
    return sum(_local_sizes(level))


def gradient_memory(level: Level, config: RunConfig, *, data_parallel: int, micro_batches: int) -> Gradients:
    """Where gradients are at the moments of a step, by ZeRO stage."""
    if level.zero_stage == 0:
        return _stage_0(level, micro_batches)
    if separate_bf16_optimizer(level, config):
        return _separate(level, micro_batches)
    if level.zero_stage == 3:
        return _stage_3(level, config, data_parallel)
    return _stages_1_and_2(level, config, data_parallel, micro_batches)


def _peak(gradients: Gradients, kept: Activations, *, gathered: int, prefetched: int) -> tuple[Moment, int]:
    """The largest moment, and its bytes above what stays between steps."""
    full, before_backward = kept.blocks + kept.logits, gradients.between + gathered
    moments: dict[Moment, int] = {
        "gather": before_backward + prefetched + kept.layer,
        "forward": before_backward + full + kept.head_forward,
        "backward": before_backward + gradients.bucket + full + kept.head_backward,
        "layer": before_backward + gradients.bucket + gradients.reducing + kept.blocks + kept.working,
        "gradients": gathered + gradients.reduced,
        "update": gradients.update,
    }
    name = max(moments, key=lambda moment: moments[moment])
    return name, moments[name]


def _stage_0(level: Level, micro_batches: int) -> Gradients:
    """Gradients lie at the weights; they are summed over ranks in a flat copy, and Adam takes fp32 copies of bf16."""
    local, element = local_elements(level), ELEMENT_BYTES[level.precision]
    held = element * local
    return Gradients(
        persistent=0,
        between=held if micro_batches > 1 else 0,
        bucket=0,
        reducing=0,
        reduced=held + element * min(local, _STAGE_0_BUCKET),
        update=held + (MASTER_BYTES * local if level.precision == "bf16" else 0),
    )


def _stages_1_and_2(level: Level, config: RunConfig, data_parallel: int, micro_batches: int) -> Gradients:
    """Stage 1 keeps all gradients until the last micro-batch, stage 2 its own part of each, summed up.

    The update holds the rank's part, a flat copy and, where that is not fp32, another in fp32; with fp32 sums of bf16
    gradients stage 2 keeps the flat one from the start.
    """
    local, element = local_elements(level), ELEMENT_BYTES[level.precision]
    in_fp32 = _sums_in_fp32(level, config)
    part, elements = -(-local // data_parallel), _setting(config, "reduce_bucket_size")
    own = MASTER_BYTES * part if in_fp32 else element * _touched(level, config, data_parallel)
    bucket = (2 if _zero(config).get("overlap_comm") else 1) * element * elements
    norm = own + _NORM_BYTES * min(max(_local_sizes(level)), part)
    copies = 0 if in_fp32 else (element + (MASTER_BYTES if element < MASTER_BYTES else 0)) * part
    several = micro_batches > 1
    if level.zero_stage == 1:
        held = element * local
        return Gradients(
            persistent=0,
            between=held + bucket if several else 0,  # the bucket stays, once it is there
            bucket=0 if several else bucket,
            reducing=0,
            reduced=held + bucket + own,
            update=max(norm, own + copies),
        )
    summed = own if several else 0
    fresh = 0 if in_fp32 and several else own
    in_transit = (element + (MASTER_BYTES if in_fp32 else 0)) * min(local, elements)
    return Gradients(
        persistent=0,
        between=summed,
        bucket=bucket,
        reducing=fresh if local > elements else 0,
        reduced=summed + fresh + bucket + in_transit,
        update=max(norm, own + copies),
    )


def _separate(level: Level, micro_batches: int) -> Gradients:
    """DeepSpeed's BF16_Optimizer holds an fp32 gradient of every weight, and bf16 ones besides.

    For the sum over ranks it makes a flat copy (matrices and vectors apart if they are more than a bucket), and one of
    it in bf16.
    """
    local = local_elements(level)
    low, high = ELEMENT_BYTES["bf16"] * local, MASTER_BYTES * local
    copy = high if local <= _STAGE_0_BUCKET else 0
    return Gradients(
        persistent=high,
        between=low if micro_batches > 1 else 0,
        bucket=0,
        reducing=0,
        reduced=low + copy + low,
        update=low,
    )


def _stage_3(level: Level, config: RunConfig, data_parallel: int) -> Gradients:
    """The rank's part and one bucket are there for good; a bucket is rearranged before it is summed over ranks."""
    local, element = local_elements(level), ELEMENT_BYTES[level.precision]
    accumulated = MASTER_BYTES if _sums_in_fp32(level, config) else element
    part, bucket = -(-local // data_parallel), _setting(config, "reduce_bucket_size")
    copied = MASTER_BYTES + (element if accumulated < MASTER_BYTES else 0)
    return Gradients(
        persistent=accumulated * part + element * bucket,
        between=0,
        bucket=0,
        reducing=element * bucket if local > bucket else 0,
        reduced=element * min(local, bucket),
        update=copied * min(part, _setting(config, "sub_group_size")),
    )


def _weights(level: Level, config: RunConfig, data_parallel: int) -> int:
    """Whole, or under ZeRO 3 the rank's part and whole copies of what is too small to be worth gathering."""
    sizes, element = _local_sizes(level), ELEMENT_BYTES[level.precision]
    if level.zero_stage < 3:
        return element * sum(sizes)
    small = sum(_persistent(level, config)) if data_parallel > 1 else 0
    return element * (sum(-(-size // data_parallel) for size in sizes) + small)


def _gathered(level: Level, config: RunConfig, data_parallel: int) -> tuple[int, int]:
    """Bytes of weights that ZeRO 3 holds whole for a while, and of those on the way."""
    if level.zero_stage < 3 or data_parallel == 1:
        return 0, 0
    element = ELEMENT_BYTES[level.precision]
    others = sum(_local_sizes(level)) - sum(_persistent(level, config))
    live, ahead = _setting(config, "max_live_parameters"), _setting(config, "prefetch_bucket_size")
    return element * min(others, live), element * min(others, ahead)


def _persistent(level: Level, config: RunConfig) -> list[int]:
    threshold = _setting(config, "param_persistence_threshold")
    return [size for size in _local_sizes(level) if size < threshold]


def _touched(level: Level, config: RunConfig, data_parallel: int) -> int:
    """Elements of all parameters that a rank's flat part reaches into: their gradients are kept whole."""
    layout = layout_of(level, config, data_parallel * level.tensor_parallel)
    sizes = dict(zip((p.name for p in parameters(level.shape)), _local_sizes(level), strict=True))
    held = placements(parameters(level.shape), layout)[:: level.tensor_parallel]
    return max(sum(sizes[placement.name] for placement in rank) for rank in held)


def _local_sizes(level: Level) -> tuple[int, ...]:
    return _sizes(level.shape, level.tensor_parallel)


@lru_cache(maxsize=64)
def _sizes(shape: ModelShape, tp: int) -> tuple[int, ...]:
    return tuple(math.prod(parameter.local_shape(tp)) for parameter in parameters(shape))


def _sums_in_fp32(level: Level, config: RunConfig) -> bool:
    """Whether bf16 gradients are summed up in fp32."""
    accumulation = (config.deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    return level.precision == "bf16" and accumulation == "fp32"


def _setting(config: RunConfig, key: str) -> int:
    """A size of ``deepspeed.zero_optimization`` in elements, under either of its names."""
    zero = _zero(config)
    return int(zero.get(key, zero.get(f"stage3_{key}", _ZERO_DEFAULTS[key])))


def _zero(config: RunConfig) -> Mapping[str, Any]:
    return config.deepspeed.get("zero_optimization") or {}
