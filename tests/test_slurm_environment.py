"""A rank's place from Slurm's variables, and Slurm's node lists."""

from __future__ import annotations

import pytest

from ds_vcycle.config import UserError
from ds_vcycle.slurm import hostnames, launch_environment, port_of

TASK = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[07-10]",
}  # fmt: skip


def test_a_task_of_srun_is_a_rank() -> None:
    assert launch_environment(TASK) == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "24567",
    }  # fmt: skip


def test_what_is_given_stands() -> None:
    given = launch_environment({**TASK, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.7", "4711")


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # a launcher inside of the job
        {"SLURM_STEP_NUM_TASKS": None},  # the batch script, or a shell of salloc: no step of theirs
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},  # srun -n1 within an allocation of eight
        dict.fromkeys(TASK),  # no Slurm
    ],
)
def test_a_process_by_itself_stays_one(changes: dict[str, str | None]) -> None:
    assert launch_environment({k: v for k, v in {**TASK, **changes}.items() if v is not None}) == {}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID=''"),
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not below the 8 tasks"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "set MASTER_ADDR"),
    ],
)
def test_a_step_that_cannot_be_understood_is_an_error(changes: dict[str, str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        launch_environment({**TASK, **changes})


def test_ports_of_jobs_in_a_row_differ_and_are_nobodys() -> None:
    ports = {port_of(job) for job in range(991_000, 1_001_000)}
    assert len(ports) == 10_000 and min(ports) >= 20_000 and max(ports) < 32_768


# what `scontrol show hostnames` prints for them (Slurm 22.05)
LISTS = [
    ("n1", ["n1"]),
    ("n1,login", ["n1", "login"]),
    ("n[1-3,07],login", ["n1", "n2", "n3", "n07", "login"]),
    ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
    ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
]


@pytest.mark.parametrize(("given", "hosts"), LISTS)
def test_node_lists(given: str, hosts: list[str]) -> None:
    assert hostnames(given) == tuple(hosts)


@pytest.mark.parametrize("given", ["", "n[1-3", "n1-3]", "n[3-1]", "n[a-b]", "n1,,n2", "n[]"])
def test_what_is_no_node_list_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="no node list"):
        hostnames(given)
