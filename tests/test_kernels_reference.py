"""The kernels' references against dense numpy; closed forms against the tables they were fitted to."""

from __future__ import annotations

import itertools
import random
from importlib import import_module

import numpy as np
import pytest
import torch
from ds_vcycle_kernels import CoalesceJob, Member, Moment, RefineJob, chunks, coalesce, positions, refine, rounded_root
from ds_vcycle_kernels.positions import indices, runs

from tests.kernel_cases import GROUPINGS, case, parents, refined, summed, window


@pytest.mark.parametrize(("rows", "cols"), list(itertools.product(GROUPINGS, GROUPINGS)))
@pytest.mark.parametrize("chunk", [1, 200, 1 << 18])
def test_references_are_the_dense_arithmetic(rows, cols, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS_PER_THREAD", chunk)
    generator = random.Random(f"{rows}{cols}{chunk}")
    for cut, beta, divisor, start in ((False, 0.25, 2.0, 0), (True, 0.0, 1.0, 1), (True, 1.0, 3.0, 2)):
        table_R, table_C = parents(rows, 48, generator), parents(cols, 72, generator)
        span = sorted(generator.sample(range(49), 2)) if cut else (0, 48)
        block = case(window(table_R, *span), window(table_C, 0, 72), start)
        job = refined(block, beta=beta, divisor=divisor, dtype=torch.bfloat16, moments=True)
        refine([job], beta=beta)
        kept = np.float32(beta) * block.x.numpy()
        np.testing.assert_array_equal(job.x.numpy(), kept + block.value(divisor) if beta else block.value(divisor))
        np.testing.assert_array_equal(job.exp_avg.x.numpy(), block.value(3.0))
        assert not job.exp_avg_sq.x.any()
        assert torch.equal(job.weight, job.x.flatten().to(torch.bfloat16))
        for root in (False, True):
            total = summed(block, root=root)
            coalesce([total])
            np.testing.assert_array_equal(total.total.numpy(), 2 * block.total(root))


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_positions_are_those_of_the_table_whatever_the_cut(grouping):
    generator = random.Random(grouping)
    for _ in range(60):
        table = parents(grouping, 48, generator)
        local, extent = window(table, *sorted(generator.sample(range(49), 2)))
        rule = positions(local)
        assert torch.equal(indices(rule), local)
        first, last = sorted(generator.choices(range(extent + 1), k=2))
        found = {
            run.fine + (unit * run.members + member) * run.length + at: run.coarse + unit * run.length + at
            for run in runs(rule, first, last)
            for unit, member, at in itertools.product(range(run.units), range(run.members), range(run.length))
        }
        assert found == {i: p for i, p in enumerate(local.tolist()) if first <= p < last}


def test_regular_groupings_need_no_table():
    generator = random.Random(0)
    for grouping in set(GROUPINGS) - {"explicit"}:
        table = parents(grouping, 48, generator)
        assert positions(table).table is None
        assert positions(window(table, 1, 48)[0]).table is None
    assert positions(torch.tensor([0, 0, 1, 0])).table is not None


def test_beta_one_without_coarse_values_keeps_the_bits_and_zero_never_reads():
    x = torch.tensor([[-0.0, torch.nan], [1.0, torch.inf]])
    rule = positions(torch.tensor([0, 0]))
    before = x.clone().view(torch.int32)
    refine([RefineJob(x=x, z=None, rows=rule, cols=rule)], beta=1.0)
    assert torch.equal(x.view(torch.int32), before)
    refine([RefineJob(x=x, z=torch.ones(1, 1), rows=rule, cols=rule)], beta=0.0)
    assert torch.equal(x, torch.ones(2, 2))


def test_a_sum_of_negative_zeros_is_zero():
    rule = positions(torch.tensor([0, 0]))
    total = torch.ones(1, 1, dtype=torch.float64)
    coalesce([CoalesceJob(members=[Member(x=torch.full((2, 2), -0.0), rows=rule, cols=rule)], total=total)])
    assert not total.signbit().any()


def test_roots_are_rounded_as_ieee_754_has_them():
    x = torch.rand(1 << 18) * torch.rand(1 << 18) ** 9
    x[:4] = torch.tensor([0.0, 1e-45, torch.inf, 3e38])
    np.testing.assert_array_equal(rounded_root(x).numpy(), np.sqrt(x.numpy()))


def _job(**changes: object) -> RefineJob:
    rule = positions(torch.tensor([0, 0, 1, 1]))
    given = {"x": torch.zeros(4, 4), "z": torch.zeros(2, 2), "rows": rule, "cols": rule} | changes
    return RefineJob(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 4, dtype=torch.float64)}, "float64"),
        ({"x": torch.zeros(4, 8)[:, ::2]}, "not contiguous"),
        ({"x": torch.zeros(4, 5)}, "positions are for"),
        ({"z": torch.zeros(1, 2)}, "outside the 1 coarse rows"),
        ({"z": torch.zeros(2, 2, device="meta")}, "is on meta"),
        ({"divisor": 0.0}, "divisor of z is 0"),
        ({"weight": torch.zeros(16)}, "give bfloat16 or float16"),
        ({"exp_avg": Moment(x=torch.zeros(4, 4))}, "together"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refine([_job(**changes)], beta=0.5)


def test_nothing_to_do_is_done_at_once(monkeypatch):
    """Jobs without elements are neither checked nor worked on; their neighbours are."""
    begun = []
    launchers = (import_module(f"ds_vcycle_kernels.{name}") for name in ("refine", "coalesce"))
    for launcher, name, tensor in zip(launchers, ("refine_reference", "coalesce_reference"), ("x", "total")):
        monkeypatch.setattr(launcher, name, lambda job, tensor=tensor, **_: begun.append(getattr(job, tensor).shape))
    refine([], beta=0.5)
    coalesce([])
    empty = torch.zeros(0, 4, dtype=torch.float64)  # float32 is asked for where there are elements
    refine([_job(x=empty)], beta=0.5)
    coalesce([CoalesceJob(members=[], total=torch.zeros(0, 3))])
    assert begun == []
    refine([_job(x=empty), _job()], beta=0.5)
    total = torch.zeros(2, 3, dtype=torch.float64)
    coalesce([CoalesceJob(members=[], total=torch.zeros(0, 3)), CoalesceJob(members=[], total=total)])
    assert begun == [(4, 4), (2, 3)]
