"""A damaged, incomplete or foreign checkpoint is refused, and the message says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.checkpoint.store import CheckpointError, open_checkpoint
from tests.dist.cases_store import local_shards, save_simulated

FILE = "rank-00001.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of four ranks, and beside it one of the same layout with other numbers."""
    save_simulated(tmp_path / "step-00000001", local_shards(2), tp=2, dp=2)
    save_simulated(tmp_path / "step-00000002", local_shards(2, seed=1), tp=2, dp=2)
    return tmp_path / "step-00000001"


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def _edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _truncate(directory: Path) -> None:
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:-1])


def _swap_files(directory: Path) -> None:
    shutil.copy(directory.with_name("step-00000002") / FILE, directory / FILE)


def _tensor_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "step-00000001 is no checkpoint: manifest.json cannot be read"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "is no checkpoint: manifest.json"),
    "cut manifest": (lambda d: (d / "manifest.json").write_text('{"format": '), "manifest.json is damaged"),
    "binary manifest": (lambda d: (d / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json is damaged"),
    "other JSON": (lambda d: (d / "manifest.json").write_text("[1]"), "manifest.json is not a manifest of ds-vcycle"),
    "other format": (lambda d: _edit(d, lambda m: m.update(format="x")), "is not a manifest of ds-vcycle"),
    "other version": (lambda d: _edit(d, lambda m: m.update(version=99)), "format version 99, .* reads version 1"),
    "edited state": (lambda d: _edit(d, lambda m: m["state"].update(step=7)), "manifest.json .*was edited"),
    "edited shape": (lambda d: _edit(d, lambda m: m["parameters"].popitem()), "manifest.json .*was edited"),
    "no checksum": (lambda d: _edit(d, lambda m: m.pop("checksum")), "manifest.json .*was edited"),
    "missing file": (lambda d: (d / FILE).unlink(), f"{FILE} is missing"),
    "empty file": (lambda d: (d / FILE).write_bytes(b""), f"{FILE} has 0 bytes"),
    "truncated file": (_truncate, f"{FILE} has .* bytes, the manifest says"),
    "longer file": (lambda d: (d / FILE).write_bytes((d / FILE).read_bytes() + b"0"), f"{FILE} has .* bytes"),
    "file too many": (
        lambda d: shutil.copy(d / FILE, d / "rank-00009.safetensors"),
        "rank-00009.safetensors is not of this",
    ),
    "file of another checkpoint": (_swap_files, f"{FILE} belongs to another checkpoint"),
    "another rank's file": (lambda d: shutil.copy(d / "rank-00003.safetensors", d / FILE), f"{FILE} "),
    "zeroed file": (lambda d: (d / FILE).write_bytes(b"\0" * (d / FILE).stat().st_size), f"{FILE} is damaged"),
    "bit in the header's length": (lambda d: _flip(d / FILE, 0), f"{FILE} is damaged"),
    "bit in the header": (lambda d: _flip(d / FILE, 9), f"{FILE} "),
    "first bit of the tensors": (
        lambda d: _flip(d / FILE, _tensor_start(d / FILE)),
        rf"{FILE} is damaged: .*\.(weight|bias)/",
    ),
    "bit of the last float": (lambda d: _flip(d / FILE, -4), f"{FILE} is damaged: the checksum of"),
    "bit of the RNG state": (lambda d: _flip(d / FILE, -1), f"{FILE} is damaged: the checksum of extra/rng"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(saved: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(saved)
    with pytest.raises(CheckpointError, match=message), open_checkpoint(saved) as checkpoint:
        checkpoint.verify()
    with open_checkpoint(saved.with_name("step-00000002")) as checkpoint:
        checkpoint.verify()


def test_a_referenced_checkpoint_must_be_there(tmp_path: Path) -> None:
    save_simulated(tmp_path / "parked-1", local_shards(1))
    save_simulated(tmp_path / "step-00000001", local_shards(1), references=["parked-1"])
    open_checkpoint(tmp_path / "step-00000001").close()
    shutil.rmtree(tmp_path / "parked-1")
    with pytest.raises(CheckpointError, match=r"needs checkpoint .*parked-1, which is missing"):
        open_checkpoint(tmp_path / "step-00000001")
