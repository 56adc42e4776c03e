"""A run directory is held by one run at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_vcycle.checkpoint.store import set_latest
from ds_vcycle.config import UserError
from ds_vcycle.cycle import lock, runner
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


def test_what_a_run_has_read_must_be_the_latest_once_it_holds_the_directory(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have waited for a run that went on meanwhile: resuming from before would cut that run's records away."""
    changes = {"cycle": {"kind": "flat", "flat": {"steps": 2, "warmup_steps": 0}}, "saving.every_steps": 1}
    config = tiny_run(tmp_path / "run", changes=changes)
    assert run_training(config) == "finished"
    root, records = config.run_dir / "checkpoints", (config.run_dir / "metrics.jsonl").read_text()
    first, last = sorted(path.name for path in root.iterdir() if path.is_dir())
    set_latest(root, first)

    @contextmanager
    def waited(run_dir: Path) -> Iterator[None]:
        set_latest(root, last)
        with locked(run_dir):
            yield

    monkeypatch.setattr(runner, "locked", waited)
    with pytest.raises(UserError, match=f"another run has just written .*{last} there; go on with --resume"):
        run_training(config, resume="auto")
    assert (config.run_dir / "metrics.jsonl").read_text() == records
