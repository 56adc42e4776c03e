"""Which flat range of which parameter each rank holds: a rule of (parameters, layout), asked of nobody. No torch.

A rank first holds a tensor-parallel slice of a parameter (``schema.Parameter.local_shape``), then, of that slice laid
out row by row, the flat range whose fp32 master ZeRO gives it. The rule below is DeepSpeed 0.19.8's own; the adapter's
start-up self-test (``sharding.self_test``) holds it against the engine that was really built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ds_vcycle.config import RunConfig
from ds_vcycle.levels import Level
from ds_vcycle.schema import Parameter

_BYTES = {"fp32": 4, "bf16": 2}
_GATHER_ALIGNMENT = 2  # DeepSpeed pads a flat group to a multiple of 2 x dp elements, for its all-gather
_PARAMETER_ALIGNMENT_BYTES = 16  # and, when asked to, each parameter's start to 16 bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Elements [start, start + length) of a parameter's local tensor-parallel slice, flattened row by row."""

    name: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Everything that decides where elements lie. ``rank = dp_rank * tp + tp_rank``.

    ``round_robin``: ZeRO 1 and 2 deal a group's parameters out to the ranks in turn before flattening.
    ``alignment``: ZeRO 1 and 2 start each parameter at a multiple of so many elements (1: no gaps).
    """

    world_size: int
    tp: int = 1
    zero_stage: int = 0
    round_robin: bool = False
    alignment: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.tp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(data-parallel rank, tensor-parallel rank) of a global rank."""
        return divmod(rank, self.tp)


def layout_of(level: Level, config: RunConfig, world_size: int) -> Layout:
    """The layout of a level on ``world_size`` ranks, DeepSpeed's own settings that move elements included.

    With bf16 weights and fp32 gradient accumulation ZeRO 1 runs in another optimizer class, which knows neither
    ``round_robin_gradients`` nor ``parameter_alignment``.
    """
    zero = config.deepspeed.get("zero_optimization") or {}
    flat_groups = level.zero_stage in (1, 2) and not separate_bf16_optimizer(level, config)
    element = _BYTES[level.precision]
    aligned = flat_groups and bool(zero.get("parameter_alignment", False))
    return Layout(
        world_size=world_size,
        tp=level.tensor_parallel,
        zero_stage=level.zero_stage,
        round_robin=flat_groups and bool(zero.get("round_robin_gradients", False)),
        alignment=_PARAMETER_ALIGNMENT_BYTES // element if aligned else 1,
    )


def separate_bf16_optimizer(level: Level, config: RunConfig) -> bool:
    """Whether DeepSpeed picks its BF16_Optimizer: ZeRO 1, bf16, and ``data_types.grad_accum_dtype: fp32``."""
    accumulation = (config.deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    return level.zero_stage == 1 and level.precision == "bf16" and accumulation == "fp32"


def weight_decays(parameter: Parameter) -> bool:
    """Whether a parameter belongs to the optimizer group with weight decay: matrices do, vectors do not."""
    return len(parameter.dims) >= 2


def optimizer_groups(parameters: Sequence[Parameter]) -> tuple[tuple[Parameter, ...], ...]:
    """The optimizer's parameter groups, each in schema order: with weight decay, then without; none of them empty."""
    decayed = tuple(p for p in parameters if weight_decays(p))
    plain = tuple(p for p in parameters if not weight_decays(p))
    return tuple(group for group in (decayed, plain) if group)


def placements(parameters: Sequence[Parameter], layout: Layout) -> tuple[tuple[Placement, ...], ...]:
    """What every rank holds, indexed by rank, each in schema order; what a rank holds nothing of is absent.

    Ranks that differ in their tensor-parallel rank only share one tuple: their local shapes are the same. Cached.
    """
    by_dp_rank = _by_dp_rank(tuple(parameters), layout)
    return tuple(by_dp_rank[layout.coordinates(rank)[0]] for rank in range(layout.world_size))


def rank_placements(parameters: Sequence[Parameter], layout: Layout, rank: int) -> tuple[Placement, ...]:
    """What one rank holds (see :func:`placements`)."""
    return _by_dp_rank(tuple(parameters), layout)[layout.coordinates(rank)[0]]


@lru_cache(maxsize=32)
def _by_dp_rank(parameters: tuple[Parameter, ...], layout: Layout) -> tuple[tuple[Placement, ...], ...]:
    if layout.zero_stage == 0:
        whole = tuple(Placement(name=p.name, start=0, length=_local_numel(p, layout)) for p in parameters)
        return (whole,) * layout.dp
    if layout.zero_stage == 3:
        return _each_split(parameters, layout)
    return _flat_groups(parameters, layout)


def _each_split(parameters: Sequence[Parameter], layout: Layout) -> tuple[tuple[Placement, ...], ...]:
    """ZeRO 3: every parameter is cut into dp equal runs, the last ones short or empty."""
    held: list[list[Placement]] = [[] for _ in range(layout.dp)]
    for parameter in parameters:
        numel = _local_numel(parameter, layout)
        run = -(-numel // layout.dp)
        for dp_rank, start in enumerate(range(0, numel, run)):
            held[dp_rank].append(Placement(name=parameter.name, start=start, length=min(run, numel - start)))
    return tuple(tuple(rank) for rank in held)


def _flat_groups(parameters: Sequence[Parameter], layout: Layout) -> tuple[tuple[Placement, ...], ...]:
    """ZeRO 1 and 2: each optimizer group is laid end to end and cut into dp equal runs."""
    held: list[list[Placement]] = [[] for _ in range(layout.dp)]
    for group in optimizer_groups(parameters):
        offsets, end = _offsets(_flat_order(group, layout), layout)
        unit = _GATHER_ALIGNMENT * layout.dp
        run = math.ceil(end / unit) * unit // layout.dp
        for parameter, offset in offsets:
            stop = offset + _local_numel(parameter, layout)
            for dp_rank in range(offset // run, (stop - 1) // run + 1):
                first, last = max(offset, dp_rank * run), min(stop, (dp_rank + 1) * run)
                held[dp_rank].append(Placement(name=parameter.name, start=first - offset, length=last - first))
    order = {parameter.name: index for index, parameter in enumerate(parameters)}
    return tuple(tuple(sorted(rank, key=lambda held: order[held.name])) for rank in held)


def _flat_order(group: Sequence[Parameter], layout: Layout) -> list[Parameter]:
    """Round robin: parameters 0, dp, 2 dp, ... first, then 1, dp + 1, ...: the card game seen from the players."""
    if not layout.round_robin:
        return list(group)
    return [parameter for hand in range(layout.dp) for parameter in group[hand :: layout.dp]]


def _offsets(group: Sequence[Parameter], layout: Layout) -> tuple[list[tuple[Parameter, int]], int]:
    """Where each parameter starts in the flat group, and where the last one ends (it is followed by no gap)."""
    offsets: list[tuple[Parameter, int]] = []
    end = 0
    for parameter in group:
        start = -(-end // layout.alignment) * layout.alignment
        offsets.append((parameter, start))
        end = start + _local_numel(parameter, layout)
    return offsets, end


def _local_numel(parameter: Parameter, layout: Layout) -> int:
    return math.prod(parameter.local_shape(layout.tp))
