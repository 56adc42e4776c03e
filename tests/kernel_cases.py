"""Random blocks for the kernels' tests, and a dense oracle in numpy."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from ds_vcycle_kernels import CoalesceJob, Member, Moment, Positions, RefineJob, positions
from torch import Tensor

GROUPINGS = ("adjacent", "stack", "local_stack", "heads", "explicit", "identity")


def parents(grouping: str, fine: int, generator: random.Random) -> Tensor:
    """The coarse index of each of ``fine`` indices (a multiple of 24)."""
    index = torch.arange(fine)
    if grouping == "identity":
        return index
    if grouping == "explicit":
        return torch.tensor([generator.randrange(max(1, fine // 3)) for _ in range(fine)])
    span = {"adjacent": 1, "stack": fine // 2, "local_stack": fine // 4, "heads": 3}[grouping]
    return index // (2 * span) * span + index % span


def window(table: Tensor, first: int, last: int) -> tuple[Tensor, int]:
    """A part of a map as positions within what it touches, and how much that is."""
    touched = torch.unique(table[first:last])
    return torch.searchsorted(touched, table[first:last]), len(touched)


@dataclass(kw_only=True)
class Case:
    """A fine block of ``table_R`` x ``table_C``, its coarse rectangle of ``shape``, and random values."""

    rows: Tensor
    cols: Tensor
    shape: tuple[int, int]
    x: Tensor
    z: Tensor

    @property
    def rules(self) -> tuple[Positions, Positions]:
        return positions(self.rows), positions(self.cols)

    def value(self, divisor: float) -> np.ndarray:
        scaled = self.z.numpy() / np.float32(divisor)
        return scaled[self.rows.numpy()][:, self.cols.numpy()]

    def total(self, root: bool) -> np.ndarray:
        total = np.zeros(self.shape)
        x = np.sqrt(self.x.numpy()) if root else self.x.numpy()
        np.add.at(total, (self.rows.numpy()[:, None], self.cols.numpy()[None, :]), x.astype(np.float64))
        return total


def case(rows: tuple[Tensor, int], cols: tuple[Tensor, int], start: int) -> Case:
    """Random values; the block begins at element ``start`` of its fragment. Sums of these values are exact."""
    shape = (rows[1], cols[1])
    count = len(rows[0]) * len(cols[0])
    fragment = torch.randint(1, 1 << 20, (start + count,)).float() / 1024
    x = fragment[start:].view(len(rows[0]), len(cols[0]))
    return Case(rows=rows[0], cols=cols[0], shape=shape, x=x, z=torch.randn(shape))


def refined(case: Case, *, beta: float, divisor: float, dtype: torch.dtype | None, moments: bool) -> RefineJob:
    """A job on copies that begin at the same element."""
    rows, cols = case.rules
    first = Moment(x=_copy(case.x), z=case.z, divisor=3.0) if moments else None
    second = Moment(x=_copy(case.x)) if moments else None
    weight = None if dtype is None else torch.zeros(case.x.numel() + 1, dtype=dtype)[1:]
    return RefineJob(
        x=_copy(case.x), z=case.z, rows=rows, cols=cols, divisor=divisor, weight=weight, exp_avg=first,
        exp_avg_sq=second,
    )  # fmt: skip


def summed(case: Case, *, root: bool, copies: int = 2) -> CoalesceJob:
    """The block ``copies`` times over, as layers are."""
    rows, cols = case.rules
    members = [Member(x=case.x, rows=rows, cols=cols) for _ in range(copies)]
    return CoalesceJob(members=members, total=torch.full(case.shape, torch.nan, dtype=torch.float64), root=root)


def _copy(x: Tensor) -> Tensor:
    start = x.storage_offset()
    return x.new_zeros(start + x.numel())[start:].view_as(x).copy_(x)
