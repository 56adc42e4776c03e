"""An export that replaces another is killed, loses its power, or is refused the disk at every file operation."""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

import pytest
from torch import Tensor

from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.offline.convert_huggingface import convert
from ds_vcycle.checkpoint.offline.inputs import open_source
from ds_vcycle.checkpoint.offline.output import Output
from tests.file_operations import Operation, intercepted, killed
from tests.huggingface_models import change_tensors, save_model, tensors_in

_BIAS = "transformer.ln_f.bias"


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sync is for is simulated; the real one takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``store`` is to be exported as ``to``, where another model with the same names is."""
    source = save_model("gpt2", tmp_path / "hf", n_layer=1)
    convert(source, Output(to=tmp_path / "store"))
    change_tensors(source, **{_BIAS: tensors_in(source)[_BIAS] * 2})
    convert(source, Output(to=tmp_path / "to", form="huggingface"))
    return tmp_path


def _export(root: Path) -> None:
    convert(root / "store", Output(to=root / "to", overwrite=True, max_shard_size="50KB"))


def _operations(root: Path) -> list[Operation]:
    seen: list[Operation] = []
    with intercepted(seen.append):
        _export(root)
    return seen


def _replaced(root: Path, new: Tensor, other: Tensor) -> bool:
    """Whether the new model is there; otherwise the old one is, whole. And the next export clears up."""
    with open_source(root / "to", config=None, overrides=()) as found:
        held = tensors_in(found.directory)
    assert held.keys() == tensors_in(root / "hf").keys()
    assert held[_BIAS].equal(new) or held[_BIAS].equal(other)
    convert(root / "hf", Output(to=root / "to", form="huggingface", overwrite=True))
    assert sorted(path.name for path in root.iterdir()) == ["hf", "store", "to"]
    return held[_BIAS].equal(new)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_the_old_model_or_the_new_one_is_there_whole(root: Path, power: bool) -> None:
    old = tensors_in(root / "hf")[_BIAS]
    kinds = [operation.kind for operation in _operations(root)]
    assert {"open", "write", "fsync", "mkdir", "rename"} <= set(kinds)
    # The first of several writes in a row stands for them, as half of it is written; a kill alone takes no contents
    steps = [at for at, kind in enumerate(kinds) if kind != "write" or (power and kinds[at - 1] != "write")]
    steps = steps if power else [at for at in steps if kinds[at] not in ("open", "fsync")]
    convert(root / "hf", Output(to=root / "to", form="huggingface", overwrite=True))
    outcomes = []
    for at in [*steps, len(kinds)]:
        assert killed(_export, root, at, power=power) == (137 if at < len(kinds) else 0)
        outcomes.append(_replaced(root, old / 2, old))
    assert outcomes[-1] and outcomes == sorted(outcomes)


def test_a_full_disk_is_named_and_leaves_the_old_model(root: Path) -> None:
    growing = {"open", "write", "fsync", "mkdir"}
    wanted = sum(operation.kind in growing for operation in _operations(root))
    assert wanted > 20
    before = tensors_in(root / "to")
    for at in range(0, wanted, 2):
        numbers = count()

        def fill(operation: Operation, at: int = at, numbers: count[int] = numbers) -> None:
            if operation.kind in growing and next(numbers) >= at:
                operation.begin()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.raises(CheckpointError, match="No space left on device; free space"), intercepted(fill):
            _export(root)
        assert sorted(path.name for path in root.iterdir()) == ["hf", "store", "to"]
        held = tensors_in(root / "to")
        assert held.keys() == before.keys() and all(held[name].equal(before[name]) for name in held)
