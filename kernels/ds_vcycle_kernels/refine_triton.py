"""``refine`` in Triton: many blocks in a launch, each fragment read once and written once.

A program owns a tile of consecutive elements of one block. Tiles are laid so that they begin on a 16-byte address
whatever element a block begins at; the tiles inside a block need no mask and move four elements at once, and only its
first and last tile go element by element. Where a row is at least as long as a tile, a tile lies on two rows at most,
so its coarse rows are two numbers, and only the column is worked out for each element.
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
    Tables,
    closed_form,
    column_kind,
    tile_owners,
    uploaded,
)
from ds_vcycle_kernels.jobs import Moment, RefineJob, sources

BLOCK = 1024
FIELDS = tl.constexpr(22)
K_IDENTITY, K_PAIRS, K_REGULAR = tl.constexpr(IDENTITY), tl.constexpr(PAIRS), tl.constexpr(REGULAR)
OVERWRITE, ADD, BLEND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_WEIGHT, BF16, FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _closed(index: tl.tensor, form: tl.tensor) -> tl.tensor:
    """The position by the closed form at ``form``: (members, span, shift, base)."""
    span = tl.load(form + 1).to(tl.int32)
    shifted = index + tl.load(form + 2).to(tl.int32)
    return shifted // (tl.load(form).to(tl.int32) * span) * span + shifted % span - tl.load(form + 3).to(tl.int32)


@triton.jit
def _row_start(row: tl.tensor, rule: tl.tensor, tables: tl.tensor, rows: tl.tensor, width: tl.tensor) -> tl.tensor:
    """The flat index, int64, at which the coarse row of a fine row begins. ``rule``: a closed form, then a table."""
    table = tl.load(rule + 4)
    row = tl.minimum(row, rows - 1)  # the row after the last is asked for, and not used
    if table >= 0:
        entries = tables + table
        coarse_row = tl.load(entries + row)
    else:
        coarse_row = _closed(row, rule)
    return coarse_row.to(tl.int64) * width


@triton.jit
def _coarse_index(
    start: tl.tensor, lane: tl.tensor, job: tl.tensor, tables: tl.tensor, COLS: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """The flat index, int64, of the coarse element that each element start + lane of a block reads."""
    rows, cols = tl.load(job + 4).to(tl.int32), tl.load(job + 5).to(tl.int32)
    width = tl.load(job + 6)
    origin = tl.maximum(start, 0)
    first_row = (origin // cols).to(tl.int32)
    col = (origin % cols).to(tl.int32) + (start - origin).to(tl.int32) + lane
    if WIDE:
        wraps = col >= cols
        here = _row_start(first_row, job + 7, tables, rows, width)
        row_start = tl.where(wraps, _row_start(first_row + 1, job + 7, tables, rows, width), here)
        col = tl.where(wraps, col - cols, col)
    else:
        col = tl.maximum(col, 0)
        row_start = _row_start(first_row + col // cols, job + 7, tables, rows, width)
        col = col % cols
    if COLS == K_IDENTITY:
        position = col
    elif COLS == K_PAIRS:
        position = col // 2
    elif COLS == K_REGULAR:
        position = _closed(col, job + 12)
    else:
        position = tl.load(tables + tl.load(job + 16) + col, mask=(col >= 0) & (col < cols), other=0)
    return row_start + position


@triton.jit
def _coarse_value(
    source: tl.tensor, index: tl.tensor, inside: tl.tensor, divisor: tl.tensor, DIVIDE: tl.constexpr
) -> tl.tensor:
    """z / divisor at the index; zero where there is no z (address 0)."""
    value = tl.zeros(index.shape, dtype=tl.float32)
    if source != 0:
        value = tl.load(source.to(tl.pointer_type(tl.float32)) + index, mask=inside, other=0.0)
        if DIVIDE:
            value = tl.div_rn(value, tl.load(divisor))
    return value


@triton.jit
def _load(pointer: tl.tensor, inside: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    if MASKED:
        return tl.load(pointer, mask=inside, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _store(pointer: tl.tensor, value: tl.tensor, inside: tl.tensor, MASKED: tl.constexpr) -> None:
    if MASKED:
        tl.store(pointer, value, mask=inside)
    else:
        tl.store(pointer, value)


@triton.jit
def _pointer(
    address: tl.tensor, start: tl.tensor, lane: tl.tensor, dtype: tl.constexpr, size: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Of the elements start + lane of a flat tensor; a tile without a mask begins at a multiple of four elements."""
    first = (address + start * size).to(tl.pointer_type(dtype))
    if not MASKED:
        first = tl.multiple_of(first, 4 * size)
    return first + lane


@triton.jit
def _bfloat16_bits(value: tl.tensor) -> tl.tensor:
    """The bfloat16 nearest to a float32, ties to even, as 16 bits; every NaN becomes the one torch writes.

    Half of the last kept bit, less one, and that bit itself are added before the cut: what lies in the middle goes up
    if and only if the kept bit is odd. In integers, so that the interpreter, whose cast truncates, does the same.
    """
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _tile(
    start: tl.tensor,
    job: tl.tensor,
    divisors: tl.tensor,
    tables: tl.tensor,
    beta: tl.tensor,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    MODE: tl.constexpr,
    DIVIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENTS: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    lane = tl.arange(0, BLOCK)
    inside = (start + lane >= 0) & (start + lane < tl.load(job + 1))
    index = _coarse_index(start, lane, job, tables, COLS, WIDE)
    source = tl.load(job + 17)
    value = _coarse_value(source, index, inside, divisors, DIVIDE)
    x = _pointer(tl.load(job), start, lane, tl.float32, 4, MASKED)
    if MODE != OVERWRITE:
        kept = _load(x, inside, MASKED)
        if MODE == BLEND:
            kept = kept * beta  # rounded on its own: the launch forbids fused multiply-add
        value = tl.where(source != 0, kept + value, kept)
    _store(x, value, inside, MASKED)
    if WEIGHT == BF16:
        weight = _pointer(tl.load(job + 3), start, lane, tl.uint16, 2, MASKED)
        _store(weight, _bfloat16_bits(value), inside, MASKED)
    elif WEIGHT == FP16:
        weight = _pointer(tl.load(job + 3), start, lane, tl.float16, 2, MASKED)
        _store(weight, value.to(tl.float16), inside, MASKED)
    if MOMENTS:
        for moment in tl.static_range(2):
            moment_value = _coarse_value(tl.load(job + 20 + moment), index, inside, divisors + 1 + moment, DIVIDE)
            _store(
                _pointer(tl.load(job + 18 + moment), start, lane, tl.float32, 4, MASKED), moment_value, inside, MASKED
            )


@triton.jit
def refine_kernel(
    jobs: tl.tensor,
    divisors: tl.tensor,
    tables: tl.tensor,
    owners: tl.tensor,
    beta: tl.tensor,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    MODE: tl.constexpr,
    DIVIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENTS: tl.constexpr,
) -> None:
    """One tile of one job.

    Args:
        jobs: int64 [jobs, 22]: x, elements, first tile, weight, rows, columns, width of z, the rows' closed form (4)
            and table, the columns' closed form (4) and table, z, exp_avg, exp_avg_sq, and what these two read. Tensors
            are addresses, 0 where there is none; tables are offsets into ``tables``, -1 where there is none.
        divisors: float32 [jobs, 3], of the weights and the two moments.
        tables: int32, the positions that have no closed form.
        owners: int32 [tiles], the job of each tile.
        beta: the factor of x.
        BLOCK: elements of a tile.
        COLS: how columns are found.
        WIDE: a row is at least as long as a tile.
        MODE: overwrite x, add to it, or scale it and add.
        DIVIDE: whether any divisor is not 1.
        WEIGHT: the type of the low-precision copy.
        MOMENTS: whether Adam's moments are written too.
    """
    tile = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + tile).to(tl.int64)
    job, divisor = jobs + owner * FIELDS, divisors + owner * 3
    address = tl.load(job)
    lead = address // 4 % 4  # elements between the 16-byte boundary and the block's first
    start = (tile - tl.load(job + 2)) * BLOCK - lead
    alike = True
    if WEIGHT != NO_WEIGHT:
        alike = tl.load(job + 3) // 2 % 4 == lead
    if MOMENTS:
        alike = alike & (tl.load(job + 18) // 4 % 4 == lead) & (tl.load(job + 19) // 4 % 4 == lead)
    if (start >= 0) & (start + BLOCK <= tl.load(job + 1)) & alike:
        _tile(start, job, divisor, tables, beta, BLOCK, COLS, WIDE, MODE, DIVIDE, WEIGHT, MOMENTS, False)
    else:
        _tile(start, job, divisor, tables, beta, BLOCK, COLS, WIDE, MODE, DIVIDE, WEIGHT, MOMENTS, True)


class Variant(NamedTuple):
    """What jobs have in common that one launch, and one compiled kernel, takes."""

    cols: int
    wide: bool
    divide: bool
    weight: int
    moments: bool


def launch_refine(jobs: Sequence[RefineJob], *, beta: float, block: int = BLOCK) -> None:
    """Refine checked, laid-out jobs with elements: one launch for each :class:`Variant` among them."""
    variants: dict[Variant, list[RefineJob]] = {}
    for job in jobs:
        variants.setdefault(variant_of(job, block), []).append(job)
    mode = {0.0: OVERWRITE, 1.0: ADD}.get(beta, BLEND).value
    for variant, alike in variants.items():
        table, divisors, tables, owners = (uploaded(t, jobs[0].x.device) for t in describe(alike, block))
        refine_kernel[(len(owners),)](
            table, divisors, tables, owners, beta, BLOCK=block, COLS=variant.cols, WIDE=variant.wide, MODE=mode,
            DIVIDE=variant.divide, WEIGHT=variant.weight, MOMENTS=variant.moments, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def describe(jobs: Sequence[RefineJob], block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's ``jobs``, ``divisors``, ``tables`` and ``owners`` on the host."""
    tables = Tables()
    owners, first = tile_owners([-(-(job.x.numel() + _lead(job)) // block) for job in jobs])
    rows = [_fields(job, tile, tables) for job, tile in zip(jobs, first, strict=True)]
    return torch.tensor(rows), torch.tensor([_divisors(job) for job in jobs]), tables.joined(), owners


def variant_of(job: RefineJob, block: int) -> Variant:
    """The variant that refines a job in tiles of ``block`` elements."""
    kinds = {None: NO_WEIGHT, torch.bfloat16: BF16, torch.float16: FP16}
    weight = kinds[None if job.weight is None else job.weight.dtype]
    return Variant(
        cols=column_kind(job.cols), wide=job.cols.count >= block, divide=any(d != 1 for d in _divisors(job)),
        weight=weight.value, moments=job.exp_avg is not None,
    )  # fmt: skip


def _fields(job: RefineJob, first_tile: int, tables: Tables) -> list[int]:
    z = sources(job)
    width = next((value.shape[1] for value in z if value is not None), 0)
    fields = [_address(job.x), job.x.numel(), first_tile, _address(job.weight), *job.x.shape, width]
    fields += [*closed_form(job.rows), tables.lookup(job.rows), *closed_form(job.cols), tables.lookup(job.cols)]
    moments = (None if moment is None else moment.x for moment in (job.exp_avg, job.exp_avg_sq))
    return fields + [_address(tensor) for tensor in (z[0], *moments, *z[1:])]


def _divisors(job: RefineJob) -> list[float]:
    moments: list[Moment | None] = [job.exp_avg, job.exp_avg_sq]
    return [job.divisor, *(1.0 if moment is None else moment.divisor for moment in moments)]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _lead(job: RefineJob) -> int:
    return job.x.data_ptr() // 4 % 4
