from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ds_vcycle import parallel, random_states
from ds_vcycle.config import ConfigError, UserError
from tests.dist.ranks import RankError, run_ranks, values


def layouts() -> dict[str, Any]:
    """Two layouts side by side: groups built once, Megatron pointed at the last one asked for, sums over each."""
    parallel.init_distributed("cpu")
    found: dict[str, Any] = {"rank": dist.get_rank()}
    for tp in (1, 2, 1, 4, 2):
        mesh = parallel.mesh_for(tp)
        sums = []
        for group in (mesh.tp_group, mesh.dp_group):
            value = torch.tensor([10**mesh.rank])
            dist.all_reduce(value, group=group)
            sums.append(value.item())
        megatron = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
        assert megatron == (mesh.tp_size, mesh.tp_rank, mesh.dp_size, mesh.dp_rank)
        assert mesh is parallel.mesh_for(tp)
        found[f"tp{tp}"] = (mesh.tp_rank, mesh.dp_rank, *sums)
    found["groups"] = dist.distributed_c10d._world.group_count
    return found


def test_layouts_of_four_ranks() -> None:
    ranks = values(4, "tests.test_parallel:layouts")
    for rank, found in enumerate(ranks):
        pair = 10 ** (rank - rank % 2) * 11
        column = 10 ** (rank % 2) * 101
        assert found["tp1"] == (0, rank, 10**rank, 1111)
        assert found["tp2"] == (rank % 2, rank // 2, pair, column)
        assert found["tp4"] == (rank, 0, 1111, 10**rank)
        assert found["groups"] <= 6  # the world, this rank alone, two rows, two columns


def seeds() -> dict[str, Any]:
    parallel.init_distributed("cpu")
    mesh = parallel.mesh_for(2)
    random_states.seed_ranks(7, mesh)
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(4).tolist()
    default = [random.random(), np.random.rand(), *torch.rand(4).tolist()]
    return {"default": default, "tracked": tracked}


def test_default_generators_agree_over_tp_and_all_others_differ() -> None:
    a0, a1, b0, b1 = values(4, "tests.test_parallel:seeds")
    assert a0["default"] == a1["default"] and b0["default"] == b1["default"]
    assert all(x != y for x, y in zip(a0["default"], b0["default"], strict=True))
    assert (
        len({tuple(r["tracked"]) for r in (a0, a1, b0, b1)} | {tuple(a0["default"][2:]), tuple(b0["default"][2:])}) == 6
    )


def failing(kind: str) -> None:
    parallel.init_distributed("cpu")
    rank = dist.get_rank()
    parallel.raise_together(None)
    assert parallel.any_rank(rank == 1) is True
    assert parallel.any_rank(False) is False
    if kind == "user":
        error: Exception | None = ConfigError(f"key of rank {rank}") if rank > 0 else None
    else:
        error = KeyError("bug") if rank == 2 else None
    parallel.raise_together(error)


def test_every_rank_raises_the_lowest_failing_ranks_error() -> None:
    results = run_ranks(3, "tests.test_parallel:failing", ("user",), check=False, wait_all=True)
    for result in results:
        assert result.error is not None and result.error.strip().endswith("Error: key of rank 1")
    results = run_ranks(3, "tests.test_parallel:failing", ("bug",), check=False, wait_all=True)
    assert [r.error.strip().splitlines()[-1] for r in results if r.error] == [
        "RuntimeError: rank 2 failed: 'bug'",
        "RuntimeError: rank 2 failed: 'bug'",
        "KeyError: 'bug'",
    ]


def single() -> dict[str, Any]:
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(key, None)
    device = parallel.init_distributed("auto")
    mesh = parallel.mesh_for(1)
    assert parallel.init_distributed("auto") == device == mesh.device
    try:
        parallel.mesh_for(2)
    except UserError as error:
        message = str(error)
    random_states.seed_ranks(3, mesh)
    random.gauss(0, 1)
    np.random.standard_normal()
    state = random_states.rng_state()

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(3).tolist()
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            *torch.rand(3).tolist(),
            *tracked,
        ]

    first, second = draw(), draw()
    random_states.set_rng_state(state)
    third = draw()
    os.environ["RANK"] = "0"  # where the result goes
    return {"first": first, "second": second, "third": third, "message": message, "world": dist.get_world_size()}


def test_a_process_without_launcher_is_a_job_of_one_and_its_generators_return() -> None:
    (found,) = values(1, "tests.test_parallel:single")
    assert found["world"] == 1
    assert found["first"] == found["third"]
    assert all(a != b for a, b in zip(found["first"], found["second"], strict=True))
    assert "tensor_parallel=2 does not divide the 1 ranks" in found["message"]


def dying() -> None:
    parallel.init_distributed("cpu")
    if dist.get_rank() == 1:
        os._exit(137)
    dist.barrier()


def test_a_rank_that_dies_is_reported_by_its_exit_code() -> None:
    results = run_ranks(2, "tests.test_parallel:dying", check=False, grace_s=1)
    assert results[1].exit_code == 137 and results[0].exit_code != 0
    with pytest.raises(RankError, match="rank 1: exit 137"):
        run_ranks(2, "tests.test_parallel:dying", grace_s=1)
