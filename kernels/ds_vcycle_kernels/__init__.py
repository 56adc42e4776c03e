"""Kernels of the transitions: refine and coalesce on many fragments at once. Imports torch, and triton only where used.

Every kernel has a plain-torch reference that is its specification and what runs on a CPU.
"""

from ds_vcycle_kernels.coalesce import coalesce
from ds_vcycle_kernels.jobs import CoalesceJob, Implementation, Member, Moment, RefineJob
from ds_vcycle_kernels.positions import Positions, positions
from ds_vcycle_kernels.refine import refine
from ds_vcycle_kernels.roots import rounded_root

__all__ = [
    "CoalesceJob",
    "Implementation",
    "Member",
    "Moment",
    "Positions",
    "RefineJob",
    "coalesce",
    "positions",
    "refine",
    "rounded_root",
]
