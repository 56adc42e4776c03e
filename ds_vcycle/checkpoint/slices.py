"""Which rectangles a wanted tensor-parallel slice and the stored slices have in common. Imports no torch.

A flat range of a slice is at most three rectangles (part of a row, whole rows, part of a row); a slice's rows and
columns are a few runs of global ones. So whatever the two degrees are, what one slice takes from another is a few
rectangles, each with a row stride on either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ds_vcycle.checkpoint.manifest import Run, StoredParameter
from ds_vcycle.sharding.geometry import rectangles

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rows and columns [start, end) of the stored slice of ``tp_rank``.

    ``into``: flat index of the rectangle's first element in the wanted slice.
    """

    tp_rank: int
    rows: Range
    cols: Range
    into: int

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])

    def within(self, start: int, length: int, stored_width: int, wanted_width: int) -> Iterator[Block]:
        """The parts of it that lie in a flat range of the stored slice.

        Args:
            start: of the range.
            length: of the range.
            stored_width: columns of the stored slice.
            wanted_width: columns of the wanted slice.
        """
        for first, last, left, right in rectangles(start, length, stored_width):
            rows = max(self.rows[0], first), min(self.rows[1], last)
            cols = max(self.cols[0], left), min(self.cols[1], right)
            if rows[0] < rows[1] and cols[0] < cols[1]:
                further = (rows[0] - self.rows[0]) * wanted_width + cols[0] - self.cols[0]
                yield Block(tp_rank=self.tp_rank, rows=rows, cols=cols, into=self.into + further)


def shared_blocks(
    stored: StoredParameter, wanted: StoredParameter, tp_rank: int, start: int, length: int
) -> Iterator[Block]:
    """The rectangles of the stored slices that make up a flat range of a wanted slice, its pad rows aside.

    Args:
        stored: as it lies in the checkpoint.
        wanted: the same parameter under another degree or padding.
        tp_rank: whose slice is wanted.
        start: first element of the range.
        length: elements of the range.
    """
    mine = [_located(wanted, dim, tp_rank) for dim in (0, 1)]
    theirs = [(rank, _located(stored, 0, rank), _located(stored, 1, rank)) for rank in range(stored.tp)]
    for first, last, left, right in rectangles(start, length, wanted.width):
        rows = [_clipped(run, first, last) for run in mine[0]]
        cols = [_clipped(run, left, right) for run in mine[1]]
        for rank, stored_rows, stored_cols in theirs:
            for row, col in product(_meetings(rows, stored_rows), _meetings(cols, stored_cols)):
                yield Block(
                    tp_rank=rank,
                    rows=(row.theirs, row.theirs + row.length),
                    cols=(col.theirs, col.theirs + col.length),
                    into=row.mine * wanted.width + col.mine,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Located:
    """Global indices from ``start``, which lie at local indices from ``local``."""

    start: int
    local: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meeting:
    """A run of global indices as local ones of both slices."""

    mine: int
    theirs: int
    length: int


def _located(parameter: StoredParameter, dim: int, tp_rank: int) -> list[_Located]:
    """The runs of a slice's dim with the place of each, pad rows left out."""
    found, local = [], 0
    runs: tuple[Run, ...] = parameter.runs(dim, tp_rank)
    real = parameter.shape[dim] if dim < len(parameter.shape) else 1
    for start, end in runs:
        found.append(_Located(start=start, local=local, length=max(min(end, real) - start, 0)))
        local += end - start
    return found


def _clipped(run: _Located, first: int, last: int) -> _Located:
    """The part of a run at local indices [first, last)."""
    low, high = max(run.local, first), min(run.local + run.length, last)
    return _Located(start=run.start + low - run.local, local=low, length=max(high - low, 0))


def _meetings(mine: list[_Located], theirs: list[_Located]) -> list[_Meeting]:
    found = []
    for a, b in product(mine, theirs):
        low, high = max(a.start, b.start), min(a.start + a.length, b.start + b.length)
        if low < high:
            found.append(_Meeting(mine=a.local + low - a.start, theirs=b.local + low - b.start, length=high - low))
    return found
