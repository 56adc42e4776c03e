"""A run stopped in its coarse phase, rewritten for other ranks, goes on along the uninterrupted curve."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ds_vcycle import cli
from ds_vcycle.checkpoint.store import find_latest, open_checkpoint
from ds_vcycle.config import parse_config
from tests.dist.cases_resume import Attempt
from tests.resumed import attempts, records
from tests.tiny import tiny_run


@pytest.mark.parametrize("park", ["disk", pytest.param("host", marks=pytest.mark.full)])
def test_a_run_moves_to_another_layout_and_keeps_its_curve(tmp_path: Path, park: str) -> None:
    """From TP 2 and ZeRO 3 to two data-parallel ranks under ZeRO 1, in the midst of the cycle; and back."""
    changes = {"cycle.park": park, "logging.every_steps": 1}
    whole = tiny_run(tmp_path / "whole", tp=2, zero_stage=3, changes=changes)
    begun = tiny_run(tmp_path / "begun", tp=2, zero_stage=3, changes=changes)
    ended, stopped = attempts(Attempt(config=whole), Attempt(config=begun, disturb="step@5:0:SIGTERM"))
    assert (ended.text, stopped.text) == ("finished", "stopped")
    arguments = ["convert", "--from", str(begun.run_dir), "--to", str(tmp_path / "moved")]
    assert cli.run([*arguments, "--tp", "1", "--dp", "2", "--zero", "1"]) == 0
    moved = parse_config(yaml.safe_load((tmp_path / "moved" / "config.yaml").read_text()))
    assert moved.run_dir == tmp_path / "moved"
    (resumed,) = attempts(Attempt(config=moved, resume="always"))
    assert resumed.text == "finished"
    curves = [records(run_dir, "step", "evaluation") for run_dir in (tmp_path / "moved", whole.run_dir)]
    assert [(r["event"], r["step"]) for r in curves[0]] == [(r["event"], r["step"]) for r in curves[1]]
    assert [r["loss"] for r in curves[0]] == pytest.approx([r["loss"] for r in curves[1]], abs=1e-4)
    latest = find_latest(tmp_path / "moved" / "checkpoints")
    assert latest is not None
    with open_checkpoint(latest) as checkpoint:
        assert (checkpoint.tensor_parallel, checkpoint.state["adam_step"]) == (1, 10)
