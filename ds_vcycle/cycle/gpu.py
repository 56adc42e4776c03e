"""A GPU as far as a plan needs it: peak speed and memory. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ds_vcycle.config import Precision, UserError

RESERVE = 0.1  # of the memory: CUDA's context, NCCL's buffers, gaps of the allocator
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """``bf16_flops``, ``fp32_flops``: peak of dense matrix products a second, fp32 without TF32 (torch's default)."""

    name: str
    bf16_flops: float
    fp32_flops: float
    memory_bytes: int

    @property
    def usable(self) -> int:
        """What a level's peak may take of the memory."""
        return int(self.memory_bytes * (1 - RESERVE))

    def peak(self, precision: Precision) -> float:
        """FLOPs a second at a precision."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


# From the makers' data sheets, SXM forms, dense.
_KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="A100", bf16_flops=312e12, fp32_flops=19.5e12, memory_bytes=80 * 10**9),
        Gpu(name="A100-40GB", bf16_flops=312e12, fp32_flops=19.5e12, memory_bytes=40 * 10**9),
        Gpu(name="H100", bf16_flops=989e12, fp32_flops=67e12, memory_bytes=80 * 10**9),
        Gpu(name="H200", bf16_flops=989e12, fp32_flops=67e12, memory_bytes=141 * 10**9),
    )
}


def gpu_of(speed: str, memory: str | None) -> Gpu:
    """The GPU that ``--peak-flops`` (a name or a number) and ``--gpu-memory`` (its own by default) describe.

    Raises:
        UserError: neither a known name nor a number; or no size of memory.
    """
    known = {name.lower(): gpu for name, gpu in _KNOWN.items()}.get(speed.lower())
    if known is None:
        flops = _number(speed)
        if flops is None or flops <= 0:
            raise UserError(
                f"--peak-flops {speed}: neither FLOPs a second (312e12) nor one of {', '.join(_KNOWN)}; give one"
            )
        known = Gpu(name="GPU", bf16_flops=flops, fp32_flops=flops, memory_bytes=80 * 10**9)
    return known if memory is None else replace(known, memory_bytes=memory_of(memory))


def memory_of(text: str) -> int:
    """Bytes of ``80GB``, ``80GiB`` or ``8e10`` (raises :class:`UserError`)."""
    match = re.fullmatch(r"\s*([\d.e+]+?)\s*([KMGT]I?)?B?\s*", text.upper().replace("E", "e"))
    number = _number(match[1]) if match else None
    if match is None or number is None or number <= 0:
        raise UserError(f"--gpu-memory {text}: no size of memory; give one like 80GB or 80GiB")
    return int(number * _UNITS[match[2] or ""])


def shares_of(text: str) -> tuple[float, ...]:
    """Shares of the peak of ``0.4`` or, for each level, ``0.45,0.3`` (raises :class:`UserError`)."""
    shares = [_number(part) for part in text.split(",")]
    if not all(share is not None and 0 < share <= 1 for share in shares):
        raise UserError(f"--mfu {text}: expected a share above 0 and at most 1, or one for each level: 0.45,0.3")
    return tuple(share for share in shares if share is not None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
