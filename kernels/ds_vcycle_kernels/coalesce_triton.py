"""``coalesce`` in Triton: each coarse element gathers its fine ones, so nothing is added by two programs.

A program owns a tile of the coarse rectangle, [rows, columns], and walks member by member over the fine rows, and then
the fine columns, that lie on it: every fine element is read once, and the order of the sum is fixed. Where all blocks
begin on a 16-byte address and their rows are multiples of four, four elements are loaded at once; pairs of neighbouring
columns, the usual grouping, are read as one contiguous run of twice the tile.
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
NARROW = 16
"""Columns of a tile of a rectangle that is narrower than half a row of ``BLOCK``."""

JOB_FIELDS, MEMBER_FIELDS = tl.constexpr(7), tl.constexpr(17)
K_IDENTITY, K_PAIRS, K_REGULAR = tl.constexpr(IDENTITY), tl.constexpr(PAIRS), tl.constexpr(REGULAR)


@triton.jit
def _first_child(position: tl.tensor, rule: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    """The fine index of a position's first member by the closed form, whose numbers are multiples of ``BY``.

    The next members follow ``span`` apart.
    """
    span = tl.multiple_of(tl.load(rule + 1).to(tl.int32), BY)
    shift = tl.multiple_of(tl.load(rule + 2).to(tl.int32), BY)
    base = tl.multiple_of(tl.load(rule + 3).to(tl.int32), BY)
    whole = position + base
    return whole // span * (tl.load(rule).to(tl.int32) * span) + whole % span - shift


@triton.jit
def _listed(
    position: tl.tensor, extent: tl.tensor, number: tl.tensor, rule: tl.tensor, tables: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The fine index of a position's ``number``-th member by the inverse table, and whether there is one."""
    starts = tables + tl.load(rule + 4) + position
    place = tl.load(starts, mask=position < extent, other=0) + number
    inside = place < tl.load(starts + 1, mask=position < extent, other=0)
    return tl.load(tables + tl.load(rule + 5) + place, mask=inside, other=0), inside


@triton.jit
def _summands(pointer: tl.tensor, inside: tl.tensor, ROOT: tl.constexpr) -> tl.tensor:
    value = tl.load(pointer, mask=inside, other=0.0)
    if ROOT:
        value = tl.sqrt_rn(value)
    return value.to(tl.float64)


@triton.jit
def coalesce_kernel(
    jobs: tl.tensor,
    members: tl.tensor,
    tables: tl.tensor,
    owners: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROOT: tl.constexpr,
) -> None:
    """One tile of one coarse rectangle.

    Args:
        jobs: int64 [jobs, 7]: address of the total, rows, width, first tile, tiles side by side, first member, member
            after the last.
        members: int64 [members, 17]: address of x, rows, columns; then for rows and for columns the closed form (4),
            where the inverse's starts (-1: the closed form holds) and its order lie in ``tables``, and the most fine
            indices on one position.
        tables: int32, the inverses of the positions that have no closed form.
        owners: int32 [tiles], the job of each tile.
        ROWS: coarse rows of a tile.
        COLUMNS: coarse columns of a tile.
        COLS: how columns are found.
        VECTOR: all begins are 16-byte addresses; all widths, and what the columns' closed forms hold, multiples of 4.
        ROOT: sum square roots.
    """
    job = jobs + tl.load(owners + tl.program_id(0)).to(tl.int64) * JOB_FIELDS
    tile = (tl.program_id(0) - tl.load(job + 3)).to(tl.int32)
    beside = tl.load(job + 4).to(tl.int32)
    height, width = tl.load(job + 1).to(tl.int32), tl.load(job + 2).to(tl.int32)
    row = tile // beside * ROWS + tl.arange(0, ROWS)
    first = tile % beside * COLUMNS
    col = first + tl.arange(0, COLUMNS)
    if VECTOR:
        width = tl.multiple_of(width, 4)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
    for index in range(tl.load(job + 5), tl.load(job + 6)):
        member = members + index * MEMBER_FIELDS
        x = tl.load(member).to(tl.pointer_type(tl.float32))
        cols = tl.load(member + 2).to(tl.int32)
        if VECTOR:
            x, cols = tl.multiple_of(x, 16), tl.multiple_of(cols, 4)
        for number in range(tl.load(member + 9).to(tl.int32)):
            if tl.load(member + 7) < 0:
                fine_row = _first_child(row, member + 3, 1) + number * tl.load(member + 4).to(tl.int32)
                inside = (row < height) & (fine_row >= 0) & (fine_row < tl.load(member + 1).to(tl.int32))
            else:
                fine_row, inside = _listed(row, height, number, member + 3, tables)
            begin = (fine_row.to(tl.int64) * cols)[:, None]
            if COLS == K_IDENTITY:
                total += _summands(x + (begin + col[None, :]), inside[:, None] & (col < cols)[None, :], ROOT)
            elif COLS == K_PAIRS:
                both = 2 * first + tl.arange(0, 2 * COLUMNS)
                value = _summands(x + (begin + both[None, :]), inside[:, None] & (both < cols)[None, :], ROOT)
                left, right = tl.split(tl.reshape(value, (ROWS, COLUMNS, 2)))
                total += left + right
            elif COLS == K_REGULAR:
                child = _first_child(col, member + 10, 4 if VECTOR else 1)
                span = tl.load(member + 11).to(tl.int32)
                if VECTOR:
                    span = tl.multiple_of(span, 4)
                for other in range(tl.load(member + 10).to(tl.int32)):
                    fine = child + other * span
                    here = (col < width) & (fine >= 0) & (fine < cols)
                    total += _summands(x + (begin + fine[None, :]), inside[:, None] & here[None, :], ROOT)
            else:
                for other in range(tl.load(member + 16).to(tl.int32)):
                    fine, here = _listed(col, width, other, member + 10, tables)
                    total += _summands(x + (begin + fine[None, :]), inside[:, None] & here[None, :], ROOT)
    out = tl.load(job).to(tl.pointer_type(tl.float64))
    if VECTOR:
        out = tl.multiple_of(out, 16)
    out += (row.to(tl.int64) * width)[:, None] + col[None, :]
    tl.store(out, total, mask=(row < height)[:, None] & (col < width)[None, :])


class Variant(NamedTuple):
    """What jobs have in common that one launch, and one compiled kernel, takes."""

    narrow: bool
    cols: int
    vector: bool
    root: bool


def launch_coalesce(jobs: Sequence[CoalesceJob], *, block: int = BLOCK) -> None:
    """Fill the totals of checked, laid-out jobs with elements: one launch for each :class:`Variant` among them."""
    variants: dict[Variant, list[CoalesceJob]] = {}
    for job in jobs:
        variants.setdefault(variant_of(job, block), []).append(job)
    for variant, alike in variants.items():
        device, shape = alike[0].total.device, tile_shape(variant, block)
        table, members, tables, owners = (uploaded(t, device) for t in describe(alike, variant.cols, shape))
        coalesce_kernel[(len(owners),)](
            table, members, tables, owners, ROWS=shape[0], COLUMNS=shape[1], COLS=variant.cols, VECTOR=variant.vector,
            ROOT=variant.root, num_warps=4,
        )  # fmt: skip


def describe(jobs: Sequence[CoalesceJob], cols: int, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's ``jobs``, ``members``, ``tables`` and ``owners`` on the host.

    Args:
        jobs: laid out, with elements.
        cols: how columns are found, as the variant has it.
        tile: coarse rows and columns of a tile.
    """
    tables = Tables()
    beside = [-(-job.total.shape[1] // tile[1]) for job in jobs]
    below = [-(-job.total.shape[0] // tile[0]) for job in jobs]
    owners, first = tile_owners([m * n for m, n in zip(below, beside, strict=True)])
    rows: list[list[int]] = []
    members: list[list[int]] = []
    for job, first_tile, tiles in zip(jobs, first, beside, strict=True):
        begin = len(members)
        members += [_member_fields(member, job.total.shape, cols, tables) for member in job.members]
        rows.append([job.total.data_ptr(), *job.total.shape, first_tile, tiles, begin, len(members)])
    return torch.tensor(rows), torch.tensor(members or [[0] * MEMBER_FIELDS.value]), tables.joined(), owners


def variant_of(job: CoalesceJob, block: int) -> Variant:
    """The variant that sums a job in tiles of ``block`` coarse elements."""
    kinds = {column_kind(member.cols) for member in job.members}
    shared = kinds.pop() if len(kinds) == 1 else TABLE if TABLE in kinds else REGULAR
    vector = job.total.data_ptr() % 16 == 0 and job.total.shape[1] % 4 == 0
    vector = vector and all(_by_four(member, shared) for member in job.members)
    return Variant(narrow=2 * job.total.shape[1] < block, cols=shared, vector=vector, root=job.root)


def tile_shape(variant: Variant, block: int) -> tuple[int, int]:
    """Coarse rows and columns of a tile."""
    return (block // NARROW, NARROW) if variant.narrow else (1, block)


def _by_four(member: Member, kind: int) -> bool:
    """Whether the fine columns of four neighbouring coarse ones, in each of their members, can be loaded at once."""
    spans = (member.cols.span, member.cols.shift, member.cols.base) if kind == REGULAR else ()
    return member.x.data_ptr() % 16 == 0 and all(size % 4 == 0 for size in (member.x.shape[1], *spans))


def _member_fields(member: Member, shape: torch.Size, kind: int, tables: Tables) -> list[int]:
    fields = [member.x.data_ptr(), *member.x.shape]
    for rule, extent, listed in zip((member.rows, member.cols), shape, (member.rows.table is not None, kind == TABLE)):
        fields += closed_form(rule)
        fields += [*tables.inverse(rule, extent), crowd(rule)] if listed else [-1, -1, rule.members]
    return fields
