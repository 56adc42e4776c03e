"""Savings over seeds, held against a computation from metrics.jsonl alone that knows nothing of the package."""

from __future__ import annotations

import copy
import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle import cli
from ds_vcycle.comparison import ReportError, read_runs
from ds_vcycle.seeds import compare_seeds
from tests.test_report import CONFIG, V_CYCLE, make_run

FLATS = {1: [(0, 8.0), (20, 5.0), (40, 4.0)], 2: [(0, 8.0), (20, 5.5), (40, 4.2)], 3: [(0, 8.0), (20, 5.0), (40, 4.1)]}
CYCLES: dict[int, Any] = {
    1: [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 3.9)]), (1, [(0, 4.6), (10, 4.2), (20, 3.8)])],
    2: [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 3.9)]), (1, [(0, 4.6), (10, 4.1), (20, 3.9)])],
    3: [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 3.9)]), (1, [(0, 4.6), (10, 4.4), (20, 3.95)])],
}


def seeded(seed: int) -> dict[str, Any]:
    return {**copy.deepcopy(CONFIG), "training": {**CONFIG["training"], "seed": seed}}  # type: ignore[dict-item]


def make_all(root: Path, seeds: tuple[int, ...] = (1, 2, 3)) -> list[Path]:
    flats = [make_run(root / f"flat-{seed}", [(1, FLATS[seed])], config=seeded(seed)) for seed in seeds]
    cycles = [make_run(root / f"v-{seed}", CYCLES[seed], config=seeded(seed), cycle=V_CYCLE) for seed in seeds]
    return [*flats, *cycles]


def cost_by_hand(directory: Path, loss: float, key: str) -> float | None:
    """The cost at which level 1 is first at or below ``loss``: a line between evaluations of a phase or after a refine.

    Written for these runs from the definition; reads metrics.jsonl and nothing else.
    """
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    points = [(e["phase"], e["loss"], e[key]) for e in lines if e["event"] == "evaluation" and e["level"] == 1]
    for (phase, high, start), (at, low, end) in pairwise(points):
        if low <= loss < high:
            return float(end if at - phase > 1 else start + (high - loss) / (high - low) * (end - start))
    return None


@pytest.mark.parametrize("key", ["flops", "flops_blocks", "tokens", "seconds"])
def test_savings_are_those_of_the_records(tmp_path: Path, key: str) -> None:
    found = compare_seeds(read_runs(make_all(tmp_path)))
    (variant,) = found.variants
    assert (found.baseline, found.seeds, variant.name, variant.seeds) == ("flat", (1, 2, 3), "v", (1, 2, 3))
    wanted = []
    for seed in found.seeds:
        goal = FLATS[seed][-1][1]
        paid, cost = (cost_by_hand(tmp_path / f"{name}-{seed}", goal, key) for name in ("flat", "v"))
        assert paid and cost
        wanted.append(1 - cost / paid)
    spread = variant.savings[f"saved_{key}"]
    assert spread.values == pytest.approx(wanted)
    assert spread.mean == pytest.approx(sum(wanted) / 3)
    assert spread.deviation == pytest.approx(math.sqrt(statistics.variance(wanted)))
    assert len(set(wanted)) == 3


def test_a_seed_that_never_gets_there_leaves_no_mean(tmp_path: Path) -> None:
    """A run that stops early, or never reaches the loss, cannot show a saving; nor can the others without it."""
    paths = make_all(tmp_path, (1, 2))
    early = [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 3.9)]), (1, [(0, 4.6), (4, 4.3)])]
    paths.append(make_run(tmp_path / "flat-3", [(1, FLATS[3])], config=seeded(3)))
    paths.append(make_run(tmp_path / "v-3", early, config=seeded(3), cycle=V_CYCLE))
    (variant,) = compare_seeds(read_runs(paths)).variants
    spread = variant.savings["saved_flops"]
    assert spread.values[2] is None and spread.values[0] is not None
    assert (spread.mean, spread.deviation, str(spread)) == (None, None, "reached by 2 of 3")


def test_a_run_that_evaluates_rarely_gains_nothing_by_it(tmp_path: Path) -> None:
    """With one evaluation after the refine the line is drawn from the refine's, so the cost can only be rougher."""
    often, rare = ([(0, 4.6), (10, 4.0), (20, 3.8)], [(0, 4.6), (20, 3.8)])
    flat = make_run(tmp_path / "flat", [(1, FLATS[1])], config=seeded(1))
    up = [(1, [(10, 6.0)]), (2, [(20, 3.9)])]
    costs = []
    for name, last in (("often", often), ("rare", rare)):
        run = make_run(tmp_path / name, [*up, (1, last)], config=seeded(1), cycle=V_CYCLE)
        row = compare_seeds(read_runs([flat, run])).variants[0].rows[0]
        assert row.reached is not None
        costs.append(row.reached.flops)
    assert costs[1] > costs[0]


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    paths = make_all(tmp_path, (1, 2))
    with pytest.raises(ReportError, match=r"v-2 has training.seed=2, and the baseline has runs of 1 only"):
        compare_seeds(read_runs([paths[0], paths[2], paths[3]]))
    again = make_run(tmp_path / "flat-again", [(1, FLATS[1])], config=seeded(1))
    with pytest.raises(ReportError, match=r"flat-again and .*flat-1 are the same run with the same training.seed=1"):
        compare_seeds(read_runs([*paths, again]))


def test_the_command_line_prints_and_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in make_all(tmp_path)]
    assert cli.run(["compare", *paths, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "out.md").read_text()
    mean = compare_seeds(read_runs([Path(path) for path in paths])).variants[0].savings["saved_flops"]
    assert str(mean) in text and str(mean) in " ".join(printed.split())
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        *(f"out-seed-{seed}.{ending}" for seed in (1, 2, 3) for ending in ("csv", "md", "png")),
        "out.md",
    ]
    assert cli.run(["compare", *paths, "--out", ".."]) == 2
    assert "--out ..: names no file" in capsys.readouterr().err
    assert cli.run(["compare", *paths, "--json", "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["variants"][0]["saved_flops"]["mean"] == pytest.approx(mean.mean)
