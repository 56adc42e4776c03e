"""Coalesce many blocks at once: float64 sums of the fine elements on each coarse one, without atomics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_vcycle_kernels.chunks import Scratch
from ds_vcycle_kernels.coalesce_reference import coalesce_reference
from ds_vcycle_kernels.implementation import resolve
from ds_vcycle_kernels.jobs import CoalesceJob, Implementation, check_coalesce, laid_out_sum


def coalesce(jobs: Sequence[CoalesceJob], *, implementation: Implementation = "auto") -> None:
    """Fill the totals of coarse rectangles; see :class:`CoalesceJob`.

    Sums are exact, and so the same in any order, as long as the values of a group lie within a factor of 2^26.

    Args:
        jobs: rectangles on one device; those without coarse elements are passed over.
        implementation: as in :func:`ds_vcycle_kernels.refine`.

    Raises:
        ValueError: a job's tensors do not fit each other, or triton is asked for where it cannot run.
    """
    jobs = [job for job in jobs if job.total.numel() > 0]
    if not jobs:
        return
    for job in jobs:
        check_coalesce(job)
    device = jobs[0].total.device
    if any(job.total.device != device for job in jobs):
        raise ValueError("coalesce: the jobs of one call are on one device")
    jobs = [laid_out_sum(job) for job in jobs]
    if resolve(implementation, device) == "triton":
        from ds_vcycle_kernels.coalesce_triton import launch_coalesce

        launch_coalesce(jobs)
        return
    scratch = Scratch(torch.float64, device)
    for job in jobs:
        coalesce_reference(job, scratch=scratch)
