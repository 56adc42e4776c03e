"""A damaged, incomplete, foreign or inconsistent checkpoint is refused, and the message says what is wrong.

What is wrong with the manifest is done twice: as an edit, which its own checksum tells, and as a forgery whose checksum
is right, as a writer with a fault would leave it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.checkpoint.store import CheckpointError, open_checkpoint
from ds_vcycle.schema import Parameter
from tests.dist.cases_store import PARAMETERS, local_shards, save_simulated

FILE, LATER = "rank-00001.safetensors", "rank-00003.safetensors"  # the later one holds fc2


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


def _forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and give it a checksum that is right."""
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["checksum"] = "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _forged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda directory: _forge(directory, change)


def _fragment(manifest: dict[str, Any], parameter: str, file: str = LATER) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in manifest["files"][file]["fragments"] if f["parameter"] == parameter)
    return found


def _drop(manifest: dict[str, Any], parameter: str) -> None:
    for file in manifest["files"].values():
        file["fragments"] = [f for f in file["fragments"] if f["parameter"] != parameter]


def _rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file's table without changing its length: what is longer takes the place of blanks."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= start - 8
    path.write_bytes(data[:8] + text.ljust(start - 8) + data[start:])


def _swap_two(directory: Path) -> None:
    first, second = (directory / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    first.rename(directory / "kept")
    second.rename(first)
    (directory / "kept").rename(second)


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
    "other version": (lambda d: _edit(d, lambda m: m.update(version=99)), "format version 99, .* reads version 2"),
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
    "two files swapped": (_swap_two, r"rank-0000[01]\.safetensors (has .* bytes|holds what belongs into rank-0000)"),
    "cut in the middle": (lambda d: (d / FILE).write_bytes((d / FILE).read_bytes()[:200]), f"{FILE} has 200 bytes"),
    "cut after the header's length": (lambda d: (d / FILE).write_bytes((d / FILE).read_bytes()[:8]), f"{FILE} has 8 b"),
    "zeroed file": (lambda d: (d / FILE).write_bytes(b"\0" * (d / FILE).stat().st_size), f"{FILE} is damaged"),
    "bit in the header's length": (lambda d: _flip(d / FILE, 0), f"{FILE} is damaged"),
    "bit in the header": (lambda d: _flip(d / FILE, 9), f"{FILE} "),
    "first bit of the tensors": (
        lambda d: _flip(d / FILE, _tensor_start(d / FILE)),
        rf"{FILE} is damaged: .*\.(weight|bias)/",
    ),
    "bit of the last float": (lambda d: _flip(d / FILE, -4), f"{FILE} is damaged: the checksum of"),
    "another dtype in the file": (
        lambda d: _rewrite_header(d / LATER, lambda h: h["fc2.weight/1/0/master"].update(dtype="I32")),
        rf"{LATER} is damaged: fc2.weight/1/0/master is I32 \[15\], the manifest says F32 \[15\]",
    ),
    "another shape in the file": (
        lambda d: _rewrite_header(d / LATER, lambda h: h["fc2.weight/1/0/master"].update(shape=[3, 5])),
        rf"{LATER} is damaged: fc2.weight/1/0/master is F32 \[3, 5\], the manifest says F32 \[15\]",
    ),
    "an entry of the file that makes no sense": (
        lambda d: _rewrite_header(d / LATER, lambda h: h.update({"fc2.weight/1/0/master": 1})),
        f"{LATER} is damaged: its header's entry of fc2.weight/1/0/master makes no sense",
    ),
    "offsets beyond the file": (
        lambda d: _rewrite_header(d / LATER, lambda h: h["fc2.weight/1/0/master"].update(data_offsets=[9999, 9])),
        f"{LATER} is damaged: fc2.weight/1/0/master cannot be read .it ends before",
    ),
    "a tensor that is not in the file": (
        lambda d: _rewrite_header(d / LATER, lambda h: h.pop("fc2.weight/1/0/master")),
        f"{LATER} is damaged: fc2.weight/1/0/master is not in it",
    ),
    "forged: a key is missing": (_forged(lambda m: m.pop("world_size")), "manifest.json is malformed .*world_size"),
    "forged: a field too many": (
        _forged(lambda m: m["parameters"]["norm.weight"].update(colour=1)),
        "manifest.json is malformed .*colour",
    ),
    "forged: a path for a file name": (
        _forged(lambda m: m["files"].update({"../x": m["files"].pop(FILE)})),
        r"manifest.json is malformed .*file name '\.\./x' leads out",
    ),
    "forged: a parameter is stored nowhere": (
        _forged(lambda m: _drop(m, "norm.weight")),
        r"manifest.json is malformed: elements 0 to 5 of norm.weight \(exp_avg, .* in no rank's file",
    ),
    "forged: a fragment is missing": (
        _forged(lambda m: m["files"][LATER]["fragments"].remove(_fragment(m, "fc2.weight"))),
        r"manifest.json is malformed: elements 0 to 15 of fc2.weight \(exp_avg, tensor-parallel rank 1\) are in no",
    ),
    "forged: a gap": (
        _forged(lambda m: _fragment(m, "fc2.weight").update(length=14)),
        r"elements 14 to 15 of fc2.weight \(exp_avg, tensor-parallel rank 1\) are in no rank's file",
    ),
    "forged: an overlap": (
        _forged(lambda m: m["files"][LATER]["fragments"].append(_fragment(m, "fc2.weight"))),
        rf"elements 0 to 15 of fc2.weight \(exp_avg, tensor-parallel rank 1\) are in {LATER} and again in {LATER}",
    ),
    "forged: a fragment of a parameter there is not": (
        _forged(lambda m: _fragment(m, "fc2.weight").update(parameter="fc9.weight")),
        f"malformed .*{LATER}: fc9.weight is no parameter of the checkpoint",
    ),
    "forged: a fragment beyond its parameter": (
        _forged(lambda m: _fragment(m, "fc2.weight").update(start=3)),
        rf"malformed .*{LATER}: fc2.weight reaches past its shape \[5, 6\]",
    ),
    "forged: a negative range": (_forged(lambda m: _fragment(m, "fc2.weight").update(start=-1)), "fc2.weight reaches"),
    "forged: a rank there is not": (
        _forged(lambda m: _fragment(m, "fc2.weight").update(tp_rank=2)),
        f"malformed .*{LATER}: fc2.weight has no tensor-parallel rank 2",
    ),
    "forged: moments of one parameter only": (
        _forged(lambda m: _fragment(m, "fc2.weight")["tensors"].pop("exp_avg_sq")),
        r"elements 0 to 15 of fc2.weight \(exp_avg_sq, .*are in no rank's file",
    ),
    "forged: half precision": (
        _forged(lambda m: _fragment(m, "fc2.weight")["tensors"]["master"].update(dtype="F16")),
        f"malformed .*{LATER}: master of fc2.weight is F16, where F32 is kept",
    ),
    "forged: another shape": (
        _forged(lambda m: m["parameters"]["fc2.weight"].update(shape=[4, 6], padded_shape=[4, 6])),
        r"malformed .*safetensors: fc2.weight reaches past its shape \[4, 6\]",
    ),
    "forged: a degree that does not divide": (
        _forged(lambda m: m["parameters"]["fc2.weight"].update(tp=4)),
        "malformed .*fc2.weight: 6 rows over 4 ranks in 1 parts",
    ),
    "forged: padding below the shape": (
        _forged(lambda m: m["parameters"]["word.weight"].update(padded_shape=[8, 5])),
        r"malformed .*word.weight: shape \(13, 5\) padded to \(8, 5\)",
    ),
    "forged: a dim there is not": (
        _forged(lambda m: m["parameters"]["fc2.weight"].update(tp_dim=2)),
        r"malformed .*fc2.weight: shape \(5, 6\), tensor-parallel dim 2",
    ),
    "forged: another checksum": (
        _forged(lambda m: _fragment(m, "fc2.weight")["tensors"]["master"].update(checksum="crc32:00000000")),
        f"{LATER} is damaged: the checksum of fc2.weight/1/0/master does not match",
    ),
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


@pytest.mark.parametrize("length", [15, 14])
def test_reading_alone_finds_damage(saved: Path, length: int) -> None:
    """A whole tensor is compared on its way into memory, a part of one before it is read."""
    with open_checkpoint(saved) as checkpoint:
        checkpoint.read(PARAMETERS[3], tp=2, tp_rank=1, start=0, length=length, key="exp_avg")
        start = _tensor_start(saved / LATER)
        offset = json.loads((saved / LATER).read_bytes()[8:start])["fc2.weight/1/0/exp_avg"]["data_offsets"][1]
    _flip(saved / LATER, start + offset - 1)
    with (
        open_checkpoint(saved) as checkpoint,
        pytest.raises(CheckpointError, match=f"{LATER} is damaged: the checksum of fc2.weight/1/0/exp_avg"),
    ):
        checkpoint.read(PARAMETERS[3], tp=2, tp_rank=1, start=0, length=length, key="exp_avg")


# (what is done to the parked level, what the refusal of the checkpoint that needs it says)
PARKED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, r"step-00000001 needs checkpoint .*parked-1, which is missing; restore it"),
    "without its manifest": (lambda d: (d / "manifest.json").unlink(), "needs checkpoint .*parked-1, which is missing"),
    "damaged manifest": (lambda d: (d / "manifest.json").write_text("{"), r"parked-1/manifest.json is damaged"),
    "missing file": (lambda d: (d / "rank-00000.safetensors").unlink(), "parked-1/rank-00000.safetensors is missing"),
    "truncated file": (lambda d: (d / "rank-00000.safetensors").write_bytes(b"0"), "parked-1/rank-.* has 1 bytes"),
    "another one of the same name": (
        lambda d: save_simulated(d, local_shards(1, seed=3)),
        "step-00000001 needs checkpoint .*parked-1 as it was then, and that is another one now",
    ),
}


@pytest.mark.parametrize("damage", PARKED)
def test_damage_of_a_parked_level_is_named(tmp_path: Path, damage: str) -> None:
    change, message = PARKED[damage]
    save_simulated(tmp_path / "parked-1", local_shards(1))
    save_simulated(tmp_path / "step-00000001", local_shards(1), references=["parked-1"])
    open_checkpoint(tmp_path / "step-00000001").close()
    change(tmp_path / "parked-1")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "step-00000001")


def test_a_save_that_needs_what_is_not_there_fails_by_name(tmp_path: Path) -> None:
    (error,) = save_simulated(tmp_path / "step-00000001", local_shards(1), references=["parked-1"])
    assert "parked-1 is no checkpoint: manifest.json cannot be read" in str(error)
    assert list(tmp_path.iterdir()) == []


def _resized(index: int, dim: int, **changes: Any) -> list[Parameter]:
    """The model's parameters with one dim of one of them changed."""
    dims = list(PARAMETERS[index].dims)
    dims[dim] = replace(dims[dim], **changes)
    return [replace(p, dims=tuple(dims)) if i == index else p for i, p in enumerate(PARAMETERS)]


# (the parameters of the model that is to be filled, what the refusal says)
MODELS: dict[str, tuple[list[Parameter], str]] = {
    "a parameter more": (
        [*PARAMETERS, replace(PARAMETERS[1], template="more.bias")],
        "lacks parameters of the model: more.bias; use the configuration it was saved with",
    ),
    "a parameter less": (list(PARAMETERS[1:]), "holds parameters the model does not have: word.weight"),
    "another architecture's names": (
        [replace(p, template=f"encoder.{p.template}") for p in PARAMETERS],
        "lacks parameters of the model: encoder.fc1.weight, encoder.fc2.weight, encoder.norm.weight and 2 more",
    ),
    "another vocabulary": (_resized(0, 0, length=12, pad=4), r"word.weight has shape \[13, 5\].*model's is \[12, 5\]"),
    "another width": (_resized(1, 0, length=6), r"norm.weight has shape \[5\] .*the model's is \[6\]"),
    "another feed-forward width": (_resized(3, 1, length=12), r"fc2.weight has shape \[5, 6\] .*model's is \[5, 12\]"),
    "not gated": (_resized(2, 0, length=12, parts=1), r"fc1.weight .*stride 2\), the model's is .*stride 1\)"),
    "split by rows": (
        [replace(p, tp_dim=0) if p.template == "fc2.weight" else p for p in PARAMETERS],
        r"fc2.weight has shape .*tensor-parallel dim 1, .*the model's is .*tensor-parallel dim 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_another_model_is_refused_before_anything_is_read(saved: Path, model: str) -> None:
    wanted, message = MODELS[model]
    with open_checkpoint(saved) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.expect(wanted)
