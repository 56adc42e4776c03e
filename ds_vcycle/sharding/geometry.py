"""Which coarse elements pass between which ranks in a transition: rectangles of row and column indices. No torch.

A fragment is a flat range of a tensor-parallel slice, so it is at most three rectangles (a partial row, whole rows, a
partial row). A parameter's map is a product of a row map and a column map, so the coarse elements that a rectangle
touches are a rectangle again, and what two ranks exchange is an intersection of rectangles. Every rank computes the
pieces it sends and the pieces it receives from the rule alone, in the same order, and asks nobody.

An element held by several ranks (replicated over tensor-parallel ranks, or ZeRO stage 0) is read from the replica that
the receiver itself belongs to, so nothing crosses that needs not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ds_vcycle.operators.plan import Child, DimMap, Index, ParameterMap, TransitionPlan
from ds_vcycle.schema import Parameter, parameters
from ds_vcycle.sharding.placement import Layout, Placement, rank_placements

Window = tuple[int, int]
"""Coarse rows from the first up to the last."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Block:
    """A rectangle of a parameter that lies contiguously in a rank's fragment, from element ``offset`` of it.

    ``rows`` and ``cols`` are global indices; pad rows are left out. A vector has the single column 0.
    """

    offset: int
    rows: Index
    cols: Index

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return len(self.rows) * len(self.cols)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Touch:
    """A rectangle of coarse elements (sorted ``rows`` x ``cols``) and the fine blocks of one rank that map onto it."""

    rows: Index
    cols: Index
    members: list[tuple[Child, Block]]

    @property
    def shape(self) -> tuple[int, int]:
        """Coarse rows and columns."""
        return len(self.rows), len(self.cols)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Piece:
    """What one pair of ranks exchanges: coarse ``rows`` x ``cols`` of touch ``touch`` and coarse block ``block``."""

    touch: int
    block: int
    rows: Index
    cols: Index

    @property
    def numel(self) -> int:
        """Coarse elements exchanged."""
        return len(self.rows) * len(self.cols)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The exchange of one transition between two layouts over the same ranks."""

    plan: TransitionPlan
    fine: Layout
    coarse: Layout

    @cached_property
    def _placements(self) -> dict[tuple[str, int], dict[str, Placement]]:
        fine, coarse = parameters(self.plan.fine.shape), parameters(self.plan.coarse.shape)
        held = {}
        for rank in range(self.fine.world_size):
            held["fine", rank] = {p.name: p for p in rank_placements(fine, self.fine, rank)}
            held["coarse", rank] = {p.name: p for p in rank_placements(coarse, self.coarse, rank)}
        return held

    def fine_placements(self, rank: int) -> dict[str, Placement]:
        """What a rank holds of the fine level, by parameter name."""
        return self._placements["fine", rank]

    def coarse_placements(self, rank: int) -> dict[str, Placement]:
        """What a rank holds of the coarse level, by parameter name."""
        return self._placements["coarse", rank]

    def parameter(self, item: ParameterMap, window: Window | None = None) -> ParameterGeometry:
        """The exchange of one coarse parameter and its children, or of the coarse rows in a window only."""
        return ParameterGeometry(self, item, window)

    def buckets(self, elements: int) -> Iterator[Sequence[ParameterGeometry]]:
        """The parameters in runs of at most ``elements`` coarse elements.

        A larger parameter is cut by rows, where fine rows do not cross the cut; else it is a run of its own.
        """
        run: list[ParameterMap] = []
        filled = 0
        for item in self.plan.maps:
            windows = _windows(item, elements)
            if run and (filled + item.coarse.numel > elements or len(windows) > 1):
                yield [self.parameter(member) for member in run]
                run, filled = [], 0
            if len(windows) > 1:
                yield from ([self.parameter(item, window)] for window in windows)
                continue
            run.append(item)
            filled += item.coarse.numel
        if run:
            yield [self.parameter(member) for member in run]


class ParameterGeometry:
    """The exchange of one coarse parameter and its children; keeps what it worked out, so it is used and let go."""

    def __init__(self, geometry: Geometry, item: ParameterMap, window: Window | None = None) -> None:
        self.item = item
        self._geometry = geometry
        self._window = window
        self._blocks: dict[int, list[Block]] = {}
        self._touches: dict[int, list[Touch]] = {}

    def blocks(self, rank: int) -> list[Block]:
        """The rectangles of the coarse parameter that a rank holds."""
        if rank not in self._blocks:
            placement = self._geometry.coarse_placements(rank).get(self.item.coarse.name)
            layout = self._geometry.coarse
            found = blocks(self.item.coarse, placement, layout.tp, layout.coordinates(rank)[1])
            self._blocks[rank] = [cut for block in found if (cut := _cut(block, block.rows, self._window))]
        return self._blocks[rank]

    def touches(self, rank: int) -> list[Touch]:
        """The coarse rectangles that a rank's fine fragments map onto; equal rectangles of several layers are one."""
        if rank not in self._touches:
            self._touches[rank] = self._find_touches(rank)
        return self._touches[rank]

    def pieces(self, *, fine_rank: int, coarse_rank: int) -> Iterator[Piece]:
        """What passes between the holder of fine fragments and the holder of coarse ones, in fixed order."""
        owned = self.blocks(coarse_rank)
        for touch_index, touch in enumerate(self.touches(fine_rank) if owned else ()):
            for block_index, block in enumerate(owned):
                if touch.rows[0] > block.rows[-1] or block.rows[0] > touch.rows[-1]:
                    continue  # most pairs of ranks have nothing in common: this is what keeps many ranks cheap
                rows = _common(touch.rows, block.rows)
                cols = _common(touch.cols, block.cols)
                if len(rows) and len(cols):
                    yield Piece(touch=touch_index, block=block_index, rows=rows, cols=cols)

    def goes_down(self, *, fine_rank: int, coarse_rank: int) -> bool:
        """Whether ``coarse_rank`` is served by ``fine_rank`` when coalescing: it is of the replica it belongs to."""
        return same_replica(self.item.children[0].parameter, self._geometry.fine, fine_rank, coarse_rank)

    def goes_up(self, *, fine_rank: int, coarse_rank: int) -> bool:
        """Whether ``fine_rank`` is served by ``coarse_rank`` when refining: it is of the replica it belongs to."""
        return same_replica(self.item.coarse, self._geometry.coarse, coarse_rank, fine_rank)

    def _find_touches(self, rank: int) -> list[Touch]:
        found: dict[tuple[bytes, bytes], Touch] = {}
        layout, dims = self._geometry.fine, self.item.dims
        placements = self._geometry.fine_placements(rank)
        for child in self.item.children:
            placement = placements.get(child.parameter.name)
            for whole in blocks(child.parameter, placement, layout.tp, layout.coordinates(rank)[1]):
                block = _cut(whole, dims[0].parent[whole.rows], self._window)
                if block is not None:
                    rows, cols, key = _touched(dims, block)
                    touch = found.setdefault(key, Touch(rows=rows, cols=cols, members=[]))
                    touch.members.append((child, block))
        return list(found.values())


def blocks(parameter: Parameter, placement: Placement | None, tp: int, tp_rank: int) -> tuple[Block, ...]:
    """The at most three rectangles of a flat range of a local slice, pad rows left out.

    Parameters that lie alike, layer after layer, have the same ones: the same objects.
    """
    if placement is None or placement.length == 0:
        return ()
    alike = replace(parameter, template="", layer=None)
    return _blocks(alike, placement.start, placement.length, tp, tp_rank)


@lru_cache(maxsize=4096)
def _blocks(parameter: Parameter, start: int, length: int, tp: int, tp_rank: int) -> tuple[Block, ...]:
    local = parameter.local_shape(tp)
    width = local[1] if len(local) > 1 else 1
    rows, cols = _global_indices(parameter, tp, tp_rank)
    found = []
    for first, last, left, right in rectangles(start, length, width):
        last = min(last, len(rows))
        if first < last:
            offset = first * width + left - start
            found.append(Block(offset=offset, rows=rows[first:last], cols=cols[left:right]))
    return tuple(found)


def rectangles(start: int, length: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """A flat range of rows of ``width`` as (first row, end row, first column, end column), in flat order."""
    end = start + length
    row, column = divmod(start, width)
    if column:
        stop = min(end, (row + 1) * width)
        yield row, row + 1, column, column + stop - start
        start, row = stop, row + 1
    whole = (end - start) // width
    if whole > 0:
        yield row, row + whole, 0, width
        start, row = start + whole * width, row + whole
    if start < end:
        yield row, row + 1, 0, end - start


def same_replica(parameter: Parameter, layout: Layout, source: int, rank: int) -> bool:
    """Whether ``source`` is of the ranks that together hold every element once, ``rank`` among them if it holds any."""
    source_dp, source_tp = layout.coordinates(source)
    dp, tp = layout.coordinates(rank)
    return (layout.zero_stage > 0 or source_dp == dp) and (parameter.tp_dim is not None or source_tp == tp)


@lru_cache(maxsize=4096)
def _global_indices(parameter: Parameter, tp: int, tp_rank: int) -> tuple[Index, Index]:
    """The global row of each local row that is no pad row, and the global column of each local column."""
    rows = np.concatenate([np.arange(*run) for run in parameter.global_ranges(0, tp, tp_rank)])
    rows = rows[rows < parameter.dims[0].real]
    if len(parameter.dims) == 1:
        return rows, np.zeros(1, dtype=np.int64)
    return rows, np.concatenate([np.arange(*run) for run in parameter.global_ranges(1, tp, tp_rank)])


def _windows(item: ParameterMap, elements: int) -> Sequence[Window | None]:
    """The coarse rows of a parameter in runs of at most ``elements`` elements, as far as it may be cut."""
    width = item.coarse.dims[1].size if len(item.dims) > 1 else 1
    step = max(1, elements // width)
    if len(item.dims[0].sizes) <= step:
        return [None]
    edges = [0]
    for edge, following in pairwise(_edges(item.dims[0])):
        if following - edges[-1] > step:
            edges.append(edge)
    edges.append(len(item.dims[0].sizes))
    return list(pairwise(dict.fromkeys(edges)))


@lru_cache(maxsize=256)
def _edges(dim: DimMap) -> list[int]:
    """The coarse rows, and the end, before which no fine row lies on a later one: there a parameter may be cut."""
    below = np.concatenate(([-1], np.maximum.accumulate(dim.parent)))
    above = np.concatenate((np.minimum.accumulate(dim.parent[::-1])[::-1], [len(dim.sizes)]))
    return [int(edge) for edge in above[below < above]]


def _cut(block: Block, parents: Index, window: Window | None) -> Block | None:
    """The rows of a block whose coarse rows lie in the window; None if there are none."""
    if window is None:
        return block
    inside = np.flatnonzero((parents >= window[0]) & (parents < window[1]))
    if len(inside) == 0:
        return None
    first, last = int(inside[0]), int(inside[-1]) + 1
    assert last - first == len(inside), "a window is cut where the rows of its fine elements are"
    return Block(offset=block.offset + first * len(block.cols), rows=block.rows[first:last], cols=block.cols)


@lru_cache(maxsize=4096)
def _touched(dims: tuple[DimMap, ...], block: Block) -> tuple[Index, Index, tuple[bytes, bytes]]:
    """The coarse rows and columns that a block maps onto, and both as a key."""
    rows = _distinct(dims[0].parent[block.rows])
    cols = _distinct(dims[1].parent[block.cols]) if len(dims) > 1 else block.cols
    return rows, cols, (rows.tobytes(), cols.tobytes())


def _distinct(parents: Index) -> Index:
    """The sorted distinct indices; those of a run that ascends, the usual case, need no sort."""
    steps = np.diff(parents)
    if (steps >= 0).all():
        return parents[np.concatenate(([True], steps > 0))]
    return np.unique(parents)


def _common(a: Index, b: Index) -> Index:
    """The indices in both of two ascending arrays; runs without gaps, the usual case, need no search."""
    if a[-1] - a[0] + 1 == len(a) and b[-1] - b[0] + 1 == len(b):
        return np.arange(max(a[0], b[0]), min(a[-1], b[-1]) + 1)
    return np.intersect1d(a, b, assume_unique=True)
