"""``coalesce`` in Triton: each coarse element gathers its fine ones, so nothing is added by two programs.

A program owns a tile of one coarse row and walks, member by member, over the fine rows that lie on it: every fine
element is read once, and the order of the sum is fixed. Pairs of neighbouring columns, the usual grouping, are read as
one contiguous run of twice the tile. The compiled loads are of single elements so far, aligned or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vcycle_kernels.descriptors import (
    IDENTITY,
    PAIRS,
    REGULAR,
    TABLE,
    Tables,
    closed_form,
    column_kind,
    crowd,
    tile_owners,
    uploaded,
)
from ds_vcycle_kernels.jobs import CoalesceJob, Member

BLOCK = 512
JOB_FIELDS, MEMBER_FIELDS = tl.constexpr(6), tl.constexpr(16)
K_IDENTITY, K_PAIRS, K_REGULAR = tl.constexpr(IDENTITY), tl.constexpr(PAIRS), tl.constexpr(REGULAR)


@triton.jit
def _child(position: tl.tensor, number: tl.tensor, rule: tl.tensor) -> tl.tensor:
    """The fine index of the ``number``-th member of a position by the closed form; outside the block where cut off."""
    span = tl.load(rule + 1).to(tl.int32)
    whole = position + tl.load(rule + 3).to(tl.int32)
    member = whole // span * tl.load(rule).to(tl.int32) + number
    return member * span + whole % span - tl.load(rule + 2).to(tl.int32)


@triton.jit
def _summand(row: tl.tensor, col: tl.tensor, inside: tl.tensor, ROOT: tl.constexpr) -> tl.tensor:
    value = tl.load(row + col, mask=inside, other=0.0)
    return (tl.sqrt_rn(value) if ROOT else value).to(tl.float64)


@triton.jit
def _row_sum(
    total: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    member: tl.tensor,
    tables: tl.tensor,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROOT: tl.constexpr,
) -> tl.tensor:
    """Add the elements of one fine row that lie on the coarse columns from ``first`` on."""
    position = first + tl.arange(0, BLOCK)
    cols = tl.load(member + 2).to(tl.int32)
    if VECTOR:
        row, cols = tl.multiple_of(row, 16), tl.multiple_of(cols, 4)
    if COLS == K_IDENTITY:
        total += _summand(row, position, position < cols, ROOT)
    elif COLS == K_PAIRS:
        col = 2 * first + tl.arange(0, 2 * BLOCK)
        total += tl.sum(tl.reshape(_summand(row, col, col < cols, ROOT), (BLOCK, 2)), axis=1)
    elif COLS == K_REGULAR:
        for number in range(tl.load(member + 9).to(tl.int32)):
            col = _child(position, number, member + 9)
            total += _summand(row, col, (position < width) & (col >= 0) & (col < cols), ROOT)
    else:
        starts = tables + tl.load(member + 13) + position
        begin = tl.load(starts, mask=position < width, other=0)
        end = tl.load(starts + 1, mask=position < width, other=0)
        for number in range(tl.load(member + 15).to(tl.int32)):
            inside = begin + number < end
            col = tl.load(tables + tl.load(member + 14) + begin + number, mask=inside, other=0)
            total += _summand(row, col, inside, ROOT)
    return total


@triton.jit
def coalesce_kernel(
    jobs: tl.tensor,
    members: tl.tensor,
    tables: tl.tensor,
    owners: tl.tensor,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROOT: tl.constexpr,
) -> None:
    """One tile of one coarse row.

    Args:
        jobs: int64 [jobs, 6]: address of the total, width, first tile, tiles of a row, first member, member after the
            last.
        members: int64 [members, 16]: address of x, rows, columns, the rows' closed form (4), where the rows' starts
            (-1: the closed form holds) and their order lie in ``tables``, the same for columns (4, 1, 1), and the most
            columns on one position.
        tables: int32, the inverses of the positions that have no closed form.
        owners: int32 [tiles], the job of each tile.
        BLOCK: coarse elements of a tile.
        COLS: how columns are found.
        VECTOR: all rows of all members begin on a 16-byte address.
        ROOT: sum square roots.
    """
    tile = tl.program_id(0).to(tl.int64)
    job = jobs + tl.load(owners + tile).to(tl.int64) * JOB_FIELDS
    width = tl.load(job + 1).to(tl.int32)
    tile -= tl.load(job + 2)
    coarse_row = (tile // tl.load(job + 3)).to(tl.int32)
    first = (tile % tl.load(job + 3)).to(tl.int32) * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for index in range(tl.load(job + 4), tl.load(job + 5)):
        member = members + index * MEMBER_FIELDS
        starts = tl.load(member + 7)
        listed = starts >= 0
        begin = tl.load(tables + starts + coarse_row, mask=listed, other=0)
        end = tl.load(tables + starts + coarse_row + 1, mask=listed, other=0)
        for number in range(tl.where(listed, end - begin, tl.load(member + 3).to(tl.int32))):
            row = tl.load(tables + tl.load(member + 8) + begin + number, mask=listed, other=0)
            row = tl.where(listed, row, _child(coarse_row, number, member + 3))
            if (row >= 0) & (row < tl.load(member + 1).to(tl.int32)):
                x = tl.load(member) + row.to(tl.int64) * tl.load(member + 2) * 4
                total = _row_sum(
                    total, x.to(tl.pointer_type(tl.float32)), first, width, member, tables, BLOCK, COLS, VECTOR, ROOT
                )
    out = tl.load(job).to(tl.pointer_type(tl.float64)) + coarse_row.to(tl.int64) * width + first
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, total, mask=first + lane < width)


class Variant(NamedTuple):
    """What jobs have in common that one launch, and one compiled kernel, takes."""

    cols: int
    vector: bool
    root: bool


def launch_coalesce(jobs: Sequence[CoalesceJob], *, block: int = BLOCK) -> None:
    """Fill the totals of checked, laid-out jobs with elements: one launch for each :class:`Variant` among them."""
    variants: dict[Variant, list[CoalesceJob]] = {}
    for job in jobs:
        variants.setdefault(_variant(job), []).append(job)
    for variant, alike in variants.items():
        device = alike[0].total.device
        table, members, tables, owners = (uploaded(t, device) for t in describe(alike, variant.cols, block))
        coalesce_kernel[(len(owners),)](
            table, members, tables, owners, BLOCK=block, COLS=variant.cols, VECTOR=variant.vector, ROOT=variant.root,
            num_warps=4,
        )  # fmt: skip


def describe(jobs: Sequence[CoalesceJob], cols: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's ``jobs``, ``members``, ``tables`` and ``owners`` on the host; ``cols`` as the variant has it."""
    tables = Tables()
    per_row = [-(-job.total.shape[1] // block) for job in jobs]
    owners, first = tile_owners([n * job.total.shape[0] for n, job in zip(per_row, jobs, strict=True)])
    rows: list[list[int]] = []
    members: list[list[int]] = []
    for job, tile, tiles in zip(jobs, first, per_row, strict=True):
        begin = len(members)
        members += [_member_fields(member, job.total.shape, cols, tables) for member in job.members]
        rows.append([job.total.data_ptr(), job.total.shape[1], tile, tiles, begin, len(members)])
    return torch.tensor(rows), torch.tensor(members or [[0] * MEMBER_FIELDS.value]), tables.joined(), owners


def _variant(job: CoalesceJob) -> Variant:
    kinds = {column_kind(member.cols) for member in job.members}
    shared = kinds.pop() if len(kinds) == 1 else TABLE if TABLE in kinds else REGULAR
    aligned = all(member.x.data_ptr() % 16 == 0 and member.x.shape[1] % 4 == 0 for member in job.members)
    return Variant(cols=shared, vector=aligned and shared in (IDENTITY, PAIRS), root=job.root)


def _member_fields(member: Member, shape: torch.Size, kind: int, tables: Tables) -> list[int]:
    row_table = (-1, -1) if member.rows.table is None else tables.inverse(member.rows, shape[0])
    fields = [member.x.data_ptr(), *member.x.shape, *closed_form(member.rows), *row_table, *closed_form(member.cols)]
    if kind != TABLE:
        return [*fields, -1, -1, 0]
    starts, order = tables.inverse(member.cols, shape[1])
    return [*fields, starts, order, crowd(member.cols)]
