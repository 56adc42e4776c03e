"""Coarse rows in chunks whose working set stays in the cache: the loop of both references."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_vcycle_kernels.positions import Positions

ELEMENTS_PER_THREAD = 1 << 17
"""Expanded elements of a chunk of coarse rows, per thread: few enough for the cache, enough to outweigh the calls."""


class Scratch:
    """Memory that the chunks of a launch share, so that its pages are touched once. Its parts are told by name."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._parts: dict[str, Tensor] = {}

    def matrix(self, part: str, rows: int, cols: int) -> Tensor:
        """An uninitialised [rows, cols]; what the part was used for before is gone."""
        size = rows * cols
        if part not in self._parts or self._parts[part].numel() < size:
            self._parts[part] = torch.empty(size, dtype=self._dtype, device=self._device)
        return self._parts[part][:size].view(rows, cols)


def chunk_elements() -> int:
    """Elements handled at once."""
    return ELEMENTS_PER_THREAD * torch.get_num_threads()


def row_chunks(rows: Positions, extent: int, width: int) -> Iterator[tuple[int, int]]:
    """Coarse rows 0..extent in chunks (first, last) of about :func:`chunk_elements` elements.

    Args:
        rows: a rule whose units the chunks do not cut, where units are shorter than a chunk.
        extent: number of coarse rows.
        width: elements of a coarse row's expansion.
    """
    step = max(1, chunk_elements() // width)
    first = 0
    if rows.table is None and rows.span <= step:
        step -= step % rows.span
        first = -(rows.base % rows.span)
    while first < extent:
        yield max(first, 0), min(first + step, extent)
        first += step
