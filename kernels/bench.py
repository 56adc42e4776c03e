"""How fast ``refine`` and ``coalesce`` are, as a share of the device's own copy, in the same run.

``python kernels/bench.py`` (``make bench-kernels``): on a GPU the Triton kernels beside eager torch and torch.compile
of the same expression, on a CPU the references beside eager torch. Fragments are halved in both dims by
adjacent groups.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from ds_vcycle_kernels import CoalesceJob, Member, RefineJob, coalesce, positions, refine
from torch import Tensor

BETA, DIVISOR = 0.25, 2.0
SHAPES = {"1 x 16 MB": (1, 2048, 2048), "1 x 64 MB": (1, 4096, 4096), "1000 x 64 KB": (1000, 128, 128)}
BYTES = {"refine": 8 + 4 / 4, "coalesce": 4 + 8 / 4}
"""Moved per fine element, from the algorithm, where four fine elements lie on each coarse one."""


class Row(NamedTuple):
    """One line of the table; seconds are the median of the rounds."""

    kernel: str
    fragments: str
    what: str
    seconds: float
    copy_seconds: float
    elements: int

    @property
    def cells(self) -> list[str]:
        """The line's cells: GB/s and its share of the copy's, bytes per element from the algorithm and measured."""
        rate = BYTES[self.kernel] * self.elements / self.seconds
        copy_rate = 8 * self.elements / self.copy_seconds
        moved = f"{self.seconds * copy_rate / self.elements:.1f}"  # what a copy moves in the same time
        numbers = [f"{rate / 1e9:.2f}", f"{rate / copy_rate:.2f}", f"{BYTES[self.kernel]:.1f}", moved]
        return [self.kernel, self.fragments, self.what, *numbers]


def eager_refine(x_RC: Tensor, z_rc: Tensor) -> None:
    """The expression of ``refine`` as one would write it."""
    x_RC.mul_(BETA).add_((z_rc / DIVISOR).repeat_interleave(2, 0).repeat_interleave(2, 1))


def eager_coalesce(x_RC: Tensor, total_rc: Tensor) -> None:
    """The expression of ``coalesce`` as one would write it."""
    rows, cols = total_rc.shape
    total_rc.copy_(x_RC.view(rows, 2, cols, 2).double().sum((1, 3)))


def seconds_of(works: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each, taken in turns after one round to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            _wait(device)
            start = time.perf_counter()
            work()
            _wait(device)
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in taken.items()}


def measure(fragments: str, device: torch.device, rounds: int) -> list[Row]:
    """Both kernels on one set of fragments."""
    count, rows, cols = SHAPES[fragments]
    at_rows, at_cols = positions(torch.arange(rows) // 2), positions(torch.arange(cols) // 2)
    flat = torch.randn(count * rows * cols, device=device)
    xs = list(flat.view(count, rows, cols))
    zs = list(torch.randn(count, rows // 2, cols // 2, device=device))
    totals = list(torch.empty(count, rows // 2, cols // 2, dtype=torch.float64, device=device))
    up = [RefineJob(x=x, z=z, rows=at_rows, cols=at_cols, divisor=DIVISOR) for x, z in zip(xs, zs)]
    members = [[Member(x=x, rows=at_rows, cols=at_cols)] for x in xs]
    down = [CoalesceJob(members=found, total=total) for found, total in zip(members, totals)]
    other = torch.empty_like(flat)
    own = "triton" if device.type == "cuda" else "reference"
    found = []
    for kernel, launch, eager, seconds in (
        ("refine", lambda: refine(up, beta=BETA), eager_refine, zs),
        ("coalesce", lambda: coalesce(down), eager_coalesce, totals),
    ):
        forms = {"eager": eager} | ({"torch.compile": torch.compile(eager)} if device.type == "cuda" else {})
        works = {"copy": lambda: other.copy_(flat), own: launch}
        works |= {name: _on_each(form, xs, seconds) for name, form in forms.items()}
        took = seconds_of(works, device, rounds)
        copied = took.pop("copy")
        found += [Row(kernel, fragments, what, value, copied, flat.numel()) for what, value in took.items()]
    return found


def _on_each(form: Callable[[Tensor, Tensor], None], xs: list[Tensor], others: list[Tensor]) -> Callable[[], None]:
    def work() -> None:
        for x, other in zip(xs, others, strict=True):
            form(x, other)

    return work


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--fragments", choices=SHAPES, action="append", help="these only; may be given again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"{name}; float32, halved in both dims; medians of {options.rounds} rounds")
    heading = ["kernel", "fragments", "what", "GB/s", "/ copy", "bytes / element", "as measured"]
    print(f"| {' | '.join(heading)} |\n| {' | '.join(['---'] * 3 + ['---:'] * 4)} |")
    for fragments in options.fragments or SHAPES:
        for row in measure(fragments, device, options.rounds):
            print(f"| {' | '.join(row.cells)} |", flush=True)


if __name__ == "__main__":
    main()
