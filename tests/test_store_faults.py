"""No instant of a save loses the previous checkpoint: kills at each point, full disks, removal of old ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vcycle.checkpoint import commit, retention, shards
from ds_vcycle.checkpoint.store import CheckpointError, find_latest, open_checkpoint, prune, set_latest
from tests.dist.cases_store import local_shards, read_all, same, save_and_mark, save_simulated
from tests.dist.ranks import run_ranks


def _holds(path: Path | None, seed: int) -> bool:
    assert path is not None
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        return checkpoint.state == {"seed": seed} and same(read_all(checkpoint, 1), local_shards(1, seed=seed))


@pytest.mark.parametrize(
    ("point", "latest"),
    [
        ("save.begin", 1),
        ("save.written", 1),
        ("save.manifest", 1),
        ("save.committed", 1),
        ("save.latest", 2),
        ("prune.renamed", 2),
    ],
)
def test_killed_at(tmp_path: Path, point: str, latest: int) -> None:
    """``latest`` moves only when the new checkpoint is whole; the next save clears up."""
    save_and_mark(str(tmp_path), 1)
    target, fault = "tests.dist.cases_store:save_and_mark", {"DS_VCYCLE_FAULT": point}
    (result,) = run_ranks(1, target, (str(tmp_path), 2, 1), env=fault, check=False)
    assert result.exit_code == 137
    assert _holds(find_latest(tmp_path), latest)
    if point != "prune.renamed":
        assert _holds(tmp_path / "step-00000001", 1)
    if point in ("save.committed", "save.latest"):
        assert _holds(tmp_path / "step-00000002", 2)
    else:
        assert [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    save_and_mark(str(tmp_path), 2)
    assert _holds(find_latest(tmp_path), 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_killed_while_replacing_a_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    """Between the two renames the old one is still found, by name and through ``latest``."""
    directory = tmp_path / "step-00000001"
    save_and_mark(str(tmp_path), 1)
    target, fault = "tests.dist.cases_store:save_and_mark", {"DS_VCYCLE_FAULT": "save.replacing"}
    (result,) = run_ranks(1, target, (str(tmp_path), 1), env=fault, check=False)
    assert result.exit_code == 137
    assert not directory.exists()
    assert _holds(directory, 1)
    assert _holds(find_latest(tmp_path), 1)
    save_and_mark(str(tmp_path), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
    assert _holds(directory, 1)


def test_replacing_a_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "step-00000001"
    save_simulated(directory, local_shards(1, seed=3), dp=3, state={"seed": 3})
    save_simulated(directory, local_shards(1, seed=4), dp=2, state={"seed": 4})
    assert _holds(directory, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_full_disk_on_one_rank_is_one_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_and_mark(str(tmp_path), 1)
    whole = shards._write_tensor

    def full(file: Any, tensor: torch.Tensor) -> Any:
        if "rank-00001" in file.name and file.tell() > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(file, tensor)

    monkeypatch.setattr(shards, "_write_tensor", full)
    errors = save_simulated(tmp_path / "step-00000002", local_shards(1, seed=2), dp=3)
    assert [type(error) for error in errors] == [CheckpointError] * 3
    assert len({str(error) for error in errors}) == 1
    assert "rank 1: " in str(errors[0]) and "rank-00001.safetensors: No space left on device; free space" in str(
        errors[0]
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert _holds(find_latest(tmp_path), 1)


@pytest.mark.parametrize("function", ["manifest_text", "publish", "clean"])
def test_rank_0_failing_alone_is_one_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    save_and_mark(str(tmp_path), 1)

    def refused(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "somewhere")

    monkeypatch.setattr(commit, function, refused)
    errors = save_simulated(tmp_path / "step-00000001", local_shards(1, seed=2), dp=2)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "rank 0: somewhere: Permission denied" in str(errors[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert _holds(find_latest(tmp_path), 1)


def test_a_failing_last_rename_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_and_mark(str(tmp_path), 1)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    (error,) = save_simulated(tmp_path / "step-00000001", local_shards(1, seed=2))
    assert "Input/output error" in str(error)
    assert _holds(tmp_path / "step-00000001", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_find_latest(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nothing") is None
    assert find_latest(tmp_path) is None
    for step in (1, 3, 2):
        save_simulated(tmp_path / f"step-{step:08d}", local_shards(1))
    save_simulated(tmp_path / "parked-1", local_shards(1))
    assert find_latest(tmp_path) == tmp_path / "step-00000002"  # saved last; a parked level cannot be resumed from
    set_latest(tmp_path, "step-00000001")
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
    for name in ("step-00000009\n", "../elsewhere", "..", ".", "", "\0", "a" * 5000):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(CheckpointError, match=r"latest names .*; restore it, or remove .* go on from .*00003"):
            find_latest(tmp_path)
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path) == tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match="step-00000009 is no checkpoint"):
        set_latest(tmp_path, "step-00000009")


def test_prune_keeps_what_is_needed(tmp_path: Path) -> None:
    for name in ("parked-1", "parked-2"):
        save_simulated(tmp_path / name, local_shards(1))
    for step in range(1, 7):
        references = {1: ["parked-1"], 5: ["parked-2"]}.get(step, [])
        save_simulated(tmp_path / f"step-{step:08d}", local_shards(1), references=references)
    set_latest(tmp_path, "step-00000005")
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    (tmp_path / "notes").mkdir()
    removed = prune(tmp_path, 1, {"step-00000002"})
    assert removed == ["step-00000001", "step-00000004"]  # parked-1 stays while one manifest cannot be read
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    assert prune(tmp_path, 1) == ["parked-1", "step-00000002"]
    left = ["latest", "notes", "parked-2", "step-00000003", "step-00000005", "step-00000006"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    with pytest.raises(CheckpointError, match="keep_last=0"):
        prune(tmp_path, 0)


def test_ends_of_phases_are_kept_if_asked_for(tmp_path: Path) -> None:
    save_simulated(tmp_path / "parked-1", local_shards(1))
    for step, done in ((1, True), (2, False), (3, True), (4, False)):
        references = ["parked-1"] if step == 1 else []
        state = {"position": {"done": done}}
        save_simulated(tmp_path / f"step-{step:08d}", local_shards(1), state=state, references=references)
    set_latest(tmp_path, "step-00000004")
    assert prune(tmp_path, 1, keep_phase_ends=True) == ["step-00000002"]
    assert prune(tmp_path, 1) == ["parked-1", "step-00000001", "step-00000003"]


def test_a_parked_level_newer_than_latest_stays(tmp_path: Path) -> None:
    """Between parking the fine level and the first save of the coarse one, nothing references it yet."""
    save_simulated(tmp_path / "step-00000001", local_shards(1))
    set_latest(tmp_path, "step-00000001")
    save_simulated(tmp_path / "parked-1", local_shards(1))
    assert prune(tmp_path, 1) == []


def test_prune_that_cannot_rename_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_and_mark(str(tmp_path), step)

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000001 cannot be removed \(Permission denied\)"):
        prune(tmp_path, 1)
    assert retention.settled(tmp_path / "step-00000001").is_dir()
