"""Saves in the background: the bits of blocking ones, one at a time, and nothing lost by a kill or a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.cases_resume import Attempt
from tests.dist.ranks import run_ranks, values
from tests.resumed import assert_same_run, attempts, contents, records, write_config
from tests.tiny import tiny_run

_CASES = "tests.dist.cases_background"
_CHANGES = {
    "model.layers": 2, "model.dropout": 0.1, "cycle.coarse.steps": 3, "cycle.final.steps": 2, "evaluation.samples": 4,
    "saving.every_steps": 1, "saving.keep_last": 50,
}  # fmt: skip
_BACKGROUND = {**_CHANGES, "saving.background": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_saves_in_quick_succession_are_made_one_after_the_other(tmp_path: Path, ranks: int) -> None:
    for told in values(ranks, f"{_CASES}:one_after_the_other", [str(tmp_path)]):
        assert [flag for flag, held in told.flags.items() if not held] == []
        assert told.left == ["latest", "step-00000001-phase-00", "step-00000002-phase-00"]


def test_a_full_disk_in_the_background_is_one_error_at_the_next_step_on_every_rank(tmp_path: Path) -> None:
    told = values(2, f"{_CASES}:failing", [str(tmp_path), 1])
    assert told[0].errors == told[1].errors and len(told[0].errors) == 1
    assert "step-00000002-phase-00 was not saved: rank 1: " in told[0].errors[0]
    assert "some file: No space left on device; free space" in told[0].errors[0]
    for rank in told:
        assert [flag for flag, held in rank.flags.items() if not held] == []
    assert told[0].left == ["latest", "step-00000001-phase-00"]


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves after each step and waits for it."""
    config = tiny_run(tmp_path_factory.mktemp("runs") / "blocking", tp=2, changes=_CHANGES)
    assert attempts(Attempt(config=config))[0].text == "finished"
    return config.run_dir


def test_every_checkpoint_of_a_run_has_the_bits_of_a_blocking_one(tmp_path: Path, blocking: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_BACKGROUND)
    assert attempts(Attempt(config=config))[0].text == "finished"
    assert_same_run(config.run_dir, blocking)
    names = {path.name for path in (blocking / "checkpoints").iterdir()}
    assert names == {path.name for path in (config.run_dir / "checkpoints").iterdir()} and len(names) > 10
    for name in names - {"latest"}:
        mine, right = (contents(run_dir / "checkpoints" / name) for run_dir in (config.run_dir, blocking))
        assert mine.keys() == right.keys()
        assert [key for key in right if not torch.equal(mine[key], right[key])] == []
    saved = [[record["path"] for record in records(run_dir, "save")] for run_dir in (config.run_dir, blocking)]
    assert saved[0] == saved[1]


def test_a_kill_while_the_background_writes_costs_what_is_not_committed(tmp_path: Path, blocking: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_BACKGROUND)
    command = ["train", "--config", str(write_config(config, tmp_path / "run.yaml"))]
    target, log = "tests.dist.cases_resume:command_line", str(tmp_path / "log")
    killed = run_ranks(2, target, [command, log], env={"DS_VCYCLE_FAULT": "save.file@5:1"}, check=False, grace_s=1)
    assert killed[1].exit_code == 137 and killed[0].exit_code != 0
    resumed = run_ranks(2, target, [[*command, "--resume"], log], check=False)
    assert [result.exit_code for result in resumed] == [0, 0]
    assert "resumed from" in Path(f"{log}.0").read_text()
    assert_same_run(config.run_dir, blocking)
