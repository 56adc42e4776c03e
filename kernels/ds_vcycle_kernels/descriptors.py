"""What a launch reads to find its work: a row of integers for each job, the tables they point to, each tile's job.

Addresses are integers, so that one launch can reach into any number of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ds_vcycle_kernels.positions import Positions, children, indices

IDENTITY, PAIRS, REGULAR, TABLE = range(4)
"""How a kernel finds columns: as they are, two neighbours on one, by the closed form, by a table."""


class Tables:
    """Index tables of a launch, one after the other, each once."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._offsets: dict[tuple[int, str, int], int] = {}
        self._length = 0

    def lookup(self, rule: Positions) -> int:
        """Where the table of positions begins; -1 for a closed form."""
        return -1 if rule.table is None else self._offset((id(rule), "lookup", 0), indices(rule))

    def inverse(self, rule: Positions, extent: int) -> tuple[int, int]:
        """Where a table begins that says where each position's fine indices begin, and where these indices begin."""
        order, ordered = children(rule)
        starts = torch.searchsorted(ordered, torch.arange(extent + 1))
        return self._offset((id(rule), "starts", extent), starts), self._offset((id(rule), "order", 0), order)

    def joined(self) -> Tensor:
        """All tables, int32; at least one element."""
        return torch.cat([*self._parts, torch.zeros(1, dtype=torch.int32)])

    def _offset(self, key: tuple[int, str, int], table: Tensor) -> int:
        if key not in self._offsets:
            self._offsets[key] = self._length
            self._parts.append(table.to(torch.int32))
            self._length += len(table)
        return self._offsets[key]


def column_kind(cols: Positions) -> int:
    """How a kernel finds the columns of one block."""
    if cols.table is not None:
        return TABLE
    if cols.identity:
        return IDENTITY
    return PAIRS if cols.whole and (cols.members, cols.span) == (2, 1) else REGULAR


def closed_form(rule: Positions) -> list[int]:
    """The integers of a closed form, as the kernels read them."""
    return [rule.members, rule.span, rule.shift, rule.base]


def tile_owners(tiles: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The job of each tile, int32 [tiles], and the first tile of each job."""
    counts = torch.tensor(tiles)
    owners = torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), counts)
    return owners, (counts.cumsum(0) - counts).tolist()


def uploaded(table: Tensor, device: torch.device) -> Tensor:
    """A host table on the device, by way of pinned memory so that the host does not wait."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def crowd(rule: Positions) -> int:
    """The most fine indices on one position."""
    return int(torch.bincount(indices(rule)).max())
