"""Two hosts by the deepspeed launcher over ssh, without Slurm: launched, told to make room, started again."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_vcycle.config import RunConfig
from tests.dist.ranks import free_port
from tests.resumed import records, status, write_config
from tests.slurm import hosts, program
from tests.tiny import tiny_run

pytestmark = pytest.mark.ssh
_CHANGES = {"cycle.coarse.steps": 60, "logging.every_steps": 10, "evaluation.every_steps": 30}


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with hosts.reachable(tmp_path_factory.mktemp("ssh")) as env:
        yield {**env, "MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}


def launch_words(config: RunConfig, hostfile: Path) -> list[str]:
    """Start the run on the two hosts of a hostfile."""
    file = write_config(config, hostfile.with_name("run.yaml"))
    words = [program("ds-vcycle"), "launch", "--config", str(file), "--nodes", "2", "--gpus-per-node", "0"]
    return [*words, "--hostfile", str(hostfile)]


def test_two_hosts_run_a_cycle_and_make_room_in_the_midst_of_it(tmp_path: Path, two_hosts: dict[str, str]) -> None:
    config = tiny_run(tmp_path / "run", changes=_CHANGES)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts.HOSTS))
    words = launch_words(config, hostfile)
    log = (tmp_path / "log").open("ab")
    launch = subprocess.Popen(words, env=two_hosts, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    heartbeat, deadline = config.run_dir / "heartbeat.json", time.monotonic() + 100
    while not (heartbeat.exists() and json.loads(heartbeat.read_text())["phase"] == 2):
        assert time.monotonic() < deadline and launch.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    (script,) = hosts.children(launch.pid, "vcycle.sbatch")
    script.send_signal(signal.SIGUSR1)
    assert launch.wait(100) == 75, (tmp_path / "log").read_text()
    assert (status(config.run_dir)["status"], status(config.run_dir)["reason"]) == ("stopped", "RUN/stop")
    assert status(config.run_dir)["phase"] == 2
    assert not (config.run_dir / "stop").exists()

    again = subprocess.run(words, env=two_hosts, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    assert again.returncode == 0, (tmp_path / "log").read_text()
    assert status(config.run_dir)["status"] == "finished"
    assert [record["step"] for record in records(config.run_dir, "step")] == list(range(1, 3 + 60 + 3 + 1))
    log.close()


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, two_hosts: dict[str, str]) -> None:
    config = tiny_run(tmp_path / "run")
    hostfile = tmp_path / "hosts"
    words = launch_words(config, hostfile)
    hostfile.write_text("127.0.0.1 slots=1\n127.0.0.3 slots=1\n")  # nobody listens there
    done = subprocess.run(words, env=two_hosts, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "127.0.0.3 cannot be reached by ssh" in done.stderr
    assert not (config.run_dir / "metrics.jsonl").exists()
