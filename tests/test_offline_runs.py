"""The offline verbs on runs: the live transition's bits, and a run that starts from what they wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vcycle import cli
from ds_vcycle.checkpoint.store import open_checkpoint
from ds_vcycle.config import RunConfig
from ds_vcycle.levels import ModelShape, resolve_levels
from tests.dist.cases_resume import Attempt
from tests.dist.ranks import run_ranks
from tests.resumed import attempts, last_checkpoint
from tests.stored import differing, load_wholes
from tests.tiny import tiny_run

_CYCLE = {
    "operators.alpha": 0.75, "operators.beta": 0.5, "saving.keep_last": 10, "cycle.initial.steps": 2,
    "cycle.coarse.steps": 2, "cycle.final.steps": 1, "levels": [{"zero_stage": 3}, {"tensor_parallel": 1}],
}  # fmt: skip
_INITIAL, _COALESCED, _COARSE, _REFINED = (
    f"checkpoints/step-{step:08d}-phase-{phase:02d}" for phase, step in enumerate((2, 2, 4, 4))
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A V cycle that kept every phase's checkpoint: level 1 under TP 2 and ZeRO 3, level 2 under TP 1 and ZeRO 1."""
    config = tiny_run(tmp_path_factory.mktemp("runs") / "whole", tp=2, changes=_CYCLE)
    (outcome,) = attempts(Attempt(config=config))
    assert outcome.text == "finished"
    return config


def _verb(*arguments: object, ranks: int = 1) -> None:
    """One command line, in this process or on every rank of a launch."""
    command = [str(argument) for argument in arguments]
    if ranks == 1:
        assert cli.run(command) == 0
    else:
        log = str(Path(command[command.index("--to") + 1]).with_suffix(".log"))
        run_ranks(ranks, "tests.dist.cases_resume:command_line", [command, log])


def _shapes(config: RunConfig) -> list[ModelShape]:
    return [level.shape for level in resolve_levels(config)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_coalesce_gives_the_live_transitions_bits(run: RunConfig, tmp_path: Path, ranks: int) -> None:
    _verb("coalesce", "--from", run.run_dir / _INITIAL, "--to", tmp_path / "small", ranks=ranks)
    _, coarse = _shapes(run)
    found, live = (load_wholes(path, coarse) for path in (tmp_path / "small", run.run_dir / _COALESCED))
    assert differing(found, live) == []
    assert set(found) == {"master", "exp_avg", "exp_avg_sq"}
    with open_checkpoint(tmp_path / "small") as checkpoint:
        assert (checkpoint.state["level"], checkpoint.state["adam_step"], checkpoint.world_size) == (2, 2, ranks)
        assert checkpoint.state["origin"]["fine"]["directory"].endswith(_INITIAL)
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == [
        "manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(ranks))
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_refine_gives_the_live_transitions_bits(run: RunConfig, tmp_path: Path, ranks: int) -> None:
    """alpha 0.75 and beta 0.5 are the run's own; 1 - alpha - beta is not zero, so C x is needed."""
    fine, coarse = run.run_dir / _INITIAL, run.run_dir / _COARSE
    _verb("refine", "--fine", fine, "--coarse", coarse, "--to", tmp_path / "blended", ranks=ranks)
    shape, _ = _shapes(run)
    found, live = (load_wholes(path, shape) for path in (tmp_path / "blended", run.run_dir / _REFINED))
    assert differing(found, live) == []
    with open_checkpoint(tmp_path / "blended") as checkpoint:
        assert (checkpoint.state["level"], checkpoint.state["adam_step"]) == (1, 4)


def test_a_run_of_its_own_between_coalesce_and_refine(run: RunConfig, tmp_path: Path) -> None:
    """Coalesced, trained for one step in a run of the small model on another layout, refined into a run's latest.

    With a learning rate of next to nothing the small run must end with the bits it started from.
    """
    _verb("coalesce", "--from", run.run_dir / _INITIAL, "--to", tmp_path / "small")
    shape, small = _shapes(run)
    model = {"model.layers": small.layers, "model.hidden": small.hidden, "model.heads": small.heads}
    flat: dict[str, Any] = {"cycle": {"kind": "flat", "flat": {"steps": 1, "warmup_steps": 0}}, "lr.peak": 1e-60}
    flat |= {"lr.warmup_steps": 0, **model}
    starts = {
        moments: tiny_run(
            tmp_path / moments, tp=2, zero_stage=2,
            changes={**flat, "training.init_from": str(tmp_path / "small"), "operators.moments": moments},
        )
        for moments in ("map", "reset")
    }  # fmt: skip
    tall = tiny_run(tmp_path / "tall", changes={**flat, "model.layers": 4, "training.init_from": str(run.run_dir)})
    none = tiny_run(tmp_path / "none", changes={"training.init_from": str(tmp_path / "nothing")})
    mapped, reset, refused, missing = attempts(*(Attempt(config=config) for config in (*starts.values(), tall, none)))
    assert (mapped.text, reset.text) == ("finished", "finished")
    assert "holds a model with hidden=32, level 1 of this run has 16" in refused.text
    assert f"training.init_from={tmp_path / 'nothing'}: " in missing.text and "does not exist" in missing.text
    assert not tall.run_dir.exists() and not none.run_dir.exists()

    start = load_wholes(tmp_path / "small", small)
    for moments, config in starts.items():
        end = load_wholes(last_checkpoint(config.run_dir), small)
        assert differing({"master": end["master"]}, {"master": start["master"]}) == []
        with open_checkpoint(last_checkpoint(config.run_dir)) as checkpoint:
            assert checkpoint.state["adam_step"] == (3 if moments == "map" else 1)
    name = "decoder.final_layernorm.weight"  # with beta_1 0.9 most of a kept moment is still there after a step
    first = {moments: load_wholes(last_checkpoint(config.run_dir), small) for moments, config in starts.items()}
    step_only = first["reset"]["exp_avg"][name]
    torch.testing.assert_close(first["map"]["exp_avg"][name], step_only + 0.9 * start["exp_avg"][name])

    _verb("refine", "--fine", run.run_dir / _INITIAL, "--coarse", starts["map"].run_dir, "--to", tmp_path / "end",
          "--alpha", 0, "--beta", 1)  # fmt: skip
    identity, kept = load_wholes(tmp_path / "end", shape), load_wholes(run.run_dir / _INITIAL, shape)
    assert differing({"master": identity["master"]}, {"master": kept["master"]}) == []
    assert identity["exp_avg_sq"][name].any()


def test_of_an_offline_checkpoint_nothing_can_be_resumed(run: RunConfig, tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", tp=2, changes=_CYCLE)
    _verb("coalesce", "--from", run.run_dir, "--to", tmp_path / "run" / "checkpoints" / "step-00000001")
    (outcome,) = attempts(Attempt(config=config, resume="always"))
    assert "is no checkpoint of a run" in outcome.text
    assert "training.init_from=" in outcome.text


def _refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.run([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_a_model_goes_up_by_the_maps_it_came_down_by(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by way of a run of its own, which records the checkpoint it began from and not what that came from."""
    policies = ["operators.depth_residual=copy", "levels.1.groupings.head=local_stack"]
    _verb("coalesce", "--from", run.run_dir / _INITIAL, "--to", tmp_path / "small", *policies)
    small = _shapes(run)[1]
    changes = {"model.layers": small.layers, "model.hidden": small.hidden, "model.heads": small.heads}
    changes |= {"cycle": {"kind": "flat", "flat": {"steps": 1, "warmup_steps": 0}}, "lr.peak": 1e-60}
    changes |= {"lr.warmup_steps": 0, "training.init_from": str(tmp_path / "small")}
    own = tiny_run(tmp_path / "own", changes=changes)
    (outcome,) = attempts(Attempt(config=own))
    assert outcome.text == "finished"
    capsys.readouterr()
    alone = ["--alpha", 1, "--beta", 0]
    for number, coarse in enumerate((tmp_path / "small", own.run_dir)):
        _verb("refine", "--fine", run.run_dir / _INITIAL, "--coarse", coarse, "--to", tmp_path / f"up-{number}", *alone)
        said = capsys.readouterr().out
        assert "depth_residual copy" in said and "head local_stack" in said
    ups = [load_wholes(tmp_path / f"up-{number}", _shapes(run)[0])["master"] for number in range(2)]
    assert differing({"master": ups[0]}, {"master": ups[1]}) == []
    given = ["refine", "--fine", run.run_dir / _INITIAL, "--coarse", own.run_dir, "--to", tmp_path / "up", *alone]
    text = _refused(capsys, *given, "operators.depth_residual=first")
    assert "operators.depth_residual is first here" in text and "coalesced under copy" in text
    assert "levels.1.groupings is" in _refused(capsys, *given, "levels.1.groupings.head=stack")
    (tmp_path / "small").rename(tmp_path / "elsewhere")
    assert "local_stack depends on" in _refused(capsys, *given, "levels=[{},{groupings: {head: local_stack}}]")


def test_a_coarse_checkpoint_is_of_the_level_below(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = run.run_dir / _INITIAL
    text = _refused(capsys, "refine", "--fine", fine, "--coarse", run.run_dir, "--to", tmp_path / "to")
    assert "is as large as --fine" in text and "RUN@STEP" in text
    _verb("coalesce", "--from", fine, "--to", tmp_path / "second")
    _verb(
        "coalesce",
        "--from",
        tmp_path / "second",
        "--to",
        tmp_path / "third",
        "levels.2.layers=1",
        "levels.2.tensor_parallel=1",
    )
    text = _refused(capsys, "refine", "--fine", fine, "--coarse", tmp_path / "third", "--to", tmp_path / "to")
    assert "is level 3 and --fine" in text and "level 1" in text
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("override", ["cycle.kind=flat", "training.seed=7", "model.norm_eps=0.5"])
def test_overrides_are_of_levels_and_maps(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    text = _refused(capsys, "coalesce", "--from", run.run_dir, "--to", tmp_path / "to", override)
    assert f"{override} changes no level and no map" in text
    assert not (tmp_path / "to").exists()


def test_where_something_is_that_must_stay_nothing_is_written(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _verb("coalesce", "--from", run.run_dir, "--to", tmp_path / "small")
    (tmp_path / "small").rename(tmp_path / ".replaced-small")  # as a kill within --overwrite leaves it
    (tmp_path / "file").write_text("")
    within = run.run_dir / _INITIAL / "deep" / "er"
    for to, wanted in {
        tmp_path / "small": "exists; give another directory",
        tmp_path / "file" / "x": f"{tmp_path / 'file'} is a file",
        within: "lies among a run's checkpoints",
    }.items():
        assert wanted in _refused(capsys, "coalesce", "--from", run.run_dir, "--to", to)
    assert "is a run that has trained" in _refused(
        capsys, "convert", "--from", run.run_dir / _INITIAL, "--to", tiny_copy(run, tmp_path), "--tp", 1, "--overwrite"
    )
    text = _refused(capsys, "coalesce", "--from", tmp_path / "small", "--to", tmp_path / "small", "--overwrite")
    assert "holds the checkpoint that is read" in text
    with open_checkpoint(tmp_path / ".replaced-small"):
        assert not within.exists()


def tiny_copy(run: RunConfig, tmp_path: Path) -> Path:
    """Another run directory."""
    return shutil.copytree(run.run_dir, tmp_path / "copy")
