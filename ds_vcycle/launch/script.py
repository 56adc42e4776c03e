"""The batch script of a run, rendered from ``vcycle.sbatch`` beside this module. Imports no torch."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from ds_vcycle.config import UserError

Launcher = Literal["srun", "deepspeed"]
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a run is started with.

    Attributes:
        directory: where it is started; relative paths of the configuration are relative to it.
        config: the run's configuration, as the ranks read it.
        run_dir: of the run.
        python: the interpreter on the nodes.
        nodes: how many.
        ranks_per_node: tasks of a node, each a rank.
        gpus_per_node: of a node; 0 for a partition without.
        grace_seconds: how long before the time limit the run is told to save.
        max_idle: requeues in a row that may bring no new checkpoint.
        sbatch: further options of sbatch as they stand, ``--constraint=a100``.
        hostfile: of the deepspeed launcher, without Slurm.
    """

    directory: Path
    config: Path
    run_dir: Path
    python: Path
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    launcher: Launcher = "srun"
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    grace_seconds: int = 120
    max_idle: int = 3
    sbatch: tuple[str, ...] = ()
    hostfile: Path | None = None


def render(launch: Launch) -> str:
    """The script's text.

    Raises:
        UserError: a value that sbatch would refuse or take for something else.
    """
    _check(launch)
    values = {
        "SBATCH": "\n".join(f"#SBATCH {option}" for option in _options(launch)),
        "DIRECTORY": shlex.quote(str(launch.directory)),
        "CONFIG": shlex.quote(str(launch.config)),
        "RUN_DIR": shlex.quote(str(launch.run_dir)),
        "PYTHON": shlex.quote(str(launch.python)),
        "LAUNCHER": launch.launcher,
        "RANKS": str(launch.ranks_per_node),
        "HOSTFILE": shlex.quote(str(launch.hostfile)) if launch.hostfile else "",
        "MAX_IDLE": str(launch.max_idle),
    }
    text = files("ds_vcycle.launch").joinpath("vcycle.sbatch").read_text(encoding="utf-8")
    rendered = re.sub(r"@([A-Z_]+)@", lambda match: values.pop(match[1]), text)
    assert not values, f"the script has no place for {sorted(values)}"
    return rendered


def _options(launch: Launch) -> list[str]:
    """Options of sbatch, https://slurm.schedmd.com/sbatch.html. A job that is queued again appends to its output."""
    given = {"gpus-per-node": launch.gpus_per_node or None, "partition": launch.partition, "account": launch.account}
    given["time"] = launch.time
    here = [f"--chdir={_quoted(launch.directory)}"] if launch.directory.is_absolute() else []
    return [
        f"--job-name={launch.run_dir.name}",
        *here,
        f"--nodes={launch.nodes}",
        f"--ntasks-per-node={launch.ranks_per_node}",
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        f"--signal=B:USR1@{launch.grace_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output={_quoted(launch.run_dir / 'launch' / 'slurm-%j.out')}",
        *launch.sbatch,
    ]


def _quoted(path: Path) -> str:
    return f'"{path}"' if " " in str(path) else str(path)


def _check(launch: Launch) -> None:
    if launch.time is not None and not _TIME.fullmatch(launch.time):
        raise UserError(f"--time {launch.time} is no time of Slurm; give minutes, H:MM:SS or D-HH:MM:SS")
    if launch.time is not None and launch.grace_seconds >= _seconds(launch.time):
        raise UserError(
            f"--grace {launch.grace_seconds} seconds are all of --time {launch.time}, so the run would be told to stop "
            "as it starts; lower --grace or raise --time"
        )
    for option in launch.sbatch:
        if not re.fullmatch(r"-{1,2}[a-zA-Z][^\n]*", option):
            raise UserError(f"--sbatch {option!r} is no option of sbatch; give it as --sbatch=--constraint=a100")
    for name in ("partition", "account"):
        value = getattr(launch, name)
        if value is not None and not re.fullmatch(r"[^\s\"'#]+", value):
            raise UserError(f"--{name} {value!r} is no name; leave spaces and quotes out")
    if any(character in f"{launch.run_dir}{launch.directory}" for character in '\n"'):
        where = f"run_dir={launch.run_dir} in {launch.directory}"
        raise UserError(f"{where}: sbatch's options take no quotes and no line breaks; rename it")
    if launch.gpus_per_node and launch.ranks_per_node > launch.gpus_per_node:
        raise UserError(
            f"--ranks-per-node {launch.ranks_per_node} is more than --gpus-per-node {launch.gpus_per_node}: a rank has "
            "a GPU of its own; leave --ranks-per-node out"
        )


def _seconds(time: str) -> int:
    """Of a time as Slurm reads it: minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = (0, *parts, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
