"""What leaves a node, by formula: in a training step, and when the level changes. Imports no torch.

Ranks count through the tensor-parallel group first, so a group of at most a node's GPUs that divides them stays within
the node, and each node holds a part of every data-parallel ring. A ring leaves a node once, whatever its other ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.activations import ELEMENT_BYTES
from ds_vcycle.cycle.memory import local_elements
from ds_vcycle.levels import Level
from ds_vcycle.operators.axes import plan_axes
from ds_vcycle.operators.maps import AxisMap
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.placement import optimizer_groups

_DOWN_BYTES = 8  # float64 partial sums; see sharding.traffic
_UP_BYTES = 4  # float32 coarse values
_MAPPED = 3  # weights and both of Adam's moments
_SUMS = 4  # a layer's all-reduces over tensor-parallel ranks: attention and MLP, forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """``count`` nodes of ``gpus`` GPUs each."""

    count: int
    gpus: int

    @property
    def ranks(self) -> int:
        """One rank a GPU."""
        return self.count * self.gpus

    def hold(self, tensor_parallel: int) -> bool:
        """Whether every tensor-parallel group lies within a node."""
        return self.count == 1 or self.gpus % tensor_parallel == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionBytes:
    """Bytes that leave all nodes together when a level changes, at most: ``coalesce`` down, ``refine`` up."""

    coalesce: int
    refine: int


def step_bytes(level: Level, config: RunConfig, nodes: Nodes, *, micro_batches: int) -> int:
    """Bytes that a step sends out of each node, by the volumes of the ZeRO paper (arXiv 1910.02054, section 7).

    As DeepSpeed does it: stages 0 to 2 sum gradients by all-reduce (2 volumes), once a step or, stage 2, once a
    micro-batch; stages 1 and 2 gather the weights once a step; stage 3 gathers twice and scatters once a micro-batch.
    """
    if nodes.count == 1:
        return 0
    data_parallel = nodes.ranks // level.tensor_parallel
    rounds = {0: 2, 1: 3, 2: 2 * micro_batches + 1, 3: 3 * micro_batches}[level.zero_stage]
    volume = local_elements(level) * ELEMENT_BYTES[level.precision] * (data_parallel - 1) // data_parallel
    rings = min(level.tensor_parallel, nodes.gpus)
    across = 0 if nodes.hold(level.tensor_parallel) else sums_bytes(level, config, micro_batches=micro_batches)
    return rounds * volume * rings + across


def transition_bytes(fine: Level, coarse: Level, config: RunConfig, nodes: Nodes, *, cx_again: bool) -> TransitionBytes:
    """What a change of level sends between nodes, at most: each coarse element once for every rank with a part of it.

    Adjacent groups lie together on a rank but for a row where a rank's part ends; layers of a group may lie apart.

    Args:
        fine: the larger level.
        coarse: the smaller one.
        config: whose policies hold.
        nodes: the cluster.
        cx_again: whether a refine coalesces the parked weights again (its alpha and beta do not add up to 1).
    """
    if nodes.count == 1:
        return TransitionBytes(coalesce=0, refine=0)
    down, up = _touched(fine, coarse, config, nodes, "down"), _touched(fine, coarse, config, nodes, "up")
    quantities = _MAPPED if config.operators.moments == "map" else 1
    looks = quantities + (1 if config.evaluation.transitions else 0)
    return TransitionBytes(
        coalesce=_DOWN_BYTES * quantities * down, refine=_UP_BYTES * looks * up + _DOWN_BYTES * down * cx_again
    )


def sums_bytes(level: Level, config: RunConfig, *, micro_batches: int) -> int:
    """Bytes that a step sends out of each GPU to sum activations over tensor-parallel ranks, as a ring would.

    Per layer two all-reduces forward, two backward, and the forward ones again under full recompute; besides one of the
    embedding and one of the gradient that the head returns (Megatron-LM, arXiv 1909.08053, section 3).
    """
    shape, tp = level.shape, level.tensor_parallel
    stream = level.micro_batch * shape.sequence_length * shape.hidden * ELEMENT_BYTES[level.precision]
    a_layer = _SUMS + (_SUMS // 2 if config.model.recompute == "full" else 0)
    return micro_batches * (shape.layers * a_layer + 2) * 2 * stream * (tp - 1) // tp


def _touched(fine: Level, coarse: Level, config: RunConfig, nodes: Nodes, way: Literal["down", "up"]) -> int:
    """Coarse elements, times the ranks that hold a part of what maps onto each, times the replicas they go to.

    Where the senders' level is not split by ZeRO, every replica of it serves itself, within its tensor-parallel group.
    """
    senders, receivers = (fine, coarse) if way == "down" else (coarse, fine)
    if senders.zero_stage == 0 and nodes.hold(senders.tensor_parallel):
        return 0
    axes = plan_axes(fine, coarse, config.operators).axes
    replicas = nodes.ranks // receivers.tensor_parallel if receivers.zero_stage == 0 else 1
    spans = {(name, tp): _span(axis, tp) for name, axis in axes.items() for tp in (1, fine.tensor_parallel)}
    cuts = _cuts(fine, nodes)
    alike = Counter(parameter.template for parameter in parameters(coarse.shape))
    total = 0
    for parameter in {parameter.template: parameter for parameter in parameters(coarse.shape)}.values():
        copies = replicas * (1 if parameter.tp_dim is not None else receivers.tensor_parallel)
        members = spans["layer", 1].most if parameter.layer is not None else 1
        held = _held(parameter, fine.tensor_parallel, spans, cuts[parameter.template])
        total += alike[parameter.template] * copies * members * held
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """The members of an axis's largest group, and whether those of every group are neighbours in one chunk of it."""

    most: int
    together: bool


_ALONE = _Span(most=1, together=True)


def _span(axis: AxisMap, chunks: int) -> _Span:
    size, groups = axis.fine // chunks, axis.groups
    together = all(
        last - first + 1 == count and first // size == last // size
        for first, last, count in ((group[0], group[-1], len(group)) for group in groups)
    )
    return _Span(most=max(map(len, groups)), together=together)


def _held(parameter: Parameter, tp: int, spans: Mapping[tuple[str, int], _Span], cuts: int) -> int:
    """Elements of a coarse parameter, times the ranks with a part of one fine parameter that maps onto each, at most.

    Neighbouring rows lie together, but where a rank's part ends within them; that tears at most one row for each row
    of a group's member (a head has many). Columns of a row lie together, but for tensor parallelism.
    """
    elements = math.prod(dim.real for dim in parameter.dims)
    rows, *columns = parameter.dims
    span = spans.get((rows.axis, tp if parameter.tp_dim == 0 else 1), _ALONE)
    across = 1
    for dim in columns if parameter.tp_dim == 1 else ():
        split = spans.get((dim.axis, tp), _ALONE)
        across = 1 if split.together else min(split.most, tp)
    torn = cuts * rows.block * math.prod(dim.size for dim in columns) if span.most > 1 else 0
    return across * min(span.most * elements, (1 if span.together else span.most) * elements + torn)


def _cuts(fine: Level, nodes: Nodes) -> dict[str, int]:
    """By template, how often at most a fine parameter is cut by the ends of the ranks' flat parts."""
    tp, data_parallel = fine.tensor_parallel, nodes.ranks // fine.tensor_parallel
    table = parameters(fine.shape)
    if fine.zero_stage == 0:
        return {parameter.template: 0 for parameter in table}
    if fine.zero_stage == 3:
        return {parameter.template: tp * (data_parallel - 1) for parameter in table}
    cuts = {}
    for group in optimizer_groups(table):
        part = max(1, sum(parameter.numel for parameter in group) // tp // data_parallel)
        for parameter in group:
            cuts[parameter.template] = tp * min(data_parallel - 1, parameter.numel // part + 1)
    return cuts
