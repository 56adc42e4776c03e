"""A real Slurm of two nodes with one CPU each, all daemons on this machine, for as long as a test module runs.

It has a munge of its own (key and socket) and listens on free ports, so it disturbs no other Slurm.
"""

from __future__ import annotations

import getpass
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.dist.ranks import free_port
from tests.slurm import SEARCHED, find

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
WIDE = 16  # nodes of the partition `wide`, the two among them: for what sbatch only tests
REQUEUE_SECONDS = 5  # after which a requeued job may start; 120 by default


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster with its files under ``folder``; yields the environment of a user of it."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o700)
    config, key, munge = folder / "slurm.conf", folder / "munge" / "key", folder / "munge" / "socket"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    config.write_text(_config(folder, munge))
    env = {**os.environ, "SLURM_CONF": str(config), "PATH": SEARCHED}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        files = [f"--{name}-file={folder / 'munge' / name}" for name in ("pid", "log", "seed")]
        daemons.append(
            _start(["munged", "-F", "--force", f"--socket={munge}", f"--key-file={key}", *files], folder, env)
        )
        _until(lambda: munge.exists(), "munged", folder)
        daemons.append(_start(["slurmctld", "-D", "-f", str(config)], folder, env))
        for node in range(1, WIDE + 1):
            daemons.append(_start(["slurmd", "-D", "-f", str(config), "-N", f"n{node}"], folder, env))
        _until(lambda: _idle(env) == WIDE, "idle nodes", folder)
        yield env
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], env=env, capture_output=True, check=False)
        for daemon in reversed(daemons):
            _end(daemon)


def _config(folder: Path, munge: Path) -> str:
    host, user = socket.gethostname(), getpass.getuser()
    first = free_port()
    lines = {
        "ClusterName": "tests", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmctldPort": free_port(),
        "SlurmUser": user, "SlurmdUser": user, "AuthType": "auth/munge", "CredType": "cred/munge",
        "AuthInfo": f"socket={munge},cred_expire={REQUEUE_SECONDS}",
        "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool" / "%n",
        "SlurmctldPidFile": folder / "slurmctld.pid", "SlurmdPidFile": folder / "slurmd-%n.pid",
        "ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none", "MpiDefault": "none",
        "SchedulerType": "sched/backfill", "SchedulerParameters": "sched_interval=1,bf_interval=1",
        "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU",
        "ReturnToService": 2, "JobRequeue": 1, "KillWait": 30, "BatchStartTimeout": 30,
    }  # fmt: skip
    text = "".join(f"{key}={value}\n" for key, value in lines.items())
    for node in range(1, WIDE + 1):
        port = first if node == 1 else free_port()
        text += f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000\n"
    text += "PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP\n"
    return f"{text}PartitionName=wide Nodes=n[1-{WIDE}] MaxTime=INFINITE State=UP\n"


def _start(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    path = find(command[0])
    assert path is not None
    with (folder / f"{Path(path).name}.log").open("ab") as log:
        return subprocess.Popen([path, *command[1:]], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _idle(env: dict[str, str]) -> int:
    found = subprocess.run(
        ["sinfo", "-h", "-p", "wide", "-t", "idle", "-o", "%D"], env=env, capture_output=True, text=True, check=False
    )
    return int(found.stdout.strip() or 0)


def _until(reached: object, what: str, folder: Path) -> None:
    assert callable(reached)
    deadline = time.monotonic() + 60
    while not reached():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))
            raise AssertionError(f"no {what}\n{logs}")
        time.sleep(0.2)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(10)
    if daemon.poll() is None:
        daemon.kill()
        daemon.wait()
