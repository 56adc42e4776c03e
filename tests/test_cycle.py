"""Whole runs over one and two ranks: every layout runs to its end, records what it did, and trains the same curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle.config import RunConfig
from ds_vcycle.cycle.overview import overview
from ds_vcycle.cycle.phases import Train, steps_at
from ds_vcycle.cycle.schedule import expand
from ds_vcycle.train.metrics import (
    EvaluationRecord,
    SaveRecord,
    StepRecord,
    TransitionLossRecord,
    TransitionRecord,
    read_metrics,
)
from tests.dist.cases_cycle import Census, Outcome
from tests.dist.ranks import values
from tests.tiny import tiny_run

LONGER = {"cycle.initial": {"steps": 5}, "cycle.coarse": {"steps": 6}, "cycle.final": {"steps": 5}}
EXPLICIT = {
    "cycle": {
        "kind": "phases",
        "phases": [
            {"train": 1, "steps": 2, "lr": 1e-3}, {"coalesce": 1}, {"train": 2, "steps": 3}, {"coalesce": 2},
            {"train": 3, "steps": 1, "warmup_steps": 0}, {"refine": 2, "alpha": 0.5}, {"coalesce": 2},
            {"refine": 2, "alpha": 0.3, "beta": 0.3}, {"train": 2, "steps": 2},
        ],
    },
    "saving": {"every_steps": 1, "keep_last": 1},
    "logging.tensorboard": True,
}  # fmt: skip
THREE = {
    "model.heads": 8,
    "cycle.levels": 3,
    "operators.moments": "reset",
    "levels": [{}, {"steps": 3}, {"steps": 2, "lr": 1e-2}],
}
UNTIL = {"cycle.coarse": {"steps": 9, "until_loss": 99.0}, "cycle.final": {"steps": 3, "until_loss": 0.01}}
UNLIKE = {**LONGER, "levels": [{}, {"tensor_parallel": 1, "zero_stage": 3, "micro_batch": 1}]}
POST = {"model.norm_placement": "post", "model.norm_eps": 1e-12}
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
GROWTH = {"cycle.kind": "growth", "cycle.initial": {}}
DEEPER = {"levels": [{}, {"hidden": 32, "heads": 4, "ffn": 128}]}
TAUGHT = {
    **GROWTH,
    "cycle.growth": {"method": "knowledge_inheritance", "distill_steps": 3},
    "cycle.final": {"steps": 5},
    "saving": {"every_steps": 2, "keep_last": 2},
}
LEARNED = {
    **GROWTH,
    "cycle.growth": {"method": "ligo", "ligo_steps": 5, "ligo_lr": 1e-2},
    "saving": {"every_steps": 2, "keep_last": 1},
}
WIDER = {**DROPOUT, "levels": [{}, {"tensor_parallel": 2}]}  # the coarse level's ranks must begin to draw alike


def cycles(count: int) -> dict[str, Any]:
    """So many V cycles of single steps, with weights large enough to be seen in the memory of a process."""
    cycle = [{"train": 1, "steps": 1}, {"coalesce": 1}, {"train": 2, "steps": 1}, {"refine": 1}]
    return {
        "cycle": {"kind": "phases", "phases": [*cycle * count, {"train": 1, "steps": 1}]},
        "model.hidden": 64, "model.ffn": 8192, "model.sequence_length": 8, "training.global_batch": 2,
        "training.micro_batch": 1, "evaluation": {"every_steps": 5, "samples": 2}, "logging.tensorboard": True,
    }  # fmt: skip


FLAT = {"cycle": {"kind": "flat", "flat": {"steps": 5}}}

ONE: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "zero_stage": 0, "changes": LONGER},
    "one-bert": {"architecture": "bert", "changes": LONGER},
    "accumulate-4": {"zero_stage": 2, "changes": {**LONGER, "training.micro_batch": 1}},
    "accumulate-1": {"zero_stage": 3, "changes": {**LONGER, "training.micro_batch": 4}},
}
TWO: dict[str, dict[str, Any]] = {
    **{
        f"tp{tp}-zero{stage}": {"tp": tp, "zero_stage": stage, "changes": LONGER}
        for tp in (1, 2)
        for stage in (0, 1, 2, 3)
    },
    "tp1-zero2-bf16": {"zero_stage": 2, "precision": "bf16"},
    "tp2-zero3-bf16": {"tp": 2, "zero_stage": 3, "precision": "bf16"},
    "unlike": {"tp": 2, "changes": UNLIKE},
    "bert-tp2-zero2": {"architecture": "bert", "tp": 2, "zero_stage": 2, "changes": LONGER},
    "bert-tp1-zero3": {"architecture": "bert", "zero_stage": 3, "changes": LONGER},
    "bert-post": {"architecture": "bert", "tp": 2, "zero_stage": 2, "changes": POST},
    "three-levels": {"tp": 2, "changes": {**THREE, **DROPOUT}},
    "wider-dropout": {"tp": 1, "changes": WIDER},
    "explicit": {"tp": 1, "zero_stage": 1, "changes": EXPLICIT},
    "until-loss": {"tp": 2, "zero_stage": 0, "changes": UNTIL},
    "flat": {"tp": 2, "zero_stage": 1, "changes": FLAT},
    "w-cycle": {"tp": 2, "changes": {"model.heads": 8, "cycle.kind": "W", "cycle.levels": 3}},
    "f-cycle": {"tp": 2, "zero_stage": 2, "changes": {"model.heads": 8, "cycle.kind": "F", "cycle.levels": 3}},
    "f-bert": {"architecture": "bert", "tp": 2, "changes": {"cycle.kind": "F"}},
    "random-coarse": {"tp": 2, "changes": {"cycle.coarse_from": "seed"}},
    "monotone": {"tp": 2, "changes": {**GROWTH, "model.heads": 8, "cycle.levels": 3}},
    "stackbert": {"tp": 2, "changes": {**GROWTH, **DEEPER, "cycle.growth": {"method": "stackbert"}}},
    "taught": {"tp": 2, "zero_stage": 2, "changes": TAUGHT},
    "taught-zero3": {"tp": 1, "zero_stage": 3, "changes": TAUGHT},
    "taught-bert": {"architecture": "bert", "tp": 2, "changes": TAUGHT},
    "ligo": {"tp": 2, "zero_stage": 2, "changes": LEARNED},
    "ligo-zero3": {"tp": 1, "zero_stage": 3, "changes": LEARNED},
    "ligo-bert": {"architecture": "bert", "tp": 2, "changes": {**LEARNED, **POST, **DROPOUT}},
    "parked-on-disk": {"tp": 2, "zero_stage": 2, "changes": {**LONGER, "cycle.park": "disk"}},
}
ALL = [*ONE, *TWO]
CURVES = {
    "one": ["accumulate-4", "accumulate-1", "unlike", "parked-on-disk", *(name for name in TWO if name in
            {f"tp{tp}-zero{stage}" for tp in (1, 2) for stage in (0, 1, 2, 3)})],
    "one-bert": ["bert-tp2-zero2", "bert-tp1-zero3"],
}  # fmt: skip


class Run:
    """A run that has ended."""

    def __init__(self, config: RunConfig, outcomes: list[Outcome]) -> None:
        self.config, self.outcomes, self.directory = config, outcomes, config.run_dir
        self.records = read_metrics(config.run_dir / "metrics.jsonl")

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.directory / "checkpoints").iterdir() if path.is_dir()}


def _all(world_size: int, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Run]:
    configs = {name: tiny_run(folder / name, **case) for name, case in cases.items()}
    ranks = values(world_size, "tests.dist.cases_cycle:runs", [configs], timeout_s=600)
    return {name: Run(config, [rank[name] for rank in ranks]) for name, config in configs.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every run by name."""
    folder = tmp_path_factory.mktemp("runs")
    return {**_all(1, ONE, folder), **_all(2, TWO, folder)}


@pytest.mark.parametrize("name", ALL)
def test_a_run_ends_says_so_and_is_not_run_over(done, name):
    run = done[name]
    for outcome in run.outcomes:
        assert outcome.ended == "finished"
        assert outcome.unlike == []
        assert f"run_dir={run.directory} already holds a run" in outcome.again and "--resume" in outcome.again
    status = json.loads((run.directory / "status.json").read_text())
    phases = expand(run.config)
    assert (status["status"], status["phase"], status["of"]) == ("finished", len(phases) - 1, len(phases))


@pytest.mark.parametrize("name", ALL)
def test_every_step_is_recorded_once_and_costs_what_the_plan_said(done, name):
    run = done[name]
    steps, phases = run.of(StepRecord), expand(run.config)
    assert [record.step for record in steps] == list(range(1, len(steps) + 1))
    assert [record.phase for record in run.records] == sorted(record.phase for record in run.records)
    if name == "until-loss":
        return
    planned = overview(run.config)
    for phase in planned.phases:
        own = [record for record in steps if record.phase == phase.index]
        assert [record.phase_step for record in own] == list(range(1, phase.steps + 1))
        assert {record.level for record in own} <= {steps_at(phases[phase.index])[0]}
        assert sum(record.step_tokens for record in own) == phase.tokens
        assert sum(record.step_flops for record in own) == phase.flops
    last = run.records[-1]
    assert isinstance(last, SaveRecord) and last.seconds > 0
    evaluation = run.of(EvaluationRecord)[-1]
    assert (evaluation.tokens, evaluation.flops) == (planned.tokens, planned.flops)
    assert evaluation.flops_blocks == planned.flops_blocks


@pytest.mark.parametrize("name", ALL)
def test_transitions_and_evaluations_come_in_the_order_of_the_phases(done, name):
    run = done[name]
    phases, every = expand(run.config), run.config.evaluation.every_steps
    made = [(record.phase, record.kind, record.fine, record.level) for record in run.of(TransitionRecord)]
    wanted = [phase for phase in phases if not isinstance(phase, Train)]
    assert made == [
        (p.index, type(p).__name__.lower(), p.fine, p.coarse if type(p).__name__ == "Coalesce" else p.fine)
        for p in wanted
    ]
    evaluated = {(record.phase, record.phase_step) for record in run.of(EvaluationRecord)}
    assert {(phase.index, max(steps_at(phase)[1], 1)) for phase in wanted} <= evaluated
    if name != "until-loss":
        for phase in (p for p in phases if isinstance(p, Train)):
            expected = {(phase.index, step) for step in (*range(every, phase.steps, every), phase.steps)}
            assert {place for place in evaluated if place[0] == phase.index} == expected


@pytest.mark.parametrize("name", ALL)
def test_checkpoints_are_kept_as_asked_with_what_they_refer_to(done, name):
    run = done[name]
    saved = [Path(record.path).name for record in run.of(SaveRecord)]
    parked = {"parked-01-level-1"} if name == "explicit" else set()  # it ends at level 2
    assert run.checkpoints() == {*saved[-run.config.saving.keep_last :], *parked}
    if name == "explicit":
        assert saved == [
            "step-00000001-phase-00", "step-00000002-phase-00", "step-00000002-phase-01", "step-00000003-phase-02",
            "step-00000004-phase-02", "step-00000005-phase-02", "step-00000005-phase-03", "step-00000006-phase-04",
            "step-00000006-phase-05", "step-00000006-phase-06", "step-00000006-phase-07", "step-00000007-phase-08",
            "step-00000008-phase-08",
        ]  # fmt: skip


def test_until_loss_ends_a_phase_at_its_first_evaluation_below(done):
    steps = done["until-loss"].of(StepRecord)
    taken = {phase: sum(record.phase == phase for record in steps) for phase in (0, 2, 4)}
    assert taken == {0: 3, 2: 2, 4: 3}  # evaluated every second step; the last phase never gets to 0.01


@pytest.mark.parametrize("name", [name for name in ALL if name != "flat"])
def test_every_phase_learns(done, name):
    """The held-out loss is finite, below its start, and does not jump at a change of level."""
    losses = [record.loss for record in done[name].of(EvaluationRecord)]
    assert all(0 < loss < 6.5 for loss in losses)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "name",
    [
        "one",
        "tp2-zero3",
        "unlike",
        "bert-tp2-zero2",
        "bert-post",
        "three-levels",
        "w-cycle",
        "f-cycle",
        "f-bert",
        "monotone",
    ],
)
def test_each_change_of_level_records_the_loss_along_it(done, name):
    """The defaults are lossless, so de-coalescing alone changes nothing; blending with beta does."""
    run = done[name]
    losses = {(record.phase, record.phase_step): record.loss for record in run.of(EvaluationRecord)}
    found = run.of(TransitionLossRecord)
    assert [record.phase for record in found] == [record.phase for record in run.of(TransitionRecord)]
    for record in found:
        before = max(place for place in losses if place < (record.phase, 0))
        assert (record.before, record.after) == (losses[before], losses[record.phase, record.phase_step])
        if record.kind == "coalesce":
            assert record.decoalesced is None
        else:
            assert record.decoalesced == pytest.approx(record.before, abs=1e-4)
            assert record.decoalesced != record.after


def test_tensorboard_shows_the_recorded_losses(done):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = done["explicit"]
    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(record.step, pytest.approx(record.loss, rel=1e-6)) for record in run.of(StepRecord)]
    assert len(events.Scalars("evaluation/loss")) == len(run.of(EvaluationRecord))


@pytest.mark.parametrize("name", ["taught", "taught-zero3", "taught-bert"])
def test_a_taught_step_costs_the_teachers_forward_pass_too(done, name):
    """A third of one of its own steps; and the mixed loss begins at the divergence of two untrained models, near 0."""
    first, *own = (done[name].of(StepRecord)[at] for at in (0, 4, 5, 6, 7, 8))
    assert [record.step_flops - own[-1].step_flops for record in own] == [first.step_flops // 3] * 3 + [0] * 2
    assert [record.step_flops_blocks - own[-1].step_flops_blocks for record in own[:3]] == (
        [first.step_flops_blocks // 3] * 3
    )
    assert own[-1].flops == 4 * first.step_flops + 5 * own[-1].step_flops + first.step_flops
    assert own[0].loss < own[1].loss < own[2].loss < own[3].loss


@pytest.mark.parametrize("name", ["ligo", "ligo-zero3", "ligo-bert"])
def test_steps_that_learn_a_growth_cost_what_the_fine_levels_do(done, name):
    """4 coarse steps, 5 of the maps through the fine level, 3 fine ones; no sample is seen twice."""
    run = done[name]
    steps, [change] = run.of(StepRecord), run.of(TransitionRecord)
    assert [(record.phase, record.level, record.phase_step) for record in steps] == (
        [(0, 2, step) for step in range(1, 5)] + [(1, 1, step) for step in range(1, 6)]
        + [(2, 1, step) for step in range(1, 4)]
    )  # fmt: skip
    coarse, fine = steps[0], steps[-1]
    assert {record.step_flops for record in steps[4:]} == {fine.step_flops} != {coarse.step_flops}
    assert (fine.flops, fine.tokens) == (4 * coarse.step_flops + 8 * fine.step_flops, 12 * 4 * 32)
    assert (change.phase_step, change.flops) == (5, 4 * coarse.step_flops + 5 * fine.step_flops)
    assert change.own_seconds > sum(record.step_seconds for record in steps[4:9])
    assert steps[8].loss < steps[4].loss


@pytest.mark.parametrize("names", [("taught", "taught-zero3"), ("ligo", "ligo-zero3")])
def test_a_rivals_curve_does_not_depend_on_the_layout(done, names):
    losses = [
        [record.loss for kind in (StepRecord, EvaluationRecord) for record in done[name].of(kind)] for name in names
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(("reference", "name"), [(one, name) for one, names in CURVES.items() for name in names])
def test_the_training_curve_does_not_depend_on_the_layout(done, reference, name):
    """In fp32 without dropout: losses of every step and held-out losses to 1e-4, the gradient norm to 0.1 %."""
    one, other = done[reference], done[name]
    for kind, value, tolerance in (
        (StepRecord, "loss", {"abs": 1e-4}),
        (EvaluationRecord, "loss", {"abs": 1e-4}),
        (StepRecord, "grad_norm", {"rel": 1e-3}),
        (StepRecord, "lr", {"rel": 1e-12}),
    ):
        wanted = [getattr(record, value) for record in one.of(kind)]
        assert [getattr(record, value) for record in other.of(kind)] == pytest.approx(wanted, **tolerance)
    assert len(one.of(StepRecord)) == 16


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Census]]:
    """Every rank's counts over twenty transitions between unlike layouts, and ten under ZeRO 3."""
    folder = tmp_path_factory.mktemp("runs")
    unlike = {"levels": [{}, {"tensor_parallel": 2, "zero_stage": 3}]}
    changes = {"unlike": {**cycles(10), **unlike}, "zero3": cycles(5)}
    stages = {"unlike": 1, "zero3": 3}
    configs = {name: tiny_run(folder / name, zero_stage=stages[name], changes=changes[name]) for name in changes}
    return values(2, "tests.dist.cases_cycle:leaks", [configs], timeout_s=600)


@pytest.mark.parametrize(("name", "transitions"), [("unlike", 20), ("zero3", 10)])
def test_transitions_leave_nothing_behind(census, name, transitions):
    """Weights, optimizers and modules die before the next engine is built; descriptors, threads, memory stay flat.

    The fine level's weights alone are 17 MB: one engine kept alive shows four times over in the 4 MB allowed.
    """
    for counts in (rank[name] for rank in census):
        assert counts.alive == [0] * (transitions + 2) and counts.shells == 0
        ended = transitions + 1  # what is left at the end
        first, later = slice(1, 5), slice(5, ended)  # two cycles, and all further ones
        assert max(counts.descriptors[later]) == max(counts.descriptors[first]) >= counts.descriptors[ended]
        assert max(counts.threads[later]) == max(counts.threads[first]) >= counts.threads[ended]
        assert max(counts.resident[later]) - max(counts.resident[first]) < 4 << 20
        assert counts.resident[ended] < max(counts.resident[first])
