"""A save is killed, loses its power, or is refused the disk at every single file operation: nothing is lost by it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from ds_vcycle.checkpoint.store import CheckpointError, find_latest, open_checkpoint, prune, set_latest
from tests.dist.cases_store import local_shards, read_all, same, save_simulated
from tests.file_operations import Operation, intercepted, killed

_OLD, _NEW, _PARKED, _LAST = "step-00000001", "step-00000002", "parked-01-level-1", "step-00000009"
_SEEDS = {_PARKED: 0, _OLD: 1, _NEW: 2, _LAST: 9}
_SHARDS = {seed: local_shards(1, seed=seed, keys=("master",)) for seed in (0, 1, 2, 3, 9)}


def _save(root: Path, name: str, seed: int, *, ranks: int = 1, references: tuple[str, ...] = ()) -> None:
    outcome = save_simulated(root / name, _SHARDS[seed], dp=ranks, state={"seed": seed}, references=references)
    errors = [error for error in outcome if error is not None]
    if errors:
        raise errors[0]


def _advance(root: Path) -> None:
    """What a run does at a save: a new checkpoint becomes the latest; the old one goes, and what only it needs."""
    _save(root, _NEW, 2)
    set_latest(root, _NEW)
    prune(root, 1)


def _advance_two_ranks(root: Path) -> None:
    _save(root, _NEW, 2, ranks=2)
    set_latest(root, _NEW)
    prune(root, 1)


def _park(root: Path) -> None:
    """A coalesce: the parked level first, then a checkpoint that needs it."""
    _save(root, "parked-02-level-1", 3)
    _save(root, _NEW, 2, references=("parked-02-level-1",))
    set_latest(root, _NEW)


def _again(root: Path) -> None:
    """A checkpoint of the same name takes the old one's place."""
    _save(root, _OLD, 2, references=(_PARKED,))
    set_latest(root, _OLD)


def _with_old(root: Path) -> Path:
    """A run's checkpoints: an old one that needs a parked level, and is the latest."""
    _save(root, _PARKED, 0)
    _save(root, _OLD, 1, references=(_PARKED,))
    set_latest(root, _OLD)
    return root


def _with_leftovers(root: Path) -> Path:
    """The same, after a save was killed while it replaced the old one, and a removal before it was done."""
    _with_old(root)
    shutil.copytree(root / _PARKED, root / ".trash-step-00000000")
    shutil.copytree(root / _PARKED, root / ".tmp-step-00000002-0123abcd")
    (root / _OLD).rename(root / f".replaced-{_OLD}")
    return root


def _nothing(root: Path) -> Path:
    return root


def _seed_of(path: Path) -> int:
    """Which numbers a checkpoint holds, bit for bit and with all that it needs."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        seed: int = checkpoint.state["seed"]
        assert same(read_all(checkpoint, 1), _SHARDS[seed])
        for name in checkpoint.manifest.references:
            assert _seed_of(path.parent / name) in (0, 3)
        return seed


def _check(root: Path, allowed: set[int]) -> int | None:
    """The latest checkpoint is the old one or the new one, whole; and the next save goes well and clears up."""
    latest = find_latest(root)
    seed = None if latest is None else _seed_of(latest)
    assert seed in allowed or (seed is None and not allowed & {1}), f"the latest holds {seed}"
    if seed == 1:
        assert latest == root / _OLD or not (root / _OLD).exists()
    _save(root, _LAST, 9)
    set_latest(root, _LAST)
    prune(root, 1)
    assert _seed_of(root / _LAST) == 9
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    return seed


def _recorded(scenario: Callable[[Path], None], root: Path) -> list[Operation]:
    seen: list[Operation] = []
    with intercepted(seen.append):
        scenario(root)
    return seen


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sync is for is simulated; the real one takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize(
    ("before", "scenario"),
    [
        (_nothing, _advance),
        (_with_leftovers, _advance),
        (_with_old, _advance_two_ranks),
        (_with_old, _park),
        (_with_leftovers, _again),
    ],
)
def test_no_file_operation_of_a_save_can_lose_a_checkpoint(
    tmp_path: Path, before: Callable[[Path], Path], scenario: Callable[[Path], None], power: bool
) -> None:
    operations = _recorded(scenario, before(tmp_path / "count"))
    kinds = Counter(operation.kind for operation in operations)
    assert {"open", "write", "fsync", "mkdir", "rename", "replace"} <= kinds.keys() and len(operations) > 20
    allowed, seeds = ({2} if before is _nothing else {1, 2}), []
    for at in range(len(operations) + 1):
        root = before(tmp_path / str(at))
        code = killed(scenario, root, at, power=power)
        assert code == (137 if at < len(operations) else 0)
        root.mkdir(exist_ok=True, parents=True)
        try:
            seeds.append(_check(root, allowed))
        except (CheckpointError, AssertionError, OSError) as error:
            raise AssertionError(f"operation {at} of {len(operations)}, {operations[at : at + 1]}: {error}") from error
        shutil.rmtree(root)
    assert seeds[-1] == 2
    assert seeds == sorted(seeds, key=lambda seed: seed or 0), "the new one was there, and then it was not"


@pytest.mark.parametrize(
    ("before", "scenario"), [(_with_old, _advance), (_with_old, _advance_two_ranks), (_with_old, _again)]
)
def test_a_full_disk_is_named_wherever_it_fills_up(
    tmp_path: Path, before: Callable[[Path], Path], scenario: Callable[[Path], None]
) -> None:
    """From one operation on nothing more fits; removing and renaming still work. What was begun is cleared up."""
    growing = {"open", "write", "fsync", "mkdir"}
    wanted = _recorded(scenario, before(tmp_path / "count"))
    full = 0

    def fill(operation: Operation) -> None:
        nonlocal full
        if operation.kind in growing:
            full -= 1
            if full < 0:
                operation.begin()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for at in range(sum(operation.kind in growing for operation in wanted)):
        root = before(tmp_path / str(at))
        full = at
        with pytest.raises(CheckpointError, match=f"{root}/.*No space left on device.*; free space"), intercepted(fill):
            scenario(root)
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
        assert _seed_of(root / _OLD) == 1 or scenario is _again
        _check(root, {1, 2})


def _failing(at: int) -> Callable[[Operation], None]:
    """Refuse the operation with this number."""
    numbers = count()

    def fail(operation: Operation) -> None:
        if next(numbers) == at:
            operation.begin()
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    return fail


@pytest.mark.parametrize(
    ("before", "scenario"), [(_with_leftovers, _advance), (_with_old, _advance_two_ranks), (_with_old, _again)]
)
def test_any_single_operation_may_fail(
    tmp_path: Path, before: Callable[[Path], Path], scenario: Callable[[Path], None]
) -> None:
    """The disk fails once, at any operation: the error says so, or what failed did not matter."""
    operations = _recorded(scenario, before(tmp_path / "count"))
    silent = []
    for at in range(len(operations)):
        root = before(tmp_path / str(at))
        try:
            with intercepted(_failing(at)):
                scenario(root)
            silent.append(operations[at].kind)
        except CheckpointError as error:
            assert "Input/output error" in str(error) and str(root) in str(error)
        _check(root, {1, 2})
    assert set(silent) <= {"unlink", "rmdir"}, silent


@pytest.mark.parametrize(
    ("limit", "file"), [(0, "rank-00000.safetensors"), (100, "rank-00000.safetensors"), (1500, "manifest.json")]
)
def test_a_real_short_write_is_named(tmp_path: Path, limit: int, file: str) -> None:
    """The kernel writes a part of what is asked for, then refuses: as on a full disk."""
    root = _with_old(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=f"{file}: File too large; free space"):
            _save(root, _NEW, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in root.iterdir()) == ["latest", _PARKED, _OLD]
    _check(root, {1})
