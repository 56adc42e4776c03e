"""Initial weights that do not depend on the tensor-parallel degree, the vocabulary's padding or the order of layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from ds_vcycle.schema import Parameter


def initial_slice(
    parameter: Parameter, *, seed: int, std: float, layers: int, tp_size: int, tp_rank: int
) -> torch.Tensor:
    """The fp32 slice of one parameter that one tensor-parallel rank holds.

    Weights are normal with deviation ``std``, in pre-LN models the residual writers' divided by sqrt(2 x layers)
    (GPT-2's rule); norm weights are 1; biases and pad rows 0. The numbers are drawn over the global shape without
    padding, from a generator of (seed, parameter name), then sliced.
    """
    real = tuple(dim.real for dim in parameter.dims)
    whole = torch.zeros(parameter.shape)
    inner = whole[tuple(slice(0, size) for size in real)]
    if parameter.initial == "one":
        inner.fill_(1)
    elif parameter.initial != "zero":
        scale = std / math.sqrt(2 * layers) if parameter.initial == "scaled_normal" else std
        inner.copy_(torch.randn(real, generator=generator_of(seed, parameter.name)).mul_(scale))
    for dim in range(whole.dim()):
        ranges = parameter.global_ranges(dim, tp_size, tp_rank)
        whole = torch.cat([whole.narrow(dim, start, end - start) for start, end in ranges], dim=dim)
    return whole


def fill_initial(
    module: torch.nn.Module,
    table: Iterable[Parameter],
    *,
    seed: int,
    std: float,
    layers: int,
    tp_size: int,
    tp_rank: int,
) -> None:
    """Write :func:`initial_slice` into every parameter of a built level."""
    named = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in table:
            value = initial_slice(parameter, seed=seed, std=std, layers=layers, tp_size=tp_size, tp_rank=tp_rank)
            named[parameter.name].copy_(value)


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator that depends on the seed and a name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
