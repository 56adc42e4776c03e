"""Saves in the background on real ranks, of made-up fragments: what they write, in which order, and how they fail."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from ds_vcycle.checkpoint.store import CheckpointError, StoredFragment, find_latest, open_checkpoint
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.cycle import saves
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.schedule import expand
from ds_vcycle.levels import resolve_levels
from ds_vcycle.parallel import Mesh, any_rank, init_distributed, mesh_for
from ds_vcycle.train.metrics import Totals
from tests.dist.cases_store import fragments_of, local_shards, read_all, same

_SLOW_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a case has seen on a rank."""

    flags: dict[str, bool]
    errors: list[str]
    left: list[str]


def _config(run_dir: str) -> RunConfig:
    return parse_config(
        {
            "model": {
                "architecture": "gpt",
                "layers": 1,
                "hidden": 4,
                "heads": 1,
                "sequence_length": 4,
                "vocab_size": 4,
            },
            "cycle": {"kind": "flat", "flat": {"steps": 9}},
            "training": {"global_batch": 2, "micro_batch": 1},
            "saving": {"background": True, "keep_last": 9},
            "data": {"path": "unused"},
            "run_dir": run_dir,
        }
    )


@contextmanager
def _simulated(mesh: Mesh, held: list[StoredFragment], writes: list[str], failing: int | None = None) -> Iterator[None]:
    """Fragments instead of an engine's, and a slow disk that is full on rank ``failing``."""
    write_fragments = saves.write_fragments

    def slow(path: Path, *args: Any) -> Any:
        writes.append(f"begin {path.name.split('-')[2]}")
        time.sleep(_SLOW_S)
        if failing == mesh.rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "some file"))
        written = write_fragments(path, *args)
        writes.append(f"end {path.name.split('-')[2]}")
        return written

    replaced = {
        "engine_fragments": lambda *_: held,
        "engine_state": lambda *_: {},
        "write_fragments": slow,
    }
    with mock.patch.multiple(saves, **replaced):
        yield


def _position(step: int) -> Position:
    return Position(phase_step=step, totals=Totals(steps=step))


def _holds(directory: Path, seed: int) -> bool:
    with open_checkpoint(directory) as checkpoint:
        checkpoint.verify()
        return same(read_all(checkpoint, 1), local_shards(1, seed=seed))


def one_after_the_other(run_dir: str) -> Told:
    """Two saves at once, the weights changing in between: each holds what was when it began."""
    init_distributed("cpu")
    mesh, config, writes = mesh_for(1), _config(run_dir), list[str]()
    held = fragments_of(local_shards(1, seed=1), tp=1, dp=mesh.dp_size, rank=mesh.rank)
    level, root, engine = resolve_levels(config)[0], Path(run_dir, "checkpoints"), mock.Mock()
    made = saves.Saves(config, expand(config))
    with _simulated(mesh, held, writes):
        first = made.save(_position(1), engine, level, mesh)
        nothing_yet = find_latest(root) if any(root.glob("step*")) else None
        any_rank(False)  # both have looked
        later = fragments_of(local_shards(1, seed=2), tp=1, dp=mesh.dp_size, rank=mesh.rank)
        for fragment, changed in zip(held, later, strict=True):  # training goes on
            for key, tensor in fragment.tensors.items():
                tensor.copy_(changed.tensors[key])
        polled = made.poll()
        second = made.save(_position(2), engine, level, mesh)
        for fragment in held:
            for tensor in fragment.tensors.values():
                tensor.zero_()
        third: list[saves.Saved] = []
        while not third:  # what a run does at its step boundaries
            time.sleep(0.02)
            third = made.poll()
        nothing = made.finish()
    made.close()
    (one,), (two,) = second, third
    flags = {
        "the first has only begun": first == polled == [] and nothing_yet is None,
        "the second waited for it": one.position.totals.steps == 1 and two.position.totals.steps == 2,
        "one at a time": writes == [f"{what} {step:08d}" for step in (1, 2) for what in ("begin", "end")],
        "what was when it began": _holds(root / "step-00000001-phase-00", 1) and _holds(root / two.position.name, 2),
        "the last is the latest": find_latest(root) == root / two.position.name and nothing == [],
        "training hardly stood": two.stall_seconds < _SLOW_S / 2 < _SLOW_S <= two.own_seconds,
        "waiting counts": one.own_seconds >= one.stall_seconds > _SLOW_S / 4,
    }
    return Told(flags=flags, errors=[], left=sorted(path.name for path in root.iterdir()))


def failing(run_dir: str, rank: int) -> Told:
    """The disk of one rank is full while it writes in the background, once; the save after that goes well."""
    init_distributed("cpu")
    mesh, config, errors = mesh_for(1), _config(run_dir), list[str]()
    held = fragments_of(local_shards(1, seed=1), tp=1, dp=mesh.dp_size, rank=mesh.rank)
    level, root = resolve_levels(config)[0], Path(run_dir, "checkpoints")
    made = saves.Saves(config, expand(config))
    with _simulated(mesh, held, []):
        made.save(_position(1), mock.Mock(), level, mesh)
        made.finish()
    with _simulated(mesh, held, [], failing=rank):
        made.save(_position(2), mock.Mock(), level, mesh)
        while not errors:
            time.sleep(0.02)
            try:
                assert made.poll() == []
            except CheckpointError as error:
                errors.append(str(error))
    intact = find_latest(root) == root / "step-00000001-phase-00" and _holds(root / "step-00000001-phase-00", 1)
    left = sorted(path.name for path in root.iterdir())
    any_rank(False)
    with _simulated(mesh, held, []):
        made.save(_position(3), mock.Mock(), level, mesh)
        (third,) = made.finish()
    made.close()
    flags = {"the first is intact": intact, "the next goes well": _holds(root / third.position.name, 1)}
    return Told(flags=flags, errors=errors, left=left)
