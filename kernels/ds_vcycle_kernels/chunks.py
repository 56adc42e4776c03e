"""Coarse rows in chunks whose working set stays in the cache: the loop of both references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ds_vcycle_kernels.positions import Positions

CHUNK_ELEMENTS = 1 << 17
"""Fine elements handled at once: small enough for the second and third level cache, large enough to hide a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """Memory that the chunks of a launch share, so that its pages are touched once."""

    memory: Tensor

    def matrix(self, rows: int, cols: int) -> Tensor:
        """An uninitialised [rows, cols] on it, or fresh memory where a single row is longer."""
        if rows * cols > self.memory.numel():
            return self.memory.new_empty(rows, cols)
        return self.memory[: rows * cols].view(rows, cols)


def row_chunks(rows: Positions, extent: int, width: int) -> Iterator[tuple[int, int]]:
    """Coarse rows 0..extent in chunks (first, last) that come from about ``CHUNK_ELEMENTS`` fine elements.

    Args:
        rows: a rule whose units the chunks do not cut, where units are shorter than a chunk.
        extent: number of coarse rows.
        width: elements of a coarse row's expansion.
    """
    step = max(1, CHUNK_ELEMENTS // width)
    first = 0
    if rows.table is None and rows.span <= step:
        step -= step % rows.span
        first = -(rows.base % rows.span)
    while first < extent:
        yield max(first, 0), min(first + step, extent)
        first += step
