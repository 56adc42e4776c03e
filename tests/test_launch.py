"""``ds-vcycle launch``: the script it renders, what it refuses, and what becomes of a job whose ranks have ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_vcycle import cli
from ds_vcycle.config import UserError, load_config
from ds_vcycle.cycle.requeues import read_requeues
from ds_vcycle.launch.hostfile import read_hostfile
from ds_vcycle.launch.requeue import Ended, read_ended, requeue, verdict
from ds_vcycle.launch.script import Launch, render
from tests.slurm import program

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs" / "demo_gpt.yaml")
SHIPPED = Launch(
    directory=Path("."), config=Path("configs/bert_large_2level_4nodes.yaml"),
    run_dir=Path("runs/bert_large_2level_4nodes"), python=Path(".venv/bin/python"), nodes=4, ranks_per_node=8,
    gpus_per_node=8, time="12:00:00",
)  # fmt: skip


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["launch", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def test_the_shipped_script_is_a_rendered_one() -> None:
    assert (ROOT / "slurm" / "vcycle.sbatch").read_text() == render(SHIPPED)
    assert load_config(ROOT / SHIPPED.config).run_dir == SHIPPED.run_dir  # where it looks for what the run says


def test_options_of_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(
        capsys, "--config", DEMO, "--nodes", "2", "--gpus-per-node", "4", "--partition", "gpu", "--time", "1-12:00:00",
        "--account", "me", "--grace", "300", "--sbatch=--constraint=a100", "run_dir=runs/x", "training.global_batch=64",
    )  # fmt: skip
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert options == [
        "--job-name=x", f"--chdir={os.getcwd()}", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4",
        "--partition=gpu", "--account=me", "--time=1-12:00:00", "--signal=B:USR1@300", "--requeue",
        "--open-mode=append", "--output=runs/x/launch/slurm-%j.out", "--constraint=a100",
    ]  # fmt: skip


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    recipes = ((path.name, path.read_text()) for path in (ROOT / "slurm").iterdir())
    for name, text in (
        *recipes,
        ("shipped", render(SHIPPED)),
        ("spaces", render(Launch(**{**_fields(SHIPPED), "directory": Path("/a b/it's"), "hostfile": Path("h x")}))),
    ):
        path = tmp_path / name
        path.write_text(text)
        done = subprocess.run([program("shellcheck"), str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def _fields(launch: Launch) -> dict[str, Any]:
    return {name: getattr(launch, name) for name in launch.__dataclass_fields__}


def test_without_slurm_configuration_and_script_are_written_and_a_word_says_how_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run_dir = tmp_path / "run"
    words = ["launch", "--config", DEMO, "--nodes", "2", "--gpus-per-node", "0", f"run_dir={run_dir}", "lr.peak=0.002"]
    assert cli.run(words) == 2
    script = run_dir / "launch" / "vcycle.sbatch"
    assert f"run `sbatch {script}` where Slurm is, or `bash {script}`" in capsys.readouterr().err
    assert yaml.safe_load((run_dir / "launch" / "config.yaml").read_text())["lr"]["peak"] == 0.002
    assert f"config={run_dir}/launch/config.yaml" in script.read_text()


REFUSED = [
    (["--nodes", "3", "--gpus-per-node", "0"], "training.global_batch"),
    (["--nodes", "1", "--gpus-per-node", "1", "--ranks-per-node", "2"], "more than --gpus-per-node 1"),
    (["--nodes", "1", "--gpus-per-node", "0", "training.device=cuda"], "training.device=cuda needs GPUs"),
    (["--nodes", "1", "--gpus-per-node", "1", "--time", "soon"], "--time soon is no time of Slurm"),
    *(
        (
            ["--nodes", "1", "--gpus-per-node", "1", "--time", time, "--grace", grace],
            f"--grace {grace} seconds are all of",
        )
        for time, grace in (("2", "120"), ("1:30", "90"), ("0:01:30", "90"), ("1-0", "86400"), ("0-1:30", "5400"))
    ),
    (["--nodes", "1", "--gpus-per-node", "1", "--sbatch", "a100"], "no option of sbatch"),
    (["--nodes", "1", "--gpus-per-node", "1", "--partition", "a b"], "--partition 'a b' is no name"),
    (["--nodes", "2", "--gpus-per-node", "1", "--hostfile", "missing"], "--hostfile missing cannot be read"),
]


@pytest.mark.parametrize(("arguments", "part"), REFUSED)
def test_what_would_fail_on_the_nodes_is_refused_here(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["launch", "--dry-run", "--config", DEMO, *arguments]) == 2
    assert part in capsys.readouterr().err


HOSTFILES = [
    ("127.0.0.1 slots=2\n# spare\n\n127.0.0.2   slots=2  # the other\n", None),
    ("", "no hosts in it"),
    ("127.0.0.1 slot=2\n", "h:1: '127.0.0.1 slot=2' is not `host slots=N`"),
    ("127.0.0.1 slots=0\n", "h:1: '127.0.0.1 slots=0' is not"),
    ("127.0.0.1 slots=2\n127.0.0.1 slots=2\n", "h:2: 127.0.0.1 is there twice"),
    ("127.0.0.1 slots=2\n127.0.0.2 slots=1\n", "different numbers of slots (127.0.0.1 2, 127.0.0.2 1)"),
    ("127.0.0.1 slots=2\nnosuch.invalid slots=2\n", "nosuch.invalid cannot be found"),
]


@pytest.mark.parametrize(("text", "part"), HOSTFILES)
def test_a_hostfile_is_right_or_its_error_says_where(tmp_path: Path, text: str, part: str | None) -> None:
    (tmp_path / "h").write_text(text)
    if part is None:
        assert read_hostfile(tmp_path / "h") == {"127.0.0.1": 2, "127.0.0.2": 2}
        return
    with pytest.raises(UserError) as found:
        read_hostfile(tmp_path / "h")
    assert part in str(found.value)


# (what status.json of this job says, the launcher's exit code, whether it was asked to make room)
ENDS = [
    (("finished", 0, False), "finished"),
    (("finished", 143, True), "finished"),
    (("stopped", 75, True), "again"),
    (("stopped", 1, False), "again"),  # the deepspeed launcher hides exit codes
    (("failed", 1, False), "failed"),
    (("failed", 1, True), "failed"),
    (("running", 137, False), "again"),  # ranks were killed
    (("running", 76, False), "again"),
    (("running", 1, False), "again"),
    (("running", 2, False), "failed"),  # a second job beside the one that is running there
    ((None, 0, False), "finished"),  # it was finished before
    ((None, 2, False), "failed"),
    ((None, 1, False), "failed"),  # an import that fails
    ((None, 138, True), "again"),  # told to make room while Python started
    ((None, 137, False), "again"),
]


@pytest.mark.parametrize(("end", "becomes"), ENDS)
def test_only_what_may_go_better_is_queued_again(end: tuple[str | None, int, bool], becomes: str) -> None:
    status, code, asked = end
    assert verdict(Ended(status=status, code=code, asked=asked)) == becomes


def test_a_status_of_an_earlier_job_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "stopped"}')
    now = time.time()
    assert read_ended(tmp_path, code=1, since=now - 60, asked=False).status == "stopped"
    assert read_ended(tmp_path, code=1, since=now + 60, asked=False).status is None


def test_requeues_without_progress_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ended, env = Ended(status="running", code=137, asked=False), {"SLURM_JOB_ID": "42"}
    assert [requeue(tmp_path, ended, max_idle=2, env=env) for _ in range(4)] == [75, 75, 1, 1]
    assert calls.read_text() == "requeue 42\n" * 2
    assert read_requeues(tmp_path).count == 2
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told] == ["requeued", "requeued", "gave_up", "gave_up"]
    assert requeue(tmp_path, ended, max_idle=2, env={}) == 75  # under bash somebody starts it again
    assert requeue(tmp_path, Ended(status="failed", code=1, asked=True), max_idle=2, env=env) == 1
    assert requeue(tmp_path, Ended(status="finished", code=0, asked=False), max_idle=2, env=env) == 0
    assert calls.read_text() == "requeue 42\n" * 2
