"""What a launch works on: blocks of fine fragments, the coarse rectangles they lie on, and the checks of both.

Shape suffixes: ``x_RC`` fine rows and columns, ``z_rc`` coarse rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_vcycle_kernels.positions import Positions, bounds

Implementation = Literal["auto", "triton", "torch"]

WEIGHT_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moment:
    """An Adam moment that is overwritten: x[i, j] <- z[rows[i], cols[j]] / divisor, or zero where ``z`` is None."""

    x: Tensor
    z: Tensor | None = None
    divisor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RefineJob:
    """One block to refine: x[i, j] <- beta x[i, j] + z[rows[i], cols[j]] / divisor.

    Attributes:
        x: fine values, float32 [R, C], contiguous from any element of a fragment on; written in place.
        z: coarse values, float32 [r, c], contiguous; None means zero (policy ``first``).
        rows: coarse row of each of the R fine rows.
        cols: coarse column of each of the C fine columns.
        divisor: a float32 number; 1 divides nothing.
        weight: the low-precision copy, bfloat16 or float16 of R * C elements, contiguous; gets x rounded to nearest
            even.
        exp_avg: Adam's first moment over the same block, float32 [R, C].
        exp_avg_sq: Adam's second moment; given if and only if ``exp_avg`` is.
    """

    x: Tensor
    z: Tensor | None
    rows: Positions
    cols: Positions
    divisor: float = 1.0
    weight: Tensor | None = None
    exp_avg: Moment | None = None
    exp_avg_sq: Moment | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Member:
    """A fine block that is summed: float32 [R, C], contiguous, its rows and columns lie at ``rows`` and ``cols``."""

    x: Tensor
    rows: Positions
    cols: Positions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CoalesceJob:
    """One coarse rectangle to sum up: total[p, q] = sum of x[i, j] over all members with rows[i] = p and cols[j] = q.

    Attributes:
        members: the fine blocks; none at all gives zero.
        total: float64 [r, c], contiguous; overwritten.
        root: sum the square roots instead, rounded to float32 (second moments).
    """

    members: Sequence[Member]
    total: Tensor
    root: bool = False


def laid_out(job: RefineJob) -> RefineJob:
    """The job with its long dim as columns: a vector is a single row. What reads no coarse value needs no positions."""
    given = [z for z in sources(job) if z is not None]
    rows, cols = job.x.shape
    if cols == 1 and all(z.shape[1] == 1 for z in given):
        at_rows, at_cols, shape = Positions(count=1), job.rows, (1, rows)
    else:
        at_rows, at_cols, shape = job.rows, job.cols, (rows, cols)
    if not given:
        at_rows, at_cols = Positions(count=shape[0]), Positions(count=shape[1])
    if at_rows is job.rows and at_cols is job.cols:
        return job
    return RefineJob(
        x=job.x.view(shape), z=_lying(job.z, shape), rows=at_rows, cols=at_cols, divisor=job.divisor,
        weight=job.weight, exp_avg=_lying_moment(job.exp_avg, shape), exp_avg_sq=_lying_moment(job.exp_avg_sq, shape),
    )  # fmt: skip


def laid_out_sum(job: CoalesceJob) -> CoalesceJob:
    """The job with its long dim as columns: vectors are single rows."""
    if job.total.shape[1] > 1 or any(member.x.shape[1] > 1 for member in job.members):
        return job
    one = Positions(count=1)
    members = [Member(x=member.x.view(1, -1), rows=one, cols=member.rows) for member in job.members]
    return CoalesceJob(members=members, total=job.total.view(1, -1), root=job.root)


def sources(job: RefineJob) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The coarse values of the weights and of the two moments."""
    first, second = job.exp_avg, job.exp_avg_sq
    return job.z, None if first is None else first.z, None if second is None else second.z


def check_refine(job: RefineJob) -> None:
    """Refuse a job that would read or write outside its tensors.

    Raises:
        ValueError: a dtype, device, shape, layout or position that does not fit.
    """
    _check_tensor("x", job.x, torch.float32, None, job.x.device)
    _check_map("x", job.x, job.rows, job.cols)
    if (job.exp_avg is None) != (job.exp_avg_sq is None):
        raise ValueError("refine: exp_avg and exp_avg_sq are given together or not at all")
    if len({z.shape for z in sources(job) if z is not None}) > 1:
        raise ValueError("refine: the coarse values of a job and of its moments have unlike shapes")
    _check_source("z", job, job.z, job.divisor)
    for name, moment in (("exp_avg", job.exp_avg), ("exp_avg_sq", job.exp_avg_sq)):
        if moment is not None:
            _check_tensor(name, moment.x, torch.float32, job.x.shape, job.x.device)
            _check_source(f"{name}.z", job, moment.z, moment.divisor)
    if job.weight is not None:
        if job.weight.dtype not in WEIGHT_DTYPES or job.weight.numel() != job.x.numel():
            raise ValueError(
                f"refine: weight is {job.weight.dtype} of {job.weight.numel()} elements; give bfloat16 or float16 of "
                f"{job.x.numel()}"
            )
        _check_tensor("weight", job.weight, job.weight.dtype, None, job.x.device)


def check_coalesce(job: CoalesceJob) -> None:
    """Refuse a job that would read or write outside its tensors.

    Raises:
        ValueError: a dtype, device, shape, layout or position that does not fit.
    """
    _check_tensor("total", job.total, torch.float64, None, job.total.device)
    if job.total.dim() != 2:
        raise ValueError(f"coalesce: total has {job.total.dim()} dims; give [rows, columns]")
    for member in job.members:
        _check_tensor("x", member.x, torch.float32, None, job.total.device)
        _check_map("x", member.x, member.rows, member.cols)
        _check_range("x", member.rows, member.cols, job.total)


def _lying(z: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    return z if z is None or shape[0] > 1 else z.view(1, -1)


def _lying_moment(moment: Moment | None, shape: tuple[int, int]) -> Moment | None:
    if moment is None:
        return None
    return Moment(x=moment.x.view(shape), z=_lying(moment.z, shape), divisor=moment.divisor)


def _check_source(name: str, job: RefineJob, z: Tensor | None, divisor: float) -> None:
    if z is None:
        return
    _check_tensor(name, z, torch.float32, None, job.x.device)
    if z.dim() != 2:
        raise ValueError(f"refine: {name} has {z.dim()} dims; give [rows, columns]")
    if divisor == 0:
        raise ValueError(f"refine: the divisor of {name} is 0; leave {name} out where it adds nothing")
    _check_range(name, job.rows, job.cols, z)


def _check_map(name: str, x: Tensor, rows: Positions, cols: Positions) -> None:
    if x.shape != (rows.count, cols.count):
        raise ValueError(f"{name} is {list(x.shape)}; its positions are for [{rows.count}, {cols.count}]")


def _check_range(name: str, rows: Positions, cols: Positions, coarse: Tensor) -> None:
    for rule, extent, word in ((rows, coarse.shape[0], "rows"), (cols, coarse.shape[1], "columns")):
        least, most = bounds(rule)
        if least < 0 or most >= extent:
            raise ValueError(f"{name}: positions {least}..{most} lie outside the {extent} coarse {word}")


def _check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: torch.Size | None, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}; give {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the rest of its job is on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()} for {list(tensor.shape)}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; give {list(shape)}")
