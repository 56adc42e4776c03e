"""A run killed anywhere goes on with the same bits, for ZeRO 1 and 3 at tensor-parallel degree 2 with dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.config import RunConfig
from tests.dist.ranks import RankResult, run_ranks
from tests.resumed import assert_same_run, records, write_config
from tests.tiny import tiny_run

_CHANGES = {
    "model.layers": 2, "model.dropout": 0.1, "model.attention_dropout": 0.1, "training.micro_batch": 4,
    "cycle.coarse.steps": 3, "cycle.final.steps": 2, "evaluation.samples": 4, "saving.every_steps": 2,
}  # fmt: skip


def configuration(run_dir: Path, zero_stage: int) -> RunConfig:
    """3 + 3 + 2 steps on two levels."""
    return tiny_run(run_dir, tp=2, zero_stage=zero_stage, changes=_CHANGES)


def train(config: RunConfig, *arguments: str, fault: str = "") -> list[RankResult]:
    """``ds-vcycle train`` on two ranks; those that outlive a failing one are ended."""
    run_dir = config.run_dir
    file = write_config(config, run_dir.with_suffix(".yaml"))
    command = ["train", "--config", str(file), *arguments]
    env = {"DS_VCYCLE_FAULT": fault} if fault else {}
    target = "tests.dist.cases_resume:command_line"
    return run_ranks(2, target, [command, str(run_dir.with_suffix(".log"))], env=env, check=False, grace_s=1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run directories by ZeRO stage."""
    root = tmp_path_factory.mktemp("uninterrupted")
    for stage in (1, 3):
        results = train(configuration(root / str(stage), stage))
        assert [result.exit_code for result in results] == [0, 0], results
    return {stage: root / str(stage) for stage in (1, 3)}


# (ZeRO stage, where a rank dies or all do; a rank that is left is ended for it). Saves are passed in this order: step
# 2, phase 0, the parked level, coalesce, step 5, phase 2, refine, phase 4.
KILLED = [
    (1, "coalesce.exchanged:1"),
    (1, "coalesce.filled"),
    (1, "refine.blended"),
    (1, "save.manifest@4"),
    (3, "coalesce.parked"),
    (3, "refine.exchanged:1"),
    (3, "save.written@3:1"),
    (3, "step@6, fill.written"),  # and again while the resumed run restores its weights
]
FURTHER = [
    (1, "coalesce.begin:0"),
    (3, "coalesce.staged"),
    (1, "refine.begin"),
    (3, "refine.staged:1"),
    (1, "refine.filled"),
    (3, "refine.done:0"),
    (1, "save.begin@5:1"),
    (3, "save.committed@6:1"),
    (1, "save.latest@4:0"),
    (3, "prune.renamed@1:0"),
    (1, "step@8:1"),
    (3, "save.latest@7:0"),  # the run's last
]


@pytest.mark.parametrize(
    ("stage", "faults"), [*KILLED, *(pytest.param(*case, marks=pytest.mark.full) for case in FURTHER)]
)
def test_killed_run_goes_on_with_the_same_bits(
    tmp_path: Path, uninterrupted: dict[int, Path], stage: int, faults: str
) -> None:
    config = configuration(tmp_path / "run", stage)
    for number, fault in enumerate(faults.split(", ")):
        killed = train(config, *["--resume"] * min(number, 1), fault=fault)
        dying = {int(fault.partition(":")[2])} if ":" in fault else {0, 1}
        assert {rank for rank, result in enumerate(killed) if result.exit_code == 137} == dying, killed
        assert all(result.exit_code for result in killed)
    resumed = train(config, "--resume")
    assert [result.exit_code for result in resumed] == [0, 0], resumed
    assert_same_run(config.run_dir, uninterrupted[stage])


_TAUGHT = _CHANGES | {
    "cycle.kind": "growth", "cycle.initial": {}, "cycle.final.steps": 5,
    "cycle.growth": {"method": "knowledge_inheritance", "distill_steps": 4},
}  # fmt: skip


_LEARNED = _CHANGES | {
    "cycle.kind": "growth", "cycle.initial": {}, "cycle.growth": {"method": "ligo", "ligo_steps": 4, "ligo_lr": 1e-2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (_TAUGHT, "step@6"),
        (_LEARNED, "grow.step@3"),
        pytest.param(_TAUGHT, "grow.parked:1", marks=pytest.mark.full),
        pytest.param(_LEARNED, "grow.learned:0", marks=pytest.mark.full),
    ],
)
def test_a_rival_killed_while_it_is_taught_or_learns_its_maps_goes_on_with_the_same_bits(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    """The teacher is read again; the maps, of which there is no checkpoint, are learned again."""
    runs = {name: tiny_run(tmp_path / name, tp=2, changes=changes) for name in ("whole", "killed")}
    assert [result.exit_code for result in train(runs["whole"])] == [0, 0]
    killed = train(runs["killed"], fault=fault)
    assert all(result.exit_code for result in killed)
    assert [result.exit_code for result in train(runs["killed"], "--resume")] == [0, 0]
    assert_same_run(runs["killed"].run_dir, runs["whole"].run_dir)


_THREE_LEVELS = {
    "model.heads": 8, "cycle.levels": 3, "cycle.initial.steps": 2, "cycle.coarse.steps": 3, "cycle.final.steps": 3,
    "cycle.park": "disk", "saving.every_steps": 2, "levels": [{}, {}, {"precision": "bf16"}],
}  # fmt: skip
_OWN = [{}, {"tensor_parallel": 1, "zero_stage": 3, "micro_batch": 1}, {"zero_stage": 2, "precision": "bf16"}]
_LAYOUTS = {"levels": _OWN}


def test_three_levels_each_with_its_own_layout_survive_a_kill_and_train_the_curve_of_one_layout(tmp_path: Path) -> None:
    """Killed on the way up between unlike layouts and precisions, with both fine levels parked on the disk alone."""
    runs = {
        name: tiny_run(tmp_path / name, tp=2, changes=changes)
        for name, changes in (
            ("alike", _THREE_LEVELS), ("unlike", _THREE_LEVELS | _LAYOUTS), ("killed", _THREE_LEVELS | _LAYOUTS)
        )
    }  # fmt: skip
    for name in ("alike", "unlike"):
        assert [result.exit_code for result in train(runs[name])] == [0, 0]
    killed = train(runs["killed"], fault="refine.blended:1")
    assert killed[1].exit_code == 137 and killed[0].exit_code != 0
    assert [result.exit_code for result in train(runs["killed"], "--resume")] == [0, 0]
    assert_same_run(runs["killed"].run_dir, runs["unlike"].run_dir)
    curves = [
        [(r["event"], r["step"], r["loss"]) for r in records(runs[name].run_dir, "step", "evaluation")]
        for name in ("alike", "killed")
    ]
    assert [point[:2] for point in curves[1]] == [point[:2] for point in curves[0]]
    assert [point[2] for point in curves[1]] == pytest.approx([point[2] for point in curves[0]], abs=1e-4)
    assert len(curves[0]) > 20
