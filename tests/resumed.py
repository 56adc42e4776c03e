"""Runs on several ranks, and what two of them left, compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from ds_vcycle.checkpoint.store import find_latest, open_checkpoint
from ds_vcycle.config import RunConfig
from tests.dist.cases_resume import Attempt, Outcome
from tests.dist.ranks import values

_WALL_TIME = {"seconds", "step_seconds", "own_seconds", "stall_seconds", "tokens_per_second"}


def write_config(config: RunConfig, path: Path) -> Path:
    """The configuration as a YAML file."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    return path


def records(run_dir: Path, *events: str) -> list[dict[str, Any]]:
    """Records of metrics.jsonl of these kinds in order, without wall time."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k not in _WALL_TIME} for record in found if record["event"] in events]


def status(run_dir: Path) -> dict[str, Any]:
    """What status.json says."""
    found: dict[str, Any] = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    return found


def last_checkpoint(run_dir: Path) -> Path:
    """The checkpoint ``latest`` names, all of its checksums verified."""
    path = find_latest(run_dir / "checkpoints")
    assert path is not None
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
    return path


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: fragments' masters and moments, and all ranks' random states."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_run(run_dir: Path, uninterrupted: Path) -> None:
    """The last checkpoints hold the same bits and the same position, and the metrics tell the same story once."""
    for events in (("step",), ("evaluation",), ("transition",), ("transition_loss",)):
        assert records(run_dir, *events) == records(uninterrupted, *events)
    ours, theirs = last_checkpoint(run_dir), last_checkpoint(uninterrupted)
    assert ours.name == theirs.name
    mine, wanted = contents(ours), contents(theirs)
    assert mine.keys() == wanted.keys()
    assert any(name.endswith("/exp_avg_sq") for name in wanted)
    differing = [name for name in wanted if not torch.equal(mine[name], wanted[name])]
    assert not differing, differing[:5]
    assert _state(ours) == _state(theirs)
    assert status(run_dir)["status"] == "finished"


def _state(checkpoint: Path) -> dict[str, Any]:
    with open_checkpoint(checkpoint) as opened:
        state: dict[str, Any] = json.loads(json.dumps(opened.state))
    state["position"]["totals"].pop("seconds")
    return {key: state[key] for key in ("position", "phases", "adam_step", "counters")}


def attempts(*todo: Attempt, world_size: int = 2) -> list[Outcome]:
    """The attempts' outcomes in one launch; every rank must have had the same."""
    by_rank = values(world_size, "tests.dist.cases_resume:attempts", [todo])
    for other in by_rank[1:]:
        assert list(map(_message, other)) == list(map(_message, by_rank[0]))
    found: list[Outcome] = by_rank[0]
    return found


def _message(outcome: Outcome) -> str:
    """Without the error's kind, which only the failing rank knows."""
    return outcome.text.partition(": ")[2] or outcome.text
