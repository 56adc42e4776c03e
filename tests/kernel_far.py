"""Elements beyond 2^31 of a tensor that is never allocated: one tile of a launch, its addresses moved back.

Run by ``tests.kernel_interpreted`` under TRITON_INTERPRET=1. A launch is described for tensors without memory; the
addresses are then set so that the elements of the last row, and the coarse ones these touch, lie in small tensors.
Offsets that lost their upper half would end far outside of them.
"""

from __future__ import annotations

import torch
from ds_vcycle_kernels import CoalesceJob, Member, Positions, RefineJob, coalesce_triton, refine_triton

ROWS, COLS = (1 << 19) + 1, 1 << 12
"""The last row begins at element 2^31."""


def check_far_elements() -> None:
    """The last row of a block, blended with and summed onto the last row of as large a coarse rectangle."""
    rows, cols = Positions(count=ROWS), Positions(count=COLS)
    x_RC = torch.empty(ROWS, COLS, device="meta")
    _check_refine(RefineJob(x=x_RC, z=x_RC, rows=rows, cols=cols))
    member = Member(x=x_RC, rows=rows, cols=cols)
    _check_coalesce(CoalesceJob(members=[member], total=torch.empty(ROWS, COLS, dtype=torch.float64, device="meta")))


def _check_refine(job: RefineJob) -> None:
    x, z, block = torch.randn(COLS), torch.randn(COLS), 1024
    table, divisors, tables, owners = refine_triton.describe([job], block)
    far = (ROWS - 1) * COLS
    assert far == 1 << 31 and len(owners) == ROWS * COLS // block
    table[0, 0], table[0, 17] = x.data_ptr() - 4 * far, z.data_ptr() - 4 * far
    assert table[0, 0] % 16 == 0, "tiles begin at the row"
    table[0, 2] -= far // block  # the first program takes the tile that begins there
    expected = x * 0.5 + z
    refine_triton.refine_kernel[(COLS // block,)](
        table, divisors, tables, owners, 0.5, BLOCK=block, COLS=0, WIDE=True, MODE=2, DIVIDE=False, WEIGHT=0,
        MOMENTS=False, num_warps=4,
    )  # fmt: skip
    assert torch.equal(x, expected)


def _check_coalesce(job: CoalesceJob) -> None:
    x, total, block = torch.randn(COLS), torch.zeros(COLS, dtype=torch.float64), 512
    jobs, members, tables, owners = coalesce_triton.describe([job], 0, (1, block))
    far = (ROWS - 1) * COLS
    members[0, 0], jobs[0, 0] = x.data_ptr() - 4 * far, total.data_ptr() - 8 * far
    jobs[0, 3] -= far // block
    coalesce_triton.coalesce_kernel[(COLS // block,)](
        jobs, members, tables, owners, ROWS=1, COLUMNS=block, COLS=0, VECTOR=True, ROOT=False, num_warps=4
    )
    assert torch.equal(total, x.double())
