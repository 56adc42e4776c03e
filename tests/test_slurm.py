"""A run on two nodes of a real Slurm: one command, taken off the nodes in four ways, ending with the same bits."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_vcycle import cli
from ds_vcycle.config import load_config
from ds_vcycle.study.summary import read_summary
from tests.data_corpora import SPEECHES
from tests.dist.cases_resume import Attempt
from tests.resumed import assert_same_run, attempts, write_config
from tests.slurm import cluster, program
from tests.test_study import real_study
from tests.tiny import tiny_corpus, tiny_run

pytestmark = pytest.mark.slurm
_CHANGES = {
    "model.dropout": 0.1, "saving.every_steps": 100, "evaluation.every_steps": 100, "logging.every_steps": 20,
    "cycle.initial.steps": 40, "cycle.coarse.steps": 200, "cycle.final.steps": 300,
}  # fmt: skip
_TIMEOUT_S = 200


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster.running(tmp_path_factory.mktemp("slurm")) as env:
        yield {**env, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Job:
    """A run that ``ds-vcycle launch`` has submitted."""

    def __init__(self, env: dict[str, str], run_dir: Path, *arguments: str) -> None:
        self.env, self.run_dir = env, run_dir
        words = [program("ds-vcycle"), "launch", "--gpus-per-node", "0", *arguments]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.split()[1].rstrip(":")

    def control(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.output()}"
        return done.stdout

    def facts(self) -> dict[str, str]:
        text = self.control("scontrol", "show", "job", "-o", self.id)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def ranks(self) -> dict[str, psutil.Process]:
        """The job's ranks by number."""
        found = {}
        for process in psutil.process_iter():
            try:
                env = process.environ()
                ours = env.get("SLURM_JOB_ID") == self.id and "SLURM_STEP_NUM_TASKS" in env
                if ours and "train" in process.cmdline():
                    found[env["SLURM_PROCID"]] = process
            except psutil.Error:
                continue
        return found

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not reached():
            over = time.monotonic() > deadline or self.facts()["JobState"] in ("FAILED", "TIMEOUT", "CANCELLED")
            assert not over, f"never {what}: {self.facts()}\n{self.output()}"
            time.sleep(0.2)

    def wait_until_trained(self, phase: int, restarts: int) -> None:
        """Return when the run that has been queued again so often is in the midst of a phase."""

        def reached() -> bool:
            try:
                beat = json.loads((self.run_dir / "heartbeat.json").read_text())
            except FileNotFoundError:
                return False
            return bool(beat["phase"] >= phase and beat["restarts"] == restarts and beat["phase_step"] > 0)

        self.wait_for(reached, f"in phase {phase} after {restarts} requeues")

    def told(self, event: str) -> int:
        return [entry["event"] for entry in self.events()].count(event)

    def output(self) -> str:
        return "".join(path.read_text()[-6000:] for path in (self.run_dir / "launch").glob("slurm-*.out"))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]


def test_script_for_one_two_and_sixteen_nodes_is_taken_by_sbatch(tmp_path: Path, slurm: dict[str, str]) -> None:
    for nodes, partition in (("1", "main"), ("2", "main"), ("16", "wide")):
        words = [program("ds-vcycle"), "launch", "--dry-run", "--config", "configs/demo_gpt.yaml", "--nodes", nodes]
        words += ["--partition", partition]
        words += ["--gpus-per-node", "0", "--time", "1:00:00", f"run_dir={tmp_path}", "training.micro_batch=1"]
        script = subprocess.run(words, env=slurm, capture_output=True, text=True, check=True).stdout
        done = subprocess.run(
            ["sbatch", "--test-only"], input=script, env=slurm, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


def test_the_corpus_recipe_prepares_what_a_run_takes(tmp_path: Path, slurm: dict[str, str]) -> None:
    settings = {
        "OUT": str(tmp_path / "out"), "TASKS": "2", "CORES": "1", "PYTHON": sys.executable, "SPLIT": "0.6,0.2,0.2",
        "SOURCES": str(SPEECHES / "18[0-5]*.txt"), "BOOKS": str(SPEECHES), "DATASET_CONFIG": "none",
        "TOKENIZER": str(tiny_corpus("bert") / "tokenizer.json"),
    }  # fmt: skip
    script = ["slurm/bert_large_corpus.sh", "--partition=main"]
    for _ in range(2):  # the second time nothing is done again
        done = subprocess.run(script, env={**slurm, **settings}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + _TIMEOUT_S
        while subprocess.run(["squeue", "-h"], env=slurm, capture_output=True, text=True, check=True).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        reports = [tmp_path / "out" / "corpus" / f"{task:04d}" / "prepare.json" for task in range(2)]
        logs = "".join(path.read_text() for path in sorted((tmp_path / "out" / "logs").iterdir()))
        assert all(report.is_file() for report in reports), logs
    counted = [json.loads(report.read_text())["splits"] for report in reports]
    documents = sum(split["documents"] for splits in counted for split in splits.values())
    assert documents == len({path.read_text().strip().casefold() for path in SPEECHES.glob("*.txt")})
    assert logs.count("scatter, task 0 of 2: 0 documents") == 1
    (paths,) = [line.strip(" '") for line in done.stdout.splitlines() if "data.path=" in line]
    config = load_config(Path("configs/bert_large_2level.yaml"), [paths])
    assert [blend.path.name for blend in config.data.blend] == ["0000", "0001"]


def test_the_runs_of_a_study_are_tasks_of_an_array(tmp_path: Path, slurm: dict[str, str]) -> None:
    study = real_study(tmp_path, ranks=1)
    words = ["sbatch", "--wait", "--array=0-1", f"--output={tmp_path}/%a.out", "slurm/study.sbatch", str(study)]
    done = subprocess.run(
        words, env={**slurm, "PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert done.returncode == 0, done.stderr + logs
    assert "tiny/flat seed 7: finished" in logs and "tiny/v seed 7: finished" in logs
    assert cli.run(["study", "--config", str(study), "--report"]) == 0
    assert not read_summary(tmp_path / "out" / "results.json").missing


def test_taken_off_the_nodes_in_four_ways_it_ends_with_the_same_bits(tmp_path: Path, slurm: dict[str, str]) -> None:
    config = tiny_run(tmp_path / "run", changes=_CHANGES)
    file = write_config(config, tmp_path / "run.yaml")
    job = Job(slurm, config.run_dir, "--config", str(file), "--nodes", "2", "--time", "20", "--grace", "90")

    job.wait_until_trained(0, restarts=0)
    job.control("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_until_trained(2, restarts=1)
    job.control("scontrol", "requeue", job.id)
    job.wait_until_trained(2, restarts=2)
    killed = job.ranks()["1"]
    killed.kill()
    job.wait_until_trained(4, restarts=3)
    held = job.ranks()["1"]
    requeued = job.told("requeued")
    held.suspend()  # or it would be finished by the time
    job.control("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")  # it is told within the next 30 s
    job.wait_for((config.run_dir / "stop").exists, "told that its time is over")
    held.resume()
    job.wait_for(lambda: job.told("requeued") > requeued, "queued again in time")
    job.control("scontrol", "update", f"JobId={job.id}", "TimeLimit=20")
    job.wait_for(lambda: job.facts()["JobState"] == "COMPLETED", "done")
    facts = job.facts()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.output()

    assert [job.told(event) for event in ("lost", "finished")] == [1, 1]
    assert job.told("requeued") in (3, 4)  # the administrator's requeue leaves the script little time to say so
    (lost,) = [event["culprit"] for event in job.events() if event["event"] == "lost"]
    assert lost.startswith(f"rank 1 ({socket.gethostname()}, process {killed.pid}) has gone")
    whole = tiny_run(tmp_path / "whole", changes=_CHANGES)
    assert attempts(Attempt(config=whole))[0].text == "finished"
    assert_same_run(config.run_dir, whole.run_dir)
