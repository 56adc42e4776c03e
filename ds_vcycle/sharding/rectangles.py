"""Parts of rectangles by global row and column indices: taken out, put in, added. Ascending indices throughout."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ds_vcycle.operators.plan import Index
from ds_vcycle.sharding.geometry import Block


class Rectangle(Protocol):
    """Anything with ascending global ``rows`` and ``cols``: a touch or a block."""

    @property
    def rows(self) -> Index:
        """Global row indices."""

    @property
    def cols(self) -> Index:
        """Global column indices."""


def view(flat: Tensor, block: Block) -> Tensor:
    """A block of a flat fragment, [rows, cols]; shares its memory."""
    return flat[block.offset : block.offset + block.numel].view(len(block.rows), len(block.cols))


def part(matrix: Tensor, container: Rectangle, rows: Index, cols: Index) -> Tensor:
    """The rows and columns of a sub-rectangle; a view where they have no gaps."""
    return _select(_select(matrix, within(container.rows, rows), 0), within(container.cols, cols), 1)


def put(matrix: Tensor, container: Rectangle, rows: Index, cols: Index, values: Tensor) -> None:
    """Overwrite a sub-rectangle."""
    found = _grid(matrix, within(container.rows, rows), within(container.cols, cols))
    if isinstance(found, Tensor):
        found.copy_(values.view_as(found))
    else:
        matrix[found] = values.view(len(rows), len(cols))


def add(matrix: Tensor, container: Rectangle, rows: Index, cols: Index, values: Tensor) -> None:
    """Add to a sub-rectangle."""
    found = _grid(matrix, within(container.rows, rows), within(container.cols, cols))
    if isinstance(found, Tensor):
        found.add_(values.view_as(found))
    else:
        matrix[found] += values.view(len(rows), len(cols))


def within(container: Index, subset: Index) -> Index | slice:
    """Positions of a subset in its container; a slice where they have no gaps."""
    first = int(np.searchsorted(container, subset[0]))
    last = int(np.searchsorted(container, subset[-1]))
    if last - first + 1 == len(subset):
        return slice(first, last + 1)
    return np.searchsorted(container, subset)


def index_tensor(index: Index, device: torch.device) -> Tensor:
    """Indices on a device, int64."""
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)


def _select(matrix: Tensor, positions: Index | slice, dim: int) -> Tensor:
    if isinstance(positions, slice):
        return matrix.narrow(dim, positions.start, positions.stop - positions.start)
    return matrix.index_select(dim, index_tensor(positions, matrix.device))


def _grid(matrix: Tensor, rows: Index | slice, cols: Index | slice) -> Tensor | tuple[Tensor, Tensor]:
    """The sub-matrix where it is a view, else the advanced indices of the rectangle."""
    if isinstance(rows, slice) and isinstance(cols, slice):
        return _select(_select(matrix, rows, 0), cols, 1)
    row = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    col = np.arange(cols.start, cols.stop) if isinstance(cols, slice) else cols
    return index_tensor(row, matrix.device)[:, None], index_tensor(col, matrix.device)[None, :]
