"""Run under TRITON_INTERPRET=1, in a process of its own: the Triton kernels against the references, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from ds_vcycle_kernels import CoalesceJob, RefineJob, coalesce, refine
from ds_vcycle_kernels.coalesce_triton import launch_coalesce
from ds_vcycle_kernels.refine_triton import launch_refine
from torch import Tensor

from tests.kernel_cases import GROUPINGS, Case, case, parents, refined, summed, window

DTYPES = (None, torch.bfloat16, torch.float16)


def blocks() -> list[Case]:
    generator = random.Random(5)
    found = []
    for number, (rows, cols) in enumerate(itertools.product(GROUPINGS, GROUPINGS)):
        cut = window(parents(rows, 24, generator), *((0, 24) if number % 2 else (5, 18)))
        found.append(case(cut, window(parents(cols, 24 if number % 3 else 48, generator), 0, 24), number % 4))
    one = window(torch.zeros(1, dtype=torch.int64), 0, 1)
    for number, size in enumerate((1, 31, 1023, 4097)):
        wide = window(torch.arange(size) // 2, 0, size)
        found += [case(one, wide, number), case(wide, one, 3 - number)]
    return found


def check_refine(found: Sequence[Case]) -> None:
    for number, (beta, divisor, dtype) in enumerate(itertools.product((0.0, 0.3, 1.0), (1.0, 3.0), DTYPES)):
        expected, actual = (
            [
                refined(block, beta=beta, divisor=divisor, dtype=dtype, moments=number % 2 == 0)
                for block in found[number % 3 :: 3]
            ]
            for _ in range(2)
        )
        refine(expected, beta=beta, implementation="torch")
        refine(actual, beta=beta, implementation="triton")
        launch_refine([], beta=beta)
        for a, b in zip(expected, actual, strict=True):
            assert all(same(p, q) for p, q in zip(written(a), written(b), strict=True)), (number, a.x.shape)


def check_tiles(block: Case) -> None:
    """Tiles shorter than a row, and vector tiles among masked ones, at each alignment."""
    a, b = (refined(block, beta=0.3, divisor=3.0, dtype=torch.bfloat16, moments=True) for _ in range(2))
    refine([a], beta=0.3, implementation="torch")
    launch_refine([b], beta=0.3, block=16)
    assert all(same(p, q) for p, q in zip(written(a), written(b), strict=True))


def check_coalesce(found: Sequence[Case]) -> None:
    for root in (False, True):
        jobs = [[summed(block, root=root) for block in (found[1::3] if root else found)] for _ in range(2)]
        coalesce(jobs[0], implementation="torch")
        coalesce(jobs[1], implementation="triton")
        launch_coalesce([])
        for a, b in zip(*jobs, strict=True):
            assert torch.equal(a.total, b.total), a.total.shape
    empty = CoalesceJob(members=[], total=torch.ones(2, 3, dtype=torch.float64))
    coalesce([empty], implementation="triton")
    assert not empty.total.any()


def written(job: RefineJob) -> list[Tensor]:
    moments = [moment.x for moment in (job.exp_avg, job.exp_avg_sq) if moment is not None]
    return [job.x, *moments, *([] if job.weight is None else [job.weight])]


def same(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = blocks()
    check_refine(found)
    for start in range(4):
        pairs = window(torch.arange(48) // 2, 0, 48)
        check_tiles(case(window(torch.arange(7) // 2, 0, 7), pairs, start))
    check_coalesce(found)
    print("equal")
