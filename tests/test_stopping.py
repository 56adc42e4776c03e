"""Asked to stop, with a full disk, or with weights that are no numbers: a run ends cleanly and can go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vcycle.config import RunConfig
from tests.dist.cases_resume import Attempt
from tests.dist.ranks import run_ranks
from tests.resumed import assert_same_run, attempts, last_checkpoint, records, status, write_config
from tests.tiny import tiny_run

_CASES = "tests.dist.cases_resume"
_CHANGES = {"model.dropout": 0.1, "saving.every_steps": 2}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 + 4 + 3 steps on two ranks that nothing disturbed."""
    config = tiny_run(tmp_path_factory.mktemp("runs") / "uninterrupted", tp=2, changes=_CHANGES)
    assert attempts(Attempt(config=config))[0].text == "finished"
    return config.run_dir


# (where which rank gets which signal; phase and step of the run where it then stops)
STOPS = [
    ("step@2:1:SIGTERM", 0, 3),  # during the last step of the phase: its end is saved, not the step
    ("coalesce@1:0:SIGTERM", 1, 3),
    ("evaluation@1:1:SIGUSR1", 2, 6),  # after step 5, so step 6 is done
    ("save@1:1:SIGINT", 2, 7),
    ("refine@1:1:SIGUSR1", 3, 7),
    ("step@1:0:SIGTERM", 4, 9),
]


def test_stop_anywhere_and_go_on_with_the_same_bits(tmp_path: Path, uninterrupted: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_CHANGES)
    command = ["train", "--config", str(write_config(config, tmp_path / "run.yaml"))]
    first = run_ranks(
        2, f"{_CASES}:command_line", [command, str(tmp_path / "log"), "begin@1:1:SIGTERM"], check=False, wait_all=True
    )
    assert [result.exit_code for result in first] == [75, 75], first
    assert _place(status(config.run_dir)) == ("stopped", "SIGTERM", 0, 1)

    todo = [Attempt(config=config, resume="always", disturb=disturb) for disturb, *_ in STOPS]
    last = Attempt(config=config, resume="always", disturb="step@1:1:SIGTERM")  # during the run's last step
    *stopped, end = attempts(*todo, last)
    for outcome, (disturb, phase, step) in zip(stopped, STOPS, strict=True):
        assert outcome.text == "stopped"
        assert _place(outcome.status) == ("stopped", disturb.rpartition(":")[2], phase, step)
    assert end.text == "finished"
    assert_same_run(config.run_dir, uninterrupted)


def _place(found: dict[str, object]) -> tuple[object, ...]:
    return found["status"], found["reason"], found["phase"], found["step"]


def test_three_levels_and_a_phase_that_ends_early(tmp_path: Path) -> None:
    """BERT on two data-parallel ranks: stopped with two levels parked, with one, and after ``until_loss``."""
    changes = {
        "cycle": {
            "kind": "V", "levels": 3, "initial": {"steps": 1}, "coarse": {"steps": 5, "until_loss": 99.0},
            "final": {"steps": 2},
        },
        "model.dropout": 0.1, "saving.every_steps": 1,
    }  # fmt: skip
    whole, config = (
        tiny_run(tmp_path / name, "bert", zero_stage=2, changes=changes) for name in ("whole", "interrupted")
    )
    disturbances = ("coalesce@2:1:SIGTERM", "evaluation@1:0:SIGUSR1", "refine@1:1:SIGTERM", "step@1:0:SIGTERM", "")
    todo = [Attempt(config=config, resume="auto", disturb=disturb) for disturb in disturbances]
    first, *stopped, end = attempts(Attempt(config=whole), *todo)
    assert [first.text, end.text] == ["finished", "finished"]
    assert [(o.text, o.status["phase"], o.status["step"]) for o in stopped] == [
        ("stopped", 3, 2),
        ("stopped", 4, 4),  # its first evaluation, after two of five steps, ended the phase
        ("stopped", 5, 4),
        ("stopped", 6, 6),
    ]
    assert_same_run(config.run_dir, whole.run_dir)


# (where the disk of which rank is full, which file cannot be written)
FULL = [
    ("save@1:1:full", "rank-00001.safetensors"),
    ("park@1:0:full", "rank-00000.safetensors"),
    ("record@3:0:full", "metrics.jsonl"),
    ("describe@1:0:full", "run_dir="),
]


def test_full_disk_is_one_error_and_harms_nothing(tmp_path: Path, uninterrupted: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_CHANGES)
    todo = [Attempt(config=config, resume="auto", disturb=disturb) for disturb, _ in FULL]
    *failed, end = attempts(*todo, Attempt(config=config, resume="auto"))
    for outcome, (_, file) in zip(failed, FULL, strict=True):
        assert file in outcome.text and "File too large" in outcome.text, outcome.text
    assert [outcome.status["status"] for outcome in failed[:2]] == ["failed", "failed"]
    assert end.text == "finished"
    assert_same_run(config.run_dir, uninterrupted)
    assert not list((config.run_dir / "checkpoints").glob(".*"))


def _with(config: RunConfig, **every_steps: int) -> RunConfig:
    """The run with other intervals of saving and evaluation, which may change at a resume."""
    changes = {f"{section}.every_steps": steps for section, steps in every_steps.items()}
    return tiny_run(config.run_dir, tp=2, changes={**_CHANGES, **changes})


def test_weights_that_are_not_finite_stop_the_run_before_it_saves_them(tmp_path: Path, uninterrupted: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_CHANGES)
    *failed, end = attempts(
        Attempt(config=_with(config, saving=1, evaluation=50), disturb="step@4:1:poison"),
        Attempt(config=_with(config, saving=2, evaluation=50), resume="always", disturb="step@1:1:poison"),
        Attempt(config=_with(config, saving=4, evaluation=1), resume="always", disturb="step@1:0:poison"),
        Attempt(config=_with(config, saving=4, evaluation=2), resume="always"),
    )
    for outcome, problem, step in zip(failed, ("weights", "loss nan", "held-out loss nan"), (4, 5, 4), strict=True):
        assert outcome.text.startswith("TrainingError: phase 2 (level 2)"), outcome.text
        assert problem in outcome.text and f"step {step} of the run" in outcome.text
        assert str(config.run_dir / "checkpoints" / "step-00000003-phase-01") in outcome.text
        assert outcome.status["status"] == "failed"
    assert end.text == "finished"
    assert records(config.run_dir, "step") == records(uninterrupted, "step")


def test_exploding_learning_rate_exits_with_2_on_every_rank(tmp_path: Path) -> None:
    phases = [{"train": 1, "steps": 2, "warmup_steps": 0}, {"train": 1, "steps": 4, "lr": 1e30, "warmup_steps": 0}]
    changes = {"cycle": {"kind": "phases", "phases": phases}}
    config = tiny_run(tmp_path / "run", tp=2, zero_stage=3, changes=changes)
    command = ["train", "--config", str(write_config(config, tmp_path / "run.yaml"))]
    log = str(tmp_path / "log")
    results = run_ranks(2, f"{_CASES}:command_line", [command, log], check=False, wait_all=True)
    assert [result.exit_code for result in results] == [2, 2], results
    for rank in (0, 1):
        text = Path(f"{log}.{rank}").read_text()
        assert f"[rank {rank}] ds-vcycle: error: phase 1 (level 1), step 2 of it, step 4 of the run: loss nan" in text
    assert status(config.run_dir)["status"] == "failed"
    assert last_checkpoint(config.run_dir).name == "step-00000002-phase-00"
