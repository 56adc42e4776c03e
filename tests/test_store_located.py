"""Which checkpoint a path, a run directory or RUN@STEP means."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vcycle.checkpoint.recorded import locate_checkpoint
from ds_vcycle.checkpoint.store import CheckpointError, set_latest
from tests.dist.cases_store import local_shards, save_simulated

_NAMES = ("step-00000002-phase-00", "step-00000002-phase-01", "step-00000010-phase-02", "parked-01-level-1")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose name has an @ in it."""
    for name in _NAMES:
        save_simulated(tmp_path / "m@n" / "checkpoints" / name, local_shards(1))
    set_latest(tmp_path / "m@n" / "checkpoints", _NAMES[1])
    return tmp_path / "m@n"


@pytest.mark.parametrize(
    ("suffix", "name"),
    [
        ("", _NAMES[1]),
        ("/checkpoints", _NAMES[1]),
        ("@10", _NAMES[2]),
        ("@00000010", _NAMES[2]),
        ("/checkpoints@10", _NAMES[2]),
        ("@step-00000002-phase-00", _NAMES[0]),
        ("@parked-01-level-1", _NAMES[3]),
        ("/checkpoints/step-00000010-phase-02", _NAMES[2]),
    ],
)
def test_what_is_meant(run: Path, suffix: str, name: str) -> None:
    assert locate_checkpoint(Path(f"{run}{suffix}")) == run / "checkpoints" / name


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("@2", r"@2: .*m@n has 2 checkpoints of that step; give one by its name, of: step-00000002-phase-00, step-000"),
        ("@3", r"@3: .*m@n has no checkpoint of that step; give one by its name, of: parked-01-level-1, step-00000002"),
        ("@latest", r"m@n has no checkpoint of that step"),
        ("x@2", r"x has no checkpoint of that step; give one by its name, of: none"),
        ("/latest", "does not exist; give a checkpoint directory"),
        ("/checkpoints/latest", "is a file; give"),
    ],
)
def test_what_is_not_there_is_named(run: Path, suffix: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        locate_checkpoint(Path(f"{run}{suffix}"))
