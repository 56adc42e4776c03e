"""Verbs of a cluster: launch a run, and what a batch script asks when its ranks have ended. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ds_vcycle.cli.arguments import ConfigOption, Overrides
from ds_vcycle.config import load_config
from ds_vcycle.launch.requeue import read_ended
from ds_vcycle.launch.requeue import requeue as requeue_job
from ds_vcycle.launch.script import Launch, render
from ds_vcycle.launch.submit import check_launch, in_run_dir, run_here, submit, write_launch


def launch(
    config: ConfigOption,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")],
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of a node, each a rank; 0: CPUs only.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Default: a rank a GPU, or one.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of one go, `12:00:00`; requeues go on after it.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    launcher: Annotated[
        Literal["srun", "deepspeed"], typer.Option(help="srun: one task a rank; deepspeed: over ssh (pdsh).")
    ] = "srun",
    grace: Annotated[int, typer.Option(min=1, help="Seconds before the time limit to save in.")] = 120,
    max_idle_requeues: Annotated[
        int, typer.Option(min=1, help="Give up after so many requeues in a row without a new checkpoint.")
    ] = 3,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch: `--sbatch=--constraint=a100`.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Without Slurm: run on these hosts (`host slots=N` a line), over ssh.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
) -> None:
    """Start a run on the nodes of a cluster: configuration and script into its run directory, then `sbatch`.

    The job saves and queues itself again when its time is over or the scheduler wants the nodes, until the run is
    finished. The same command goes on with a run that was stopped.

    Examples:

    - `ds-vcycle launch --config configs/bert_large_2level_4nodes.yaml --nodes 4 --partition gpu --time 12:00:00`

    - `ds-vcycle launch --config configs/demo_gpt.yaml --nodes 2 --gpus-per-node 0 --dry-run run_dir=runs/two_nodes`
    """
    settings = load_config(config, overrides)
    wanted = in_run_dir(
        Launch(
            directory=Path.cwd(), config=config, run_dir=settings.run_dir, python=Path(sys.executable), nodes=nodes,
            ranks_per_node=ranks_per_node or gpus_per_node or 1, gpus_per_node=gpus_per_node,
            launcher="deepspeed" if hostfile else launcher, partition=partition, time=time, account=account,
            grace_seconds=grace, max_idle=max_idle_requeues, sbatch=tuple(sbatch or ()), hostfile=hostfile,
        )
    )  # fmt: skip
    check_launch(settings, wanted)
    if dry_run:
        print(render(wanted), end="")
        return
    written = write_launch(settings, wanted)
    if hostfile is not None:
        raise typer.Exit(run_here(written.script, os.environ))
    job = submit(written.script)
    print(f"job {job}: {written.script}; look at it with `ds-vcycle status {settings.run_dir}`")


def requeue(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    code: Annotated[int, typer.Option(help="The launcher's exit code.")],
    since: Annotated[float, typer.Option(help="When the job began, in seconds of the epoch.")],
    max_idle: Annotated[int, typer.Option(help="Requeues in a row that may bring no new checkpoint.")] = 3,
    asked: Annotated[bool, typer.Option("--asked", help="The job was told to make room.")] = False,
) -> None:
    """For batch scripts: queue a job again whose ranks have ended, if its run is to go on."""
    ended = read_ended(run, code=code, since=since, asked=asked)
    raise typer.Exit(requeue_job(run, ended, max_idle=max_idle))
