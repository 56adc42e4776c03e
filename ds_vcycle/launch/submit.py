"""``ds-vcycle launch``: the resolved configuration and the script into the run directory, and off. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle.schedule import expand
from ds_vcycle.cycle.stopping import read_status
from ds_vcycle.launch.hostfile import read_hostfile
from ds_vcycle.launch.script import Launch, render
from ds_vcycle.levels import data_parallel, resolve_levels

_NAME = "vcycle.sbatch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a launch has written."""

    config: Path
    script: Path


def check_launch(config: RunConfig, launch: Launch) -> None:
    """Refuse what would fail on the nodes, after hours in the queue.

    Raises:
        UserError: the layout does not divide over the ranks, the hostfile is wrong, or the run is finished.
    """
    expand(config)
    ranks = launch.nodes * launch.ranks_per_node
    if launch.hostfile is not None:
        hosts = read_hostfile(launch.hostfile)
        if len(hosts) != launch.nodes or set(hosts.values()) != {launch.ranks_per_node}:
            slots = next(iter(hosts.values()))
            raise UserError(
                f"--hostfile {launch.hostfile} has {len(hosts)} hosts of {slots} slots, but --nodes {launch.nodes} of "
                f"{launch.ranks_per_node} ranks are asked for; make them agree"
            )
    for level in resolve_levels(config):
        data_parallel(level, world_size=ranks, global_batch=config.training.global_batch)
    if launch.gpus_per_node == 0 and config.training.device == "cuda":
        raise UserError("training.device=cuda needs GPUs, and --gpus-per-node is 0; set training.device=cpu or auto")
    if read_status(launch.run_dir) == "finished":
        raise UserError(f"run_dir={launch.run_dir} holds a finished run; set another run_dir")


def write_launch(config: RunConfig, launch: Launch) -> Written:
    """Write RUN/launch/config.yaml and RUN/launch/vcycle.sbatch, which refers to it.

    Raises:
        UserError: the run directory cannot be written.
    """
    folder = launch.run_dir / "launch"
    script = render(launch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        launch.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
        (folder / _NAME).write_text(script, encoding="utf-8")
        (folder / _NAME).chmod(0o755)
    except OSError as error:
        raise UserError(f"run_dir={launch.run_dir} cannot be written ({error.strerror}); set another") from error
    return Written(config=launch.config, script=folder / _NAME)


def in_run_dir(launch: Launch) -> Launch:
    """The launch with its configuration where :func:`write_launch` puts it."""
    return replace(launch, config=launch.run_dir / "launch" / "config.yaml")


def submit(script: Path) -> str:
    """Give the script to sbatch.

    Returns:
        The job's id.

    Raises:
        UserError: there is no sbatch here, or it refuses the job, in its words.
    """
    if shutil.which("sbatch") is None:
        raise UserError(f"there is no sbatch on this machine; run `sbatch {script}` where Slurm is, or `bash {script}`")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch refuses {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def run_here(script: Path, env: Mapping[str, str]) -> int:
    """Run the script on this machine by bash, to its end; returns its exit code."""
    return subprocess.run(["bash", str(script)], env=dict(env), check=False).returncode
