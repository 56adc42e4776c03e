"""What Slurm says of this process's place in a job step: a start by ``srun``, one task a rank. Imports no torch.

Slurm's variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from ds_vcycle.config import UserError

FIRST_PORT, PORTS = 20_000, 10_000  # below what Linux gives to clients (32,768 and up), above the usual services
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def launch_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a launcher would have set, from Slurm's variables, where ``srun`` started several ranks and no launcher did.

    Empty for a process by itself: under a launcher (RANK is set), outside of a job step (the batch script, a shell of
    ``salloc``), and in a step of one task. MASTER_ADDR and MASTER_PORT that are set stay.

    Raises:
        UserError: a variable that a step of several tasks has is missing or no number.
    """
    if "RANK" in env or "SLURM_STEP_NUM_TASKS" not in env:
        return {}
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if tasks == 1:
        return {}
    job = _number(env, "SLURM_JOB_ID")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    found = {
        "RANK": str(_number(env, "SLURM_PROCID")),
        "LOCAL_RANK": str(_number(env, "SLURM_LOCALID")),
        "WORLD_SIZE": str(tasks),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_node(nodes),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port_of(job)),
    }
    if not int(found["RANK"]) < tasks:
        raise UserError(f"SLURM_PROCID={found['RANK']} is not below the {tasks} tasks of the step; start it by srun")
    return found


def port_of(job: int) -> int:
    """A port for the ranks of a job to meet at: another one for each of 10,000 jobs in a row."""
    return FIRST_PORT + job % PORTS


def hostnames(nodes: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list in order, as ``scontrol show hostnames`` prints them: ``n[1-3,07],login``.

    Raises:
        UserError: it is not such a list.
    """
    found: list[str] = []
    for part in _split(nodes):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or any(set("[]") & set(piece) for piece in pieces):
            raise UserError(f"{nodes!r} is no node list of Slurm; it looks like n[1-3,07],login")
        choices = [[piece] if index % 2 == 0 else list(_numbers(piece, nodes)) for index, piece in enumerate(pieces)]
        found += ["".join(choice) for choice in product(*choices)]
    return tuple(found)


def _split(nodes: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    return (part for part in re.split(r",(?![^\[]*\])", nodes))


def _numbers(ranges: str, nodes: str) -> Iterator[str]:
    """The numbers of ``1-3,07``, with their leading zeros."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise UserError(f"{nodes!r} is no node list of Slurm: {part!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UserError(f"{nodes!r} is no node list of Slurm: {part!r} goes down")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _first_node(nodes: str) -> str:
    """Where rank 0 listens."""
    if not nodes:
        raise UserError("SLURM_JOB_NODELIST is not set, so the ranks cannot find each other; set MASTER_ADDR")
    return hostnames(nodes)[0]


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise UserError(f"{name}={value!r} is no number, so this process cannot tell its rank; start the ranks by srun")
    return int(value)
