"""The specification of ``coalesce`` in plain torch, and what runs on a CPU.

A chunk of coarse rows is summed over its fine rows, layer after layer, in float64 in cache; the columns of the sum are
then added up and the total is written once. A sum starts from +0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ds_vcycle_kernels.chunks import Scratch, row_chunks
from ds_vcycle_kernels.jobs import CoalesceJob, Member
from ds_vcycle_kernels.positions import Positions, children, indices, runs, scattered
from ds_vcycle_kernels.roots import rounded_root


def coalesce_reference(job: CoalesceJob, *, scratch: Scratch | None = None) -> None:
    """Fill ``job.total``; see :class:`CoalesceJob`.

    Args:
        job: a checked job, laid out (:func:`~ds_vcycle_kernels.jobs.laid_out_sum`).
        scratch: float64 memory to work in.
    """
    if scratch is None:
        scratch = Scratch(torch.float64, job.total.device)
    if not job.members:
        job.total.zero_()
    alike = groupby(sorted(job.members, key=lambda m: id(m.cols)), key=lambda m: id(m.cols))
    for position, (_, group) in enumerate(alike):
        _sum(list(group), job.total, job.root, scratch, overwrite=position == 0)


def _sum(members: Sequence[Member], total: Tensor, root: bool, scratch: Scratch, *, overwrite: bool) -> None:
    """Add members whose columns lie alike."""
    cols = members[0].cols
    direct = overwrite and cols.identity and cols.count == total.shape[1]
    for first, last in row_chunks(members[0].rows, len(total), cols.count):
        target = total[first:last]
        rows_sum = target if direct else scratch.matrix("rows", last - first, cols.count)
        _sum_rows(members, rows_sum, first, root, scratch)
        if not overwrite:
            target.add_(_sum_cols(rows_sum, cols, scratch.matrix("cols", *target.shape)))
            continue
        if not direct:
            _sum_cols(rows_sum, cols, target)
        target.add_(0.0)  # -0 + 0 = +0: a sum that starts from zero


def _sum_rows(members: Iterable[Member], out: Tensor, first: int, root: bool, scratch: Scratch) -> None:
    """The sum over all fine rows that lie on the coarse rows from ``first`` on."""
    empty = True
    for values, begin, end in _contributions(members, first, first + len(out), root, scratch):
        target = out[begin - first : end - first].view(values[0].shape)
        if not empty or len(out) > end - begin:
            out = out.zero_() if empty else out
            values = [target, *values]
        if len(values) == 1:
            target.copy_(values[0])
        else:
            torch.add(values[0], values[1], out=target)
        for value in values[2:]:
            target.add_(value)
        empty = False
    if empty:
        out.zero_()
    for member in members:
        if scattered(member.rows):
            _add_scattered(member, out, first, root)


def _contributions(
    members: Iterable[Member], first: int, last: int, root: bool, scratch: Scratch
) -> Iterator[tuple[Sequence[Tensor], int, int]]:
    """Float64 summands, each [units, length, C], and the coarse rows, from begin to end, that they lie on."""
    for member in members:
        for run in () if scattered(member.rows) else runs(member.rows, first, last):
            fine = member.x[run.fine : run.fine_end]
            values = scratch.matrix("fine", *fine.shape).copy_(rounded_root(fine) if root else fine)
            summands = values.view(run.units, run.members, run.length, -1).unbind(1)
            yield summands, run.coarse, run.coarse_end


def _add_scattered(member: Member, out: Tensor, first: int, root: bool) -> None:
    order, ordered = children(member.rows)
    begin, end = torch.searchsorted(ordered, torch.tensor([first, first + len(out)])).tolist()
    values = member.x.index_select(0, order[begin:end].to(out.device))
    places = (ordered[begin:end] - first).to(out.device)
    out.index_add_(0, places, (rounded_root(values) if root else values).double())


def _sum_cols(x_rC: Tensor, cols: Positions, out_rc: Tensor) -> Tensor:
    """Write the sums of the columns that share a position to ``out_rc``; positions without a column get zero."""
    if not cols.whole:
        places = indices(cols).to(x_rC.device).expand(x_rC.shape)
        return out_rc.zero_().scatter_add_(1, places, x_rC)
    covered = cols.count // cols.members
    out_rc[:, covered:].zero_()
    out = out_rc[:, :covered].view(len(out_rc), -1, cols.span)
    fine = x_rC.view(len(x_rC), -1, cols.members, cols.span)
    if cols.members == 1:
        out.copy_(fine[:, :, 0])
    else:
        torch.add(fine[:, :, 0], fine[:, :, 1], out=out)
    for index in range(2, cols.members):
        out.add_(fine[:, :, index])
    return out_rc
