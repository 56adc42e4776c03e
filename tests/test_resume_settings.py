"""What ``--resume`` refuses and what it takes: no checkpoint, a finished run, other settings, another layout."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.checkpoint.store import CheckpointError, open_checkpoint
from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.position import Position
from ds_vcycle.cycle.resumable import check_resumable
from ds_vcycle.cycle.saving import run_state
from ds_vcycle.cycle.schedule import expand
from tests.dist.cases_resume import Attempt
from tests.dist.cases_store import local_shards, save_simulated
from tests.dist.ranks import run_ranks
from tests.resumed import attempts, records, status, write_config
from tests.tiny import tiny_corpus, tiny_run

_CASES = "tests.dist.cases_resume"


def _files(root: Path) -> dict[str, tuple[int, str]]:
    """Every file under a directory with its time of change and its content's hash."""
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in found
    }


def test_without_a_checkpoint_and_after_the_end(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes={"cycle": {"kind": "flat", "flat": {"steps": 1}}})
    log = str(tmp_path / "log")
    begun = tiny_run(tmp_path / "begun", tp=2, changes={"cycle": {"kind": "flat", "flat": {"steps": 1}}})
    begun.run_dir.mkdir()
    (begun.run_dir / "metrics.jsonl").write_text('{"event": "step", "phase": 0, "lev')  # killed before its first save
    no_checkpoint, again, started, refused, restarted = attempts(
        Attempt(config=config, resume="always"),
        Attempt(config=begun, resume="always"),
        Attempt(config=config, resume="auto"),
        Attempt(config=config),
        Attempt(config=begun, resume="auto"),
    )
    for outcome in (no_checkpoint, again):
        assert "holds no checkpoint; start anew with --resume auto" in outcome.text
    assert started.text == restarted.text == "finished"
    assert "already holds a run" in refused.text
    assert [record["step"] for record in records(begun.run_dir, "step")] == [1]

    before = _files(config.run_dir)
    command = ["train", "--config", str(write_config(config, tmp_path / "run.yaml")), "--resume", "auto"]
    results = run_ranks(2, f"{_CASES}:command_line", [command, log], check=False)
    assert [result.exit_code for result in results] == [0, 0]
    assert "holds a finished run" in Path(f"{log}.0").read_text()
    assert _files(config.run_dir) == before


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two data-parallel ranks under ZeRO 3, stopped in the coarse phase, and beside it the same to its end."""
    root = tmp_path_factory.mktemp("runs")
    ended, stopped = attempts(
        Attempt(config=tiny_run(root / "whole", zero_stage=3)),
        Attempt(config=tiny_run(root / "stopped", zero_stage=3), disturb="step@5:1:SIGTERM"),
    )
    assert (ended.text, stopped.text) == ("finished", "stopped")
    assert stopped.status["step"] == 6
    return root


# (changed settings, how the refusal begins)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cycle.coarse.steps": 5}, "phase 2 (train level 2): steps is 4 in the run and 5"),
    ({"cycle.levels": 3}, "phase 2 (train level 2): steps is 4 in the run and 3"),
    ({"lr.peak": 1e-3}, "phase 0 (train level 1): lr.peak is 0.003 in the run and 0.001"),
    ({"operators.beta": 0.5}, "phase 3 (refine level 2 -> 1): beta is 0.25 in the run and 0.5"),
    ({"model.hidden": 64}, "model.hidden is 32 in the run and 64"),
    ({"levels": [{}, {"ffn": 32}]}, "levels.1.ffn is None in the run and 32"),
    ({"training.seed": 1}, "training.seed is 1234 in the run and 1"),
    ({"training.global_batch": 8}, "training.global_batch is 4 in the run and 8"),
    ({"data.seed": 2}, "data.seed is 1234 in the run and 2"),
    ({"data.path": "COPY"}, "data.path is"),
    ({"optimizer.weight_decay": 0.0}, "optimizer.weight_decay is 0.1 in the run and 0.0"),
    ({"model.kv_groups": 2}, "model.kv_groups is None in the run and 2"),
    ({"deepspeed": {"prescale_gradients": True}}, "deepspeed.prescale_gradients is None in the run and True"),
]


def test_another_configuration_is_refused_by_name(tmp_path: Path, stopped: Path) -> None:
    run_dir = stopped / "stopped"
    copy = shutil.copytree(tiny_corpus("gpt"), tmp_path / "gpt")
    before = _files(run_dir)
    configs = [_changed(run_dir, changes, copy) for changes, _ in REFUSED]
    outcomes = attempts(*(Attempt(config=config, resume="always") for config in configs))
    for outcome, (_, beginning) in zip(outcomes, REFUSED, strict=True):
        assert f"step-00000006-phase-02: {beginning}" in outcome.text, outcome.text
        assert "resume with the configuration it was saved with" in outcome.text
    config = write_config(_changed(run_dir, {"training.seed": 1}, copy), tmp_path / "seed.yaml")
    log = str(tmp_path / "log")
    command = ["train", "--config", str(config), "--resume"]
    results = run_ranks(2, f"{_CASES}:command_line", [command, log], check=False, wait_all=True)
    assert [result.exit_code for result in results] == [2, 2]
    assert all("training.seed is 1234" in Path(f"{log}.{rank}").read_text() for rank in (0, 1))
    assert _files(run_dir) == before


def _changed(run_dir: Path, changes: dict[str, Any], corpus: Path) -> RunConfig:
    changes = {key: str(corpus) if value == "COPY" else value for key, value in changes.items()}
    return tiny_run(run_dir, zero_stage=3, changes=changes)


# (ranks that go on, ZeRO stage, further changes)
OTHER_LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"levels": [{"micro_batch": 1}, {"zero_stage": 2}], "saving": {"every_steps": 1, "keep_last": 4}}),
    (2, 0, {"training.micro_batch": 1, "logging.every_steps": 1}),
    (1, 3, {"levels": [{"zero_stage": 2}], "evaluation.micro_batch": 2}),
    (2, 2, {"model.tensor_parallel": 2}),  # the vocabulary's padding changes too, and the parked level's layout
    (2, 3, {"levels": [{"tensor_parallel": 2, "zero_stage": 1}, {"micro_batch": 1}]}),
]


def test_another_layout_goes_on_with_the_same_losses(tmp_path: Path, stopped: Path) -> None:
    configs = []
    for index, (_, stage, changes) in enumerate(OTHER_LAYOUTS):
        run_dir = shutil.copytree(stopped / "stopped", tmp_path / str(index))
        configs.append(tiny_run(run_dir, zero_stage=stage, changes=changes))
    for ranks in (2, 1):
        chosen = [config for config, (wanted, *_) in zip(configs, OTHER_LAYOUTS, strict=True) if wanted == ranks]
        for outcome in attempts(*(Attempt(config=c, resume="always") for c in chosen), world_size=ranks):
            assert outcome.text == "finished"
    for config in configs:
        for event in ("step", "evaluation"):
            found, wanted = records(config.run_dir, event), records(stopped / "whole", event)
            assert [(r["phase"], r["step"]) for r in found] == [(r["phase"], r["step"]) for r in wanted]
            assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in wanted], abs=1e-4)
        assert status(config.run_dir)["status"] == "finished"


@pytest.mark.parametrize(
    ("changes", "seeded"), [({"model.tensor_parallel": 2}, True), ({"training.zero_stage": 1}, False)]
)
def test_random_states_of_another_degree_are_not_taken(
    tmp_path: Path, stopped: Path, changes: dict[str, Any], seeded: bool
) -> None:
    run_dir = shutil.copytree(stopped / "stopped", tmp_path / "run")
    config = write_config(tiny_run(run_dir, zero_stage=3, changes=changes), tmp_path / "run.yaml")
    command = ["train", "--config", str(config), "--resume"]
    results = run_ranks(2, f"{_CASES}:command_line", [command, str(tmp_path / "log")], check=False)
    assert [result.exit_code for result in results] == [0, 0], results
    warned = "another number of ranks or tensor-parallel degree than before: random" in (tmp_path / "log.0").read_text()
    assert warned == seeded


# (settings of the configuration that goes on, how the refusal begins if there is one)
NEWER: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"cycle.park": "disk", "operators.kernels": "torch", "evaluation.transitions": False}, None),
    ({"levels": [{}, {"micro_batch": 1}]}, None),
    ({"levels": [{"precision": "bf16"}, {}]}, "levels.0.precision is None in the run and 'bf16' in the configuration"),
    ({"model.init_std": 0.1}, "model.init_std is 0.02 in the run and 0.1 in the configuration"),
    ({"data.seed": 5}, "data.seed is 1234 in the run and 5 in the configuration"),
]


ENGINE_STATE = {"adam_step": 0, "counters": {}}


@pytest.mark.parametrize("missing", ["phases", "config", "counters", "adam_step", "position.totals", "phases.0"])
def test_a_manifest_without_the_runs_state_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    """Its checksum is right: it was written so, by hand or by a fault."""
    config = tiny_run(tmp_path / "run")
    state: dict[str, Any] = run_state(config, expand(config), Position()) | ENGINE_STATE
    key, _, inner = missing.partition(".")
    if inner == "0":
        state[key][0] = None
    else:
        del (state[key] if inner else state)[inner or key]
    save_simulated(tmp_path / "step-00000001", local_shards(1), state=state)
    with (
        open_checkpoint(tmp_path / "step-00000001") as checkpoint,
        pytest.raises(CheckpointError, match=r"step-00000001: what the run recorded is incomplete \(.*; use another"),
    ):
        check_resumable(checkpoint, config, expand(config))


@pytest.mark.parametrize(("changes", "refused"), NEWER)
def test_keys_that_a_checkpoint_is_too_old_for_have_their_defaults(
    tmp_path: Path, changes: dict[str, Any], refused: str | None
) -> None:
    levels = {"levels": [{}, {}]}
    config, wanted = tiny_run(tmp_path / "run", changes=levels), tiny_run(tmp_path / "run", changes=levels | changes)
    state = run_state(config, expand(config), Position()) | ENGINE_STATE
    tree = state["config"]
    newer = [
        (tree, "optimizer"), (tree["cycle"], "park"), (tree["operators"], "kernels"), (tree["data"], "seed"),
        (tree["evaluation"], "transitions"), (tree["lr"], "rewarmup_steps"), (tree["model"], "init_std"),
        *((level, "precision") for level in tree["levels"]),
    ]  # fmt: skip
    for section, key in newer:
        del section[key]
    save_simulated(tmp_path / "step-00000001", local_shards(1), state=state)
    with open_checkpoint(tmp_path / "step-00000001") as checkpoint:
        if refused is None:
            check_resumable(checkpoint, wanted, expand(wanted))
        else:
            with pytest.raises(CheckpointError, match=refused + "; resume with the configuration it was saved with"):
                check_resumable(checkpoint, wanted, expand(wanted))


# (groupings, what changes, how the refusal begins if there is one)
DEGREES: list[tuple[dict[str, str], dict[str, Any], str | None]] = [
    (
        {"ffn": "local_stack"},
        {"model.tensor_parallel": 2},
        "groupings.ffn=local_stack .* 1 in the run and 2",
    ),
    ({"head": "local_stack"}, {"levels": [{"tensor_parallel": 2}]}, "groupings.head=local_stack of level 2 stacks"),
    ({"ffn": "local_stack"}, {"levels": [{}, {"tensor_parallel": 2}]}, None),  # the coarse level's does not matter
    ({"hidden": "local_stack", "layer": "local_stack"}, {"model.tensor_parallel": 2}, None),
    ({"ffn": "stack"}, {"model.tensor_parallel": 2}, None),
]


@pytest.mark.parametrize(("groupings", "changes", "refused"), DEGREES)
def test_groups_that_depend_on_the_degree_keep_it(
    tmp_path: Path, groupings: dict[str, str], changes: dict[str, Any], refused: str | None
) -> None:
    config = tiny_run(tmp_path / "run", changes={"operators.groupings": groupings})
    wanted = tiny_run(tmp_path / "run", changes={"operators.groupings": groupings, **changes})
    state = run_state(config, expand(config), Position()) | ENGINE_STATE
    save_simulated(tmp_path / "step-00000001", local_shards(1), state=state)
    with open_checkpoint(tmp_path / "step-00000001") as checkpoint:
        if refused is None:
            check_resumable(checkpoint, wanted, expand(wanted))
        else:
            with pytest.raises(CheckpointError, match=refused + ".*; resume with tensor_parallel=1 at level 1"):
                check_resumable(checkpoint, wanted, expand(wanted))
