"""A run directory is held by one run at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vcycle.config import UserError
from ds_vcycle.cycle import lock
from ds_vcycle.cycle.lock import locked
from ds_vcycle.cycle.runner import run_training
from tests.operator_models import single_process
from tests.tiny import tiny_run

group = pytest.fixture(single_process, scope="module")


def test_a_second_run_is_refused_while_the_first_goes_on(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.5)
    config = tiny_run(tmp_path / "run", changes={"cycle": {"kind": "flat", "flat": {"steps": 1, "warmup_steps": 0}}})
    config.run_dir.mkdir()
    with locked(config.run_dir), pytest.raises(UserError, match=r"^run_dir=.*run is in use by a run that is going on"):
        run_training(config, resume="auto")
    assert list(config.run_dir.iterdir()) == []
    assert run_training(config, resume="auto") == "finished"
    with locked(config.run_dir):
        assert run_training(config, resume="auto") == "finished"  # nothing to do needs no lock
