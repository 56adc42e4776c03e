"""The operators on stored parameters: a block of coarse rows and the fine rows that belong to it at a time.

What is in memory at once is a few blocks, whatever the size of a parameter. Each element is worked out by the functions
of :mod:`ds_vcycle.operators.apply` in their order, so the bits are those of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_vcycle.checkpoint.offline.streamed import AnnouncedFragment
from ds_vcycle.checkpoint.source import WeightSource
from ds_vcycle.operators.apply import (
    Quantity,
    blend_coarse,
    blend_fine_,
    coarse_factor,
    contributes,
    down_divisors,
    finish_down,
    outer,
    parent_cols,
    prepare_down,
    sum_block,
    unread_value,
    up_divisors,
)
from ds_vcycle.operators.plan import Child, Index, ParameterMap
from ds_vcycle.schema import Parameter

BUCKET_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Blend:
    """A refine of two checkpoints: alpha P(y) + (1 - alpha) P(C x) + beta (x - P(C x))."""

    fine: WeightSource
    coarse: WeightSource
    alpha: float
    beta: float

    @property
    def keeps_fine(self) -> bool:
        """Whether the weights are the fine ones, bit for bit."""
        return self.alpha == 0.0 and self.beta == 1.0


def coarse_fragments(item: ParameterMap, keys: Sequence[Quantity], bucket: int) -> list[AnnouncedFragment]:
    """What coalescing one coarse parameter will give, in order."""
    width = _width(item.coarse)
    return [
        AnnouncedFragment(parameter=item.coarse, start=rows[0] * width, length=len(rows) * width, keys=tuple(keys))
        for rows in _blocks(item, bucket)
    ]


def coarse_tensors(source: WeightSource, item: ParameterMap, keys: Sequence[Quantity], bucket: int) -> Iterator[Tensor]:
    """The tensors of :func:`coarse_fragments`, coalesced from a stored fine level."""
    for rows in _blocks(item, bucket):
        for key in keys:
            yield _coalesced(source, item, rows, key).reshape(-1)


def fine_fragments(item: ParameterMap, keys: Sequence[Quantity], bucket: int) -> list[AnnouncedFragment]:
    """What refining the children of one coarse parameter will give, in order."""
    width = _width(item.children[0].parameter)
    return [
        AnnouncedFragment(
            parameter=child.parameter, start=first * width, length=(last - first) * width, keys=tuple(keys)
        )
        for rows in _blocks(item, bucket)
        for child in item.children
        for first, last in _runs(_fine_rows(item, rows))
    ]


def fine_tensors(blend: Blend, item: ParameterMap, keys: Sequence[Quantity], bucket: int) -> Iterator[Tensor]:
    """The tensors of :func:`fine_fragments`: weights blended, moments from the coarse level."""
    for rows in _blocks(item, bucket):
        coarse = {key: _blended_coarse(blend, item, rows, key) for key in keys}
        fine_rows = _fine_rows(item, rows)
        runs = _runs(fine_rows)
        for child in item.children:
            values = {key: _refined(blend, item, child, fine_rows, rows, coarse[key], key) for key in keys}
            position = 0
            for first, last in runs:
                for key in keys:
                    yield values[key][position : position + last - first].reshape(-1)
                position += last - first


def _coalesced(source: WeightSource, item: ParameterMap, rows: range, quantity: Quantity) -> Tensor:
    """C x on some coarse rows, float32 [rows, coarse columns]."""
    fine_rows = _fine_rows(item, rows)
    shape = len(rows), _width(item.coarse)
    total = torch.zeros(shape, dtype=torch.float64)
    positions, cols = torch.from_numpy(item.dims[0].parent[fine_rows] - rows[0]), parent_cols(item)
    for child in item.children:
        if contributes(child, quantity):
            x = _read_rows(source, child.parameter, fine_rows, quantity)
            total += sum_block(prepare_down(x, quantity), positions, cols, shape)
    divisor = outer(*down_divisors(item, quantity), rows=np.asarray(rows), cols=np.arange(shape[1]))
    return finish_down(total, divisor, quantity)


def _blended_coarse(blend: Blend, item: ParameterMap, rows: range, quantity: Quantity) -> Tensor | None:
    """z on some coarse rows, or the moments there; None where nothing is read of it."""
    if quantity == "master" and blend.keeps_fine:
        return None
    y = _read_rows(blend.coarse, item.coarse, np.asarray(rows), quantity)
    if quantity != "master":
        return y
    cx = _coalesced(blend.fine, item, rows, "master") if coarse_factor(blend.alpha, blend.beta) else None
    return blend_coarse(y, cx, alpha=blend.alpha, beta=blend.beta)


def _refined(
    blend: Blend, item: ParameterMap, child: Child, fine_rows: Index, rows: range, z: Tensor | None, quantity: Quantity
) -> Tensor:
    """Some rows of a fine parameter, float32 [fine rows, fine columns]."""
    beta = blend.beta if quantity == "master" else 0.0
    if beta == 0.0:
        x = torch.zeros(len(fine_rows), _width(child.parameter))
    else:
        x = _read_rows(blend.fine, child.parameter, fine_rows, quantity)
    if z is not None:
        divisors, scalar = up_divisors(item, child, quantity)
        unread = unread_value(child, quantity, beta=beta)
        value = torch.full_like(x, unread) if unread else None
        if scalar != 0:
            scaled = z / outer(divisors, scalar, rows=np.asarray(rows), cols=np.arange(z.shape[1])).float()
            positions = torch.from_numpy(item.dims[0].parent[fine_rows] - rows[0])
            value = scaled.index_select(0, positions).index_select(1, parent_cols(item))
        blend_fine_(x, value, beta=beta)
    return x


def _blocks(item: ParameterMap, bucket: int) -> list[range]:
    """The coarse rows in runs whose fine rows have at most ``bucket`` elements (or one coarse row's)."""
    total, members = len(item.dims[0].sizes), int(item.dims[0].sizes.max())
    count = max(1, bucket // (members * _width(item.children[0].parameter)))
    return [range(first, min(first + count, total)) for first in range(0, total, count)]


def _fine_rows(item: ParameterMap, rows: range) -> Index:
    """The fine rows that belong to a run of coarse rows, ascending."""
    parent = item.dims[0].parent
    return np.flatnonzero((parent >= rows.start) & (parent < rows.stop))


def _runs(rows: Index) -> list[tuple[int, int]]:
    """Ascending indices as runs [first, last) without gaps."""
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, ends)]


def _read_rows(source: WeightSource, parameter: Parameter, rows: Index, key: str) -> Tensor:
    """Whole rows of a parameter, float32 [rows, columns]."""
    width = _width(parameter)
    parts = [
        source.read(parameter, tp=1, tp_rank=0, start=first * width, length=(last - first) * width, key=key)
        for first, last in _runs(rows)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(len(rows), width)


def _width(parameter: Parameter) -> int:
    return parameter.shape[1] if len(parameter.shape) > 1 else 1
