"""Rivals that are gathers, on live engines of two ranks: what they grow, against dense matrices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds_vcycle.checkpoint.store import open_checkpoint
from ds_vcycle.config import ConfigError, RunConfig, parse_config
from ds_vcycle.cycle.phases import Grow, Train
from ds_vcycle.cycle.schedule import expand, mapping_of
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.schema import parameters
from ds_vcycle.train.metrics import TransitionLossRecord, read_metrics
from tests.dist.ranks import values
from tests.oracle import Oracle, oracle_for
from tests.resumed import assert_same_run
from tests.test_resume import train
from tests.tiny import tiny_run

Arrays = dict[str, npt.NDArray[np.float64]]
BASE: dict[str, Any] = {
    "cycle.kind": "growth", "cycle.initial": {}, "cycle.final": {"steps": 1}, "cycle.coarse": {"steps": 3},
    "saving.every_steps": 1, "saving.keep_last": 20, "saving.keep_phase_ends": True,
}  # fmt: skip
ODD = {"hidden": 24, "heads": 3, "ffn": 80, "layers": 3}
DEPTH = {"hidden": 32, "heads": 4, "ffn": 128}
EXPANSION = {"method": "network_expansion", "ema_decay": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "fpi": {"tp": 2, "changes": {"cycle.growth": {"method": "fpi"}}},
    "fpi-bert": {"architecture": "bert", "tp": 2, "zero_stage": 2, "changes": {"cycle.growth": {"method": "fpi"}}},
    "fpi-odd": {"zero_stage": 3, "changes": {"cycle.growth": {"method": "fpi"}, "levels": [{}, ODD]}},
    "fpi-heads": {
        "tp": 2,
        "changes": {
            "cycle.growth": {"method": "fpi"},
            "levels": [{}, {"hidden": 32, "heads": 2, "ffn": 48, "layers": 4}],
        },
    },
    "aki": {"tp": 2, "changes": {"cycle.growth": {"method": "aki"}}},
    "aki-odd": {"zero_stage": 2, "changes": {"cycle.growth": {"method": "aki"}, "levels": [{}, ODD]}},
    "aki-three": {
        "tp": 2, "zero_stage": 0,
        "changes": {"cycle.growth": {"method": "aki"}, "model.heads": 8, "cycle.levels": 3},
    },
    "inserted": {"tp": 2, "changes": {"cycle.growth": EXPANSION, "levels": [{}, DEPTH]}},
    "stacked": {
        "zero_stage": 3,
        "changes": {"cycle.growth": {**EXPANSION, "arrangement": "stack"}, "levels": [{}, DEPTH]},
    },
    "inserted-three": {
        "tp": 2, "zero_stage": 2,
        "changes": {"cycle.growth": EXPANSION, "cycle.levels": 3, "levels": [{}, DEPTH, DEPTH]},
    },
}  # fmt: skip
LAYER = re.compile(r"layers\.(\d+)\.")


def run_of(folder: Path, name: str) -> RunConfig:
    case = CASES[name]
    return tiny_run(folder / name, **{**case, "changes": {**BASE, **case["changes"]}})


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    folder = tmp_path_factory.mktemp("grown")
    configs = {name: run_of(folder, name) for name in CASES}
    ranks = values(2, "tests.dist.cases_cycle:runs", [configs], timeout_s=600)
    assert all(outcome.ended == "finished" and not outcome.unlike for rank in ranks for outcome in rank.values())
    return configs


def stored(config: RunConfig, level: int, checkpoint: Path, key: str = "master") -> Arrays:
    """The real rows of every parameter of a checkpoint."""
    found = {}
    with open_checkpoint(checkpoint) as held:
        for parameter in parameters(resolve_levels(config)[level - 1].shape):
            flat = held.read(parameter, tp=1, tp_rank=0, start=0, length=parameter.numel, key=key)
            found[parameter.name] = flat.view(parameter.shape).numpy()[: parameter.dims[0].real].astype(np.float64)
    return found


def phase_end(config: RunConfig, phase: int) -> Path:
    (*_, last) = sorted((config.run_dir / "checkpoints").glob(f"step-*-phase-{phase:02d}"))
    return last


def growths(config: RunConfig) -> list[tuple[Grow, Oracle]]:
    """Each growth of a run and the matrices of its groups, which are those that were drawn."""
    levels, found = resolve_levels(config), []
    for phase in expand(config):
        if isinstance(phase, Grow):
            coarse, operators = mapping_of(phase, levels, config.operators)
            plan = plan_transition(levels[phase.fine - 1], coarse, operators)
            kinds = {axis: [list(group) for group in mapped.groups] for axis, mapped in plan.axes.items()}
            found.append((phase, oracle_for(plan, kinds, depth="copy")))
    return found


def copies(oracle: Oracle, side: str, length: int) -> list[int]:
    """The rows of a side that produce a feature which is not the first of its group."""
    if side == "." or side[0] == "-":
        return []
    return sorted(set(range(length)) - set(oracle.copies[side[1:]].argmax(axis=0)))


def of_next_layer(coarse: Arrays) -> Arrays:
    last = max(int(found[1]) for name in coarse if (found := LAYER.search(name)))

    def following(name: str) -> str:
        return LAYER.sub(lambda found: f"layers.{min(int(found[1]) + 1, last)}.", name)

    return {name: coarse[following(name)] for name in coarse}


@pytest.mark.parametrize("name", CASES)
def test_grown_weights_are_those_of_dense_matrices(grown: dict[str, RunConfig], name: str) -> None:
    config = grown[name]
    for phase, oracle in growths(config):
        coarse = stored(config, phase.coarse, phase_end(config, phase.index - 1))
        fine = stored(config, phase.fine, phase_end(config, phase.index))
        wanted = oracle.apply(coarse, direction="up")
        second: Arrays = {}
        if phase.method == "aki":
            second = oracle.apply(of_next_layer(coarse), direction="up")
        elif phase.method == "network_expansion":
            average = stored(config, phase.coarse, phase_end(config, phase.index - 1), "average")
            second = oracle.apply(average, direction="up")
        differing = 0
        for parameter, value in wanted.items():
            layer = LAYER.search(parameter)
            if phase.method == "aki" and layer and "layernorm" not in parameter:
                for dim, side in enumerate(oracle.sides(parameter)):
                    at = copies(oracle, side, value.shape[dim])
                    index = (slice(None),) * dim + (at,)
                    value[index] = second[parameter][index]
                    differing += len(at)
            inserted = layer and int(layer[1]) not in {group[0] for group in oracle.layers}
            if phase.method == "network_expansion" and inserted:
                differing += int((value != second[parameter]).sum())
                value = second[parameter]
            np.testing.assert_allclose(fine[parameter], value, rtol=1e-6, atol=1e-9, err_msg=parameter)
        assert fine.keys() == wanted.keys()
        assert bool(differing) == bool(second)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("fpi", "aki"))])
def test_the_first_indices_are_the_coarse_ones(grown: dict[str, RunConfig], name: str) -> None:
    config = grown[name]
    levels = resolve_levels(config)
    for phase in expand(config):
        if isinstance(phase, Grow):
            coarse, operators = mapping_of(phase, levels, config.operators)
            axes = plan_transition(levels[phase.fine - 1], coarse, operators).axes
            for axis in axes.values():
                assert axis.parent[: axis.coarse] == tuple(range(axis.coarse))
            assert axes["layer"].parent == tuple(i % axes["layer"].coarse for i in range(axes["layer"].fine))


def test_another_seed_draws_other_copies(tmp_path: Path) -> None:
    drawn = set()
    for seed in (1, 2, 3):
        config = run_of(tmp_path, "fpi")
        config = parse_config(config.model_dump(mode="json"), overrides=[f"training.seed={seed}"])
        (grow,) = (phase for phase in expand(config) if isinstance(phase, Grow))
        coarse, _ = mapping_of(grow, resolve_levels(config), config.operators)
        drawn.add(str(coarse.groupings.hidden))
    assert len(drawn) == 3


def test_heads_and_features_that_are_copied_keep_the_function(grown: dict[str, RunConfig]) -> None:
    """Their groups are unequal; only unequal hidden groups change a norm."""
    (change,) = (
        r for r in read_metrics(grown["fpi-heads"].run_dir / "metrics.jsonl") if type(r) is TransitionLossRecord
    )
    assert change.after == pytest.approx(change.before, abs=2e-5)


@pytest.mark.parametrize("name", ["inserted", "stacked"])
def test_the_average_follows_the_weights(grown: dict[str, RunConfig], name: str) -> None:
    config = grown[name]
    steps = sorted((config.run_dir / "checkpoints").glob("step-*-phase-00"))
    assert len(steps) == 3
    decay = config.cycle.growth.ema_decay
    weights = [stored(config, 2, path) for path in steps]
    averages = [stored(config, 2, path, "average") for path in steps]
    for parameter in weights[0]:
        start = (averages[0][parameter] - (1 - decay) * weights[0][parameter]) / decay
        if "layernorm.weight" in parameter:
            np.testing.assert_allclose(start, 1.0, rtol=1e-6)
        for step in (1, 2):
            wanted = decay * averages[step - 1][parameter] + (1 - decay) * weights[step][parameter]
            np.testing.assert_allclose(averages[step][parameter], wanted, rtol=1e-5, atol=1e-8)
    with open_checkpoint(phase_end(config, 1)) as held:
        assert "average" not in held.keys(parameters(resolve_levels(config)[0].shape)[0])


def test_an_average_survives_a_kill_with_its_bits(tmp_path: Path, grown: dict[str, RunConfig]) -> None:
    config = run_of(tmp_path, "inserted")
    killed = train(config, fault="step@2")
    assert [result.exit_code for result in killed] == [137, 137]
    again = train(config, "--resume", fault="grow.done")
    assert [result.exit_code for result in again] == [137, 137]
    assert [result.exit_code for result in train(config, "--resume")] == [0, 0]
    assert_same_run(config.run_dir, grown["inserted"].run_dir)


@pytest.mark.parametrize(
    ("growth", "words"),
    [
        ({"method": "fpi", "ema_decay": 0.5}, "ema_decay=0.5 is set, but method=fpi does not read it"),
        ({"method": "stackbert", "arrangement": "stack"}, "arrangement=stack is set, but method=stackbert"),
        ({"method": "network_expansion", "ema_decay": 1.0}, "ema_decay"),
    ],
)
def test_settings_of_another_method_are_refused(tmp_path: Path, growth: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        tiny_run(tmp_path, changes={**BASE, "cycle.growth": growth})


def test_only_phases_before_a_growth_keep_an_average(tmp_path: Path) -> None:
    phases = expand(run_of(tmp_path, "inserted-three"))
    assert [phase.ema_decay for phase in phases if isinstance(phase, Train)] == [0.9, 0.9, None]
