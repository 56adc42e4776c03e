"""The real ``deepspeed`` launcher: its ranks killed for real, its signals, and it going away under them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ds_vcycle.config import RunConfig
from tests.dist.cases_resume import Attempt
from tests.dist.ranks import free_port
from tests.resumed import assert_same_run, attempts, last_checkpoint, status, write_config
from tests.tiny import tiny_run

_CHANGES = {
    "model.dropout": 0.1, "saving.every_steps": 2, "logging.every_steps": 1,
    "cycle.coarse.steps": 8, "cycle.final.steps": 12,
}  # fmt: skip
_TIMEOUT_S = 240


class Launch:
    """A ``deepspeed`` command in a session of its own, with the launcher and the two ranks below it."""

    def __init__(self, config: RunConfig, *arguments: str) -> None:
        file = write_config(config, config.run_dir.with_suffix(".yaml"))
        self.run_dir = config.run_dir
        self._metrics = config.run_dir / "metrics.jsonl"
        self._before = self._metrics.stat().st_ino if self._metrics.exists() else None
        self._log = config.run_dir.with_suffix(".log").open("a")
        command = [
            str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", str(free_port()),
            "--module", "ds_vcycle", "train", "--config", str(file), *arguments,
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
        output = {"stdout": self._log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **output)

    def below(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """The per-node launcher and its two ranks."""
        (node,) = psutil.Process(self.process.pid).children()
        ranks = sorted(node.children(), key=lambda rank: rank.pid)
        assert len(ranks) == 2, ranks
        return node, ranks

    def wait_for(self, reached: Callable[[dict[str, object]], bool]) -> None:
        """Return as soon as this launch has written a step record that satisfies ``reached``.

        A resumed run begins by writing the file anew up to its checkpoint; until then it is that of the last launch.
        """
        seen = 0
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output()
            begun = self._metrics.exists() and self._metrics.stat().st_ino != self._before
            text = self._metrics.read_text() if begun else ""
            lines = text[: text.rfind("\n") + 1].splitlines()
            found = [json.loads(line) for line in lines[min(seen, len(lines)) :]]
            if any(record["event"] == "step" and reached(record) for record in found):
                return
            seen = len(lines)
            time.sleep(0.002)
        raise AssertionError(f"never reached: {self.output()}")

    def wait(self) -> int:
        """The command's exit code."""
        return self.process.wait(_TIMEOUT_S)

    def output(self) -> str:
        return self.run_dir.with_suffix(".log").read_text()[-5000:]

    def close(self) -> None:
        """Kill whatever is left of the session, orphans included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@contextmanager
def launched(config: RunConfig, *arguments: str) -> Iterator[Launch]:
    launch = Launch(config, *arguments)
    try:
        yield launch
    finally:
        launch.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_run(tmp_path_factory.mktemp("runs") / "uninterrupted", tp=2, changes=_CHANGES)
    assert attempts(Attempt(config=config))[0].text == "finished"
    return config.run_dir


def test_killed_signalled_and_orphaned_ranks_go_on_with_the_same_bits(tmp_path: Path, uninterrupted: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_CHANGES)
    with launched(config) as launch:  # kill -9 of all ranks in the coarse phase
        launch.wait_for(lambda record: record["phase"] == 2)
        _, ranks = launch.below()
        for rank in ranks:
            rank.kill()
        assert launch.wait() != 0
    assert status(config.run_dir)["status"] == "running"
    last_checkpoint(config.run_dir)

    with launched(config, "--resume") as launch:  # SIGTERM to the launcher of this node, which passes it on
        launch.wait_for(lambda record: record["phase"] == 2 and int(str(record["phase_step"])) >= 3)
        node, _ = launch.below()
        node.terminate()
        assert launch.wait() != 0
    found = status(config.run_dir)
    assert (found["status"], found["reason"]) == ("stopped", "SIGTERM")
    assert last_checkpoint(config.run_dir).name == f"step-{found['step']:08d}-phase-{found['phase']:02d}"

    with launched(config, "--resume") as launch:  # kill -9 of all ranks in the final phase
        launch.wait_for(lambda record: record["phase"] == 4)
        _, ranks = launch.below()
        for rank in ranks:
            rank.kill()
        assert launch.wait() != 0
    assert status(config.run_dir)["phase"] == 4

    with launched(config, "--resume", "auto") as launch:  # SIGTERM to the command: it dies, and signals nobody
        launch.wait_for(lambda record: record["phase"] == 4 and int(str(record["phase_step"])) >= 2)
        node, ranks = launch.below()
        launch.process.terminate()
        assert launch.wait() == -signal.SIGTERM
        assert not psutil.wait_procs([node, *ranks], timeout=60)[1]
    assert (status(config.run_dir)["status"], status(config.run_dir)["reason"]) == ("stopped", "launcher gone")

    with launched(config, "--resume") as launch:
        assert launch.wait() == 0, launch.output()
    assert_same_run(config.run_dir, uninterrupted)
