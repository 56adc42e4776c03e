"""The specification of ``refine`` in plain torch, and what runs on a CPU.

A chunk of coarse rows is divided and expanded to fine columns once, in cache; all fine rows that lie on it are then
blended with it, in order, by strided views. Product and sum are rounded apart: no fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_vcycle_kernels.chunks import Scratch, chunk_elements, row_chunks
from ds_vcycle_kernels.jobs import Moment, RefineJob
from ds_vcycle_kernels.positions import Positions, indices, runs, scattered


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """One of a job's tensors: ``x`` [R, C] <- beta x + ``z`` [r, c] / divisor, then copied to ``weight`` [R, C]."""

    x: Tensor
    z: Tensor
    rows: Positions
    cols: Positions
    divisor: float
    beta: float
    weight: Tensor | None


def refine_reference(job: RefineJob, *, beta: float, scratch: Scratch | None = None) -> None:
    """Refine one block in place; see :class:`RefineJob`.

    Args:
        job: a checked job, laid out (:func:`~ds_vcycle_kernels.jobs.laid_out`).
        beta: the factor of what ``x`` holds; 0 overwrites and does not read, 1 keeps its bits.
        scratch: float32 memory to work in.
    """
    if scratch is None:
        scratch = Scratch(torch.float32, job.x.device)
    _refine(job, Moment(x=job.x, z=job.z, divisor=job.divisor), beta, job.weight, scratch)
    for moment in (job.exp_avg, job.exp_avg_sq):
        if moment is not None:
            _refine(job, moment, 0.0, None, scratch)


def _refine(job: RefineJob, target: Moment, beta: float, weight: Tensor | None, scratch: Scratch) -> None:
    if target.z is None:
        _fade(target.x, beta, weight)
        return
    work = _Pass(
        x=target.x, z=target.z, rows=job.rows, cols=job.cols, divisor=target.divisor, beta=beta,
        weight=None if weight is None else weight.view_as(target.x),
    )  # fmt: skip
    if scattered(work.rows):
        _refine_scattered(work, scratch)
    else:
        _refine_runs(work, scratch)


def _fade(x: Tensor, beta: float, weight: Tensor | None) -> None:
    """No coarse value: x <- beta x."""
    for piece in _flat_chunks(x.numel()):
        target = x.view(-1)[piece]
        _blend_(target, None, beta)
        if weight is not None:
            weight.view(-1)[piece].copy_(target)


def _refine_runs(work: _Pass, scratch: Scratch) -> None:
    width = work.x.shape[1]
    for first, last in row_chunks(work.rows, len(work.z), width):
        value = _expanded(work.z[first:last], work.cols, work.divisor, scratch)
        for run in runs(work.rows, first, last):
            shape = (run.units, run.members, run.length, width)
            source = value[run.coarse - first : run.coarse_end - first].view(run.units, 1, run.length, width)
            target = work.x[run.fine : run.fine_end].view(shape)
            _blend_(target, source, work.beta)
            if work.weight is not None:
                work.weight[run.fine : run.fine_end].view(shape).copy_(target)


def _refine_scattered(work: _Pass, scratch: Scratch) -> None:
    table = indices(work.rows).to(work.x.device)
    step = max(1, chunk_elements() // work.x.shape[1])
    for first in range(0, len(work.x), step):
        chosen = work.z.index_select(0, table[first : first + step])
        target = work.x[first : first + step]
        _blend_(target, _expanded(chosen, work.cols, work.divisor, scratch), work.beta)
        if work.weight is not None:
            work.weight[first : first + step].copy_(target)


def _expanded(z_rc: Tensor, cols: Positions, divisor: float, scratch: Scratch) -> Tensor:
    """z / divisor with each column at its fine places: [r, C], valid until ``scratch`` is used again."""
    if divisor != 1.0:
        z_rc = torch.div(z_rc, divisor, out=scratch.matrix("divided", *z_rc.shape))
    if cols.whole:
        z_rc = z_rc[:, : cols.count // cols.members]
        if cols.members == 1:
            return z_rc.contiguous()
    out = scratch.matrix("expanded", len(z_rc), cols.count)
    if cols.whole and cols.span == 1 and cols.members in (2, 4):
        _repeat_each(z_rc, out, cols.members)
    elif cols.whole and cols.span >= 16:
        grouped = out.view(len(z_rc), -1, cols.members, cols.span)
        grouped.copy_(z_rc.reshape(len(z_rc), -1, 1, cols.span))
    else:
        torch.index_select(z_rc, 1, indices(cols).to(z_rc.device), out=out)
    return out


def _repeat_each(z_rc: Tensor, out: Tensor, members: int) -> None:
    """Each value twice, or four times, in a row. As the two halves of a complex number, which is several times faster
    than a strided copy; a pair of float32 as one float64, of which nothing but its bits is used, makes four."""
    rows, cols = z_rc.shape
    if members == 2:
        torch.complex(z_rc, z_rc, out=torch.view_as_complex(out.view(rows, cols, 2)))
        return
    pairs = torch.complex(z_rc, z_rc).view(torch.float64)
    torch.complex(pairs, pairs, out=torch.view_as_complex(out.view(torch.float64).view(rows, cols, 2)))


def _blend_(x: Tensor, value: Tensor | None, beta: float) -> None:
    if beta == 0.0:
        x.zero_() if value is None else x.copy_(value)
        return
    if beta != 1.0:
        x.mul_(beta)
    if value is not None:
        x.add_(value)


def _flat_chunks(count: int) -> Iterator[slice]:
    step = chunk_elements()
    return (slice(first, first + step) for first in range(0, count, step))
