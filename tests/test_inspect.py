"""``ds-vcycle inspect``: what it says of each kind of checkpoint, and its exit code for damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle import cli
from ds_vcycle.sharding.placement import Layout
from tests.stored_runs import PARKED, STEP, stored_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in its coarse phase: level 2 with moments from two ranks under TP 2, level 1 parked."""
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    return stored_run(run_dir, Layout(world_size=2, tp=2, zero_stage=1)).run_dir


def _inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.run(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_one_screen_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _inspected(capsys, run)
    assert text.splitlines()[0] == str(run / "checkpoints" / STEP)
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines()[1:])) <= 160
    for expected in (
        "checkpoint of a run, its latest; saved 20",
        "phase 3 of 5 (train level 2), step 80 of 100; step 120 of the run, 240 samples, 1,920 tokens",
        "bert, level 2 of 2: layers 2, hidden 6, heads 4, ffn 12, vocabulary 61 (padded to 256), sequence 8",
        "fp32 masters, computed with in fp32",
        "moments     Adam's, of step 120",
        "2 ranks: tensor parallel 2 x data parallel 1, ZeRO 1",
        "needs       parked-01-level-1 (",
        "checksums   ok, of ",
        "ds-vcycle 0",
    ):
        assert expected in text, text


def test_as_json_by_step_and_the_parked_level_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(_inspected(capsys, f"{run}@120", "--json", "--no-verify"))
    assert found["directory"] == str(run / "checkpoints" / STEP)
    assert (found["level"], found["phase"], found["phase_step"], found["samples"]) == (2, 2, 80, 240)
    assert (found["tensor_parallel"], found["ranks"], found["adam_step"], found["verified"]) == (2, 2, 120, False)
    assert found["shape"]["hidden"] == 6 and found["bytes"] > 3 * 4 * found["elements"]
    parked = _inspected(capsys, f"{run}@{PARKED}")
    assert "parked level; saved" in parked and "moments     none" in parked and "model       level 1" in parked


@pytest.mark.parametrize("level", ["own", "parked"])
def test_damage_is_named_and_exits_with_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    """A flipped bit is told by checksums alone; without them the names and sizes are still compared."""
    shutil.copytree(run, tmp_path / "run")
    directory = tmp_path / "run" / "checkpoints" / (STEP if level == "own" else PARKED)
    path = directory / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cli.run(["inspect", str(tmp_path / "run")]) == 2
    assert f"{path} is damaged: the checksum of" in capsys.readouterr().err
    assert "not compared" in _inspected(capsys, tmp_path / "run", "--no-verify")
    path.write_bytes(data[:-1])
    assert cli.run(["inspect", str(tmp_path / "run"), "--no-verify"]) == 2
    assert f"{path} has {len(data) - 1} bytes, the manifest says {len(data)}" in capsys.readouterr().err


def test_what_is_no_checkpoint_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist; give a checkpoint directory" in capsys.readouterr().err
