"""Which implementation runs: Triton needs a GPU, or its interpreter; torch runs anywhere."""

from __future__ import annotations

from typing import Literal

import torch

from ds_vcycle_kernels.jobs import Implementation


def resolve(implementation: Implementation, device: torch.device) -> Literal["triton", "torch"]:
    """The implementation that ``implementation`` stands for on tensors of ``device``.

    Raises:
        ValueError: ``triton`` where it is not installed, or on a device that it has no compiler for.
    """
    if implementation == "triton":
        raise ValueError(f"kernels: triton cannot run on {device.type} tensors yet; choose auto or torch")
    return "torch"
