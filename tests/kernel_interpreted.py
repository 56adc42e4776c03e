"""Run under TRITON_INTERPRET=1, in a process of its own: the Triton kernels against the references, bit for bit.

Every line of the kernels must have run by the end, so that no branch is left out.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import triton
from ds_vcycle_kernels import CoalesceJob, RefineJob, coalesce, coalesce_triton, refine, refine_triton
from torch import Tensor

from tests.kernel_cases import GROUPINGS, Case, case, parents, refined, summed, window
from tests.kernel_far import check_far_elements
from tests.kernel_transitions import check_transitions

DTYPES = (None, torch.bfloat16, torch.float16)


def blocks() -> list[Case]:
    """Each grouping of rows with three of columns, and of columns with three of rows; starts off 16 bytes; cut rows."""
    generator = random.Random(5)
    found = []
    for number, shift in itertools.product(range(len(GROUPINGS)), range(3)):
        rows, cols = GROUPINGS[number], GROUPINGS[(number + 2 * shift) % len(GROUPINGS)]
        cut = window(parents(rows, 24, generator), *((5, 18) if shift == 1 else (0, 24)))
        found.append(case(cut, window(parents(cols, 48 if shift == 2 else 24, generator), 0, 24), (number + shift) % 4))
    stacked = window(parents("stack", 24, generator), 0, 24)
    found.append(case(stacked, stacked, 0))  # runs of whole vectors, all aligned
    one = window(torch.zeros(1, dtype=torch.int64), 0, 1)
    for number, size in enumerate((1, 31, 1023, 4097)):
        wide = window(torch.arange(size) // 2, 0, size)
        found += [case(one, wide, number), case(wide, one, 3 - number)]
    return found


def check_refine(found: Sequence[Case]) -> None:
    """Every factor of x with every divisor and low-precision copy, each on a third of the blocks."""
    for number, (beta, divisor, dtype) in enumerate(itertools.product((0.0, 0.3, 1.0), (1.0, 3.0), DTYPES)):
        a, b = (
            [
                refined(block, beta=beta, divisor=divisor, dtype=dtype, moments=number % 2 == 0)
                for block in found[number % 6 :: 6]
            ]
            for _ in range(2)
        )
        refine(a, beta=beta, implementation="torch")
        refine(b, beta=beta, implementation="triton")
        _same_jobs(a, b)


def check_tiles() -> None:
    """Tiles shorter than a row and vector tiles among masked ones, each way of finding columns, at each alignment."""
    generator = random.Random(7)
    for start, grouping in enumerate(("adjacent", "heads", "explicit", "identity")):
        cols = window(parents(grouping, 48, generator), 0, 48)
        block = case(window(torch.arange(5) // 2, 0, 5), cols, start)
        a, b = ([refined(block, beta=0.3, divisor=3.0, dtype=torch.bfloat16, moments=True)] for _ in range(2))
        if start == 3:  # no coarse value: only the factor, and moments of zero
            a, b = ([replace(job, z=None) for job in jobs] for jobs in (a, b))
        refine(a, beta=0.3, implementation="torch")
        refine_triton.launch_refine(b, beta=0.3, block=16)
        _same_jobs(a, b)


def check_coalesce(found: Sequence[Case]) -> None:
    """Sums, and sums of roots; wide rectangles in tiles of a single row too."""
    for root in (False, True):
        a, b = ([summed(block, root=root) for block in found[root :: 4 if root else 2]] for _ in range(2))
        coalesce(a, implementation="torch")
        coalesce(b, implementation="triton")
        _same_totals(a, b)
    wide = [block for block in found[:18] if block.shape[1] >= 8][::9]
    a, b = ([summed(block, root=False) for block in wide] for _ in range(2))
    coalesce(a, implementation="torch")
    coalesce_triton.launch_coalesce(b, block=16)
    _same_totals(a, b)
    empty = CoalesceJob(members=[], total=torch.ones(2, 3, dtype=torch.float64))
    coalesce([empty], implementation="triton")
    assert not empty.total.any()


@contextmanager
def every_line_runs(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Raise if a line of a kernel in the modules was not reached. The interpreter keeps files and line numbers."""
    files = {module.__file__ for module in modules}
    seen: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename in files else None)
    try:
        yield
    finally:
        sys.settrace(None)
    missed = [place for module in modules for place in sorted(_kernel_lines(module) - seen)]
    assert not missed, f"kernel lines that never ran: {missed}"


def _kernel_lines(module: ModuleType) -> set[tuple[str, int]]:
    """The lines with code of all functions that Triton compiles, but for their ``def``."""
    found: set[tuple[str, int]] = set()
    for value in vars(module).values():
        if isinstance(value, triton.runtime.interpreter.InterpretedFunction) and value.fn.__module__ == module.__name__:
            code: CodeType = value.rewrite().__code__
            found |= {(code.co_filename, at) for _, _, at in code.co_lines() if at and at > code.co_firstlineno}
    return found


def _same_jobs(expected: Sequence[RefineJob], found: Sequence[RefineJob]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert all(_same(p, q) for p, q in zip(_written(a), _written(b), strict=True)), (a.rows, a.cols)


def _same_totals(expected: Sequence[CoalesceJob], found: Sequence[CoalesceJob]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.total, b.total), (a.total.shape, a.members[0].rows, a.members[0].cols)


def _written(job: RefineJob) -> list[Tensor]:
    moments = [moment.x for moment in (job.exp_avg, job.exp_avg_sq) if moment is not None]
    return [job.x, *moments, *([] if job.weight is None else [job.weight])]


def _same(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with every_line_runs([refine_triton, coalesce_triton]):
        found = blocks()
        check_refine(found)
        check_tiles()
        check_coalesce(found)
    check_far_elements()
    check_transitions()
    print("equal")
