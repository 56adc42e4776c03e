"""Which implementation runs: Triton needs a GPU, or its interpreter; torch runs anywhere."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from ds_vcycle_kernels.jobs import Implementation


def resolve(implementation: Implementation, device: torch.device) -> Literal["triton", "torch"]:
    """The implementation that ``implementation`` stands for on tensors of ``device``.

    Raises:
        ValueError: ``triton`` where it is not installed, or on a device that it has no compiler for.
    """
    if implementation == "torch":
        return "torch"
    gpu = device.type == "cuda"
    if implementation == "auto":
        return "triton" if gpu and triton_installed() else "torch"
    if not triton_installed():
        raise ValueError("kernels: triton is not installed; install the gpu extra, or choose auto or torch")
    if not gpu and not interpreting():
        raise ValueError(
            f"kernels: triton has no compiler for {device.type} tensors; choose auto or torch, or set "
            f"TRITON_INTERPRET=1 to run it in its interpreter"
        )
    return "triton"


@lru_cache(maxsize=1)
def triton_installed() -> bool:
    """Whether triton can be imported."""
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Whether triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
