"""Refine many blocks at once: x <- beta x + z[rows][:, cols] / divisor, in place, one pass over each fragment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_vcycle_kernels.chunks import Scratch
from ds_vcycle_kernels.implementation import resolve
from ds_vcycle_kernels.jobs import Implementation, RefineJob, check_refine, laid_out
from ds_vcycle_kernels.refine_reference import refine_reference


def refine(jobs: Sequence[RefineJob], *, beta: float, implementation: Implementation = "auto") -> None:
    """Refine blocks in place; see :class:`RefineJob`. The bits do not depend on the implementation.

    Args:
        jobs: blocks on one device that do not overlap; those without elements are passed over.
        beta: the factor of what ``x`` holds, rounded to float32; 0 overwrites without reading, 1 keeps its bits.
        implementation: ``triton`` for a GPU (one launch for each kind of job; also under ``TRITON_INTERPRET=1``),
            ``torch`` anywhere, ``auto`` for triton where tensors are on a GPU and it is installed.

    Raises:
        ValueError: a job's tensors do not fit each other, or triton is asked for where it cannot run.
    """
    jobs = [job for job in jobs if job.x.numel() > 0]
    if not jobs:
        return
    for job in jobs:
        check_refine(job)
    device = jobs[0].x.device
    if any(job.x.device != device for job in jobs):
        raise ValueError("refine: the jobs of one call are on one device")
    jobs = [laid_out(job) for job in jobs]
    if resolve(implementation, device) == "triton":
        from ds_vcycle_kernels.refine_triton import launch_refine

        launch_refine(jobs, beta=beta)
        return
    scratch = Scratch(torch.float32, device)
    for job in jobs:
        refine_reference(job, beta=beta, scratch=scratch)
