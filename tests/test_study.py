"""Studies: what is run, skipped, resumed and refused, and that the report says what the runs' records say."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_vcycle import cli
from ds_vcycle.config import ConfigError, RunConfig
from ds_vcycle.cycle.stopping import write_status
from ds_vcycle.seeds import Spread
from ds_vcycle.study.definition import load_study, tasks_of
from ds_vcycle.study.rendering import verdict
from ds_vcycle.study.running import StudyError, is_done
from ds_vcycle.study.summary import read_summary, summarise
from tests.test_report import CONFIG, V_CYCLE, make_run
from tests.test_seeds import CYCLES, FLATS, cost_by_hand
from tests.tiny import tiny_run

SEEDS = [1, 2, 3]
NEVER: Any = [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 4.5)]), (1, [(0, 4.9), (10, 4.8), (20, 4.7)])]


def write_study(folder: Path, **changes: Any) -> Path:
    base = folder / "base.yaml"
    base.write_text(yaml.safe_dump({**CONFIG, "cycle": {**V_CYCLE, "flat": {"steps": 40}}}))
    tree = {
        "title": "Savings",
        "out": str(folder / "out"),
        "budget_minutes": 5,
        "seeds": SEEDS,
        "groups": {
            "gpt": {"base": str(base), "variants": {"flat": ["cycle.kind=flat"], "v": [], "rest": ["lr.peak=2e-3"]}}
        },
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def make_runs(path: Path, losses: dict[str, Callable[[int], Any]]) -> None:
    """Finished runs of a study, made of losses by variant and seed."""
    for task in tasks_of(load_study(path)):
        if task.variant in losses:
            tree = task.config.model_dump(mode="json")
            make_run(task.config.run_dir, losses[task.variant](task.seed), config=tree)
            write_status(task.config.run_dir, "finished", {})


def everything(path: Path) -> None:
    make_runs(path, {"flat": lambda s: [(1, FLATS[s])], "v": lambda s: CYCLES[s], "rest": lambda _: NEVER})


def test_report_says_what_the_records_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_study(tmp_path)
    everything(path)
    assert cli.run(["study", "--config", str(path), "--report"]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "out"
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert len(rows) == 9
    saved = []
    for seed in SEEDS:
        goal = FLATS[seed][-1][1]
        paid, cost = (cost_by_hand(out / "runs" / "gpt" / f"{v}-seed-{seed}", goal, "flops") for v in ("flat", "v"))
        assert paid and cost
        saved.append(1 - cost / paid)
        (row,) = (row for row in rows if (row["variant"], row["seed"]) == ("v", str(seed)))
        assert float(row["saved_flops"]) == pytest.approx(saved[-1])
    mean = f"{sum(saved) / 3:+.1%}"
    for text in (printed, (out / "report.md").read_text(), (out / "report.html").read_text()):
        assert mean in text
        assert "reached by 0 of 3" in text
    page = (out / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page), "the page needs another file"
    assert page.count("data:image/png;base64,") == 2


def test_a_run_that_never_gets_there_or_stopped_early_saves_nothing(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    short: Any = [(1, [(10, 6.0)]), (2, [(10, 5.0)])]
    make_runs(path, {"flat": lambda s: [(1, FLATS[s])], "v": lambda _: short, "rest": lambda _: NEVER})
    study = load_study(path)
    (group,) = summarise(study, tasks_of(study))[0].groups
    for variant in ("v", "rest"):
        assert group.saving(variant, "saved_flops").mean is None
        assert "no saving is shown" in verdict(group.saving(variant, "saved_flops"))


def test_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    everything(path)
    assert cli.run(["study", "--config", str(path), "--report"]) == 0
    study = load_study(path)
    assert read_summary(tmp_path / "out" / "results.json") == summarise(study, tasks_of(study))[0]


def test_what_is_missing_is_named_and_a_seed_without_its_baseline_left_out(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    make_runs(path, {"flat": lambda s: [(1, FLATS[s])], "v": lambda s: CYCLES[s]})
    out = tmp_path / "out"
    write_status(out / "runs" / "gpt" / "flat-seed-2", "running", {})
    study = load_study(path)
    summary, _ = summarise(study, tasks_of(study))
    assert {run.seed for run in summary.groups[0].of("v")} == {1, 3}
    assert set(summary.missing) == {
        f"gpt/{name}: not finished" for name in ("flat seed 2", *(f"rest seed {s}" for s in SEEDS))
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.3, 0.32, 0.31), "not touching zero"),
        ((0.3, -0.3, 0.1), "touches zero"),
        ((-0.3, -0.31, -0.32), "more than the baseline"),
        ((0.4, None, 0.4), "reached by 2 of 3"),
        ((0.4,), "one seed"),
        ((0.4, 0.4, 0.4), "the same for all 3 seeds"),
    ],
)
def test_verdicts(values: tuple[float | None, ...], words: str) -> None:
    assert words in verdict(Spread(values=values))


def test_against_documented_savings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_study(tmp_path)
    everything(path)
    assert cli.run(["study", "--config", str(path), "--report"]) == 0
    documented = tmp_path / "documented.json"
    documented.write_text((tmp_path / "out" / "results.json").read_text())
    capsys.readouterr()
    arguments = ["study", "--config", str(path), "--report", "seeds=[2]", "--against", str(documented)]
    assert cli.run(arguments) == 0
    assert re.search(r"gpt/v seed 2: documented .*: within two standard deviations", capsys.readouterr().out)
    tree = json.loads(documented.read_text())
    for run in tree["groups"][0]["runs"]:
        run["saved_flops"] = None if run["saved_flops"] is None else run["saved_flops"] - 5.0
    documented.write_text(json.dumps(tree))
    assert cli.run(arguments) == 0
    assert "NOT within" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": [1, 1]}, "seeds=[1, 1]"),
        ({"groups": {}}, "groups"),
        ({"budget": 3}, "unknown key 'budget'"),
        ({"budget_minutes": 0}, "budget_minutes=0"),
        ({"out": ""}, "names no directory of its own"),
        ({"groups": {"g": {"base": "x", "variants": {"flat": []}, "foo": 1}}}, "unknown key 'groups.g.foo'"),
    ],
)
def test_wrong_studies_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        tasks_of(load_study(write_study(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ({"v": []}, "baseline=flat is no variant"),
        ({"flat": ["cycle.kind=flat"], "a/b": []}, "a/b"),
        ({"flat": ["cycle.kind=flat"], "v": ["training.seed=3"]}, "training.seed=3"),
        ({"flat": ["cycle.kind=flat"], "v": ["modl.layers=3"]}, "groups.gpt.variants.v"),
        ({"flat": ["cycle.kind=flat"], "v": [], "w": []}, "v and w are the same run"),
        ({"flat": "cycle.kind=flat"}, "expected a list of overrides"),
        ({"flat": None}, "expected a list of overrides"),
        ({"flat": {"overrids": []}}, "did you mean 'overrides'"),
    ],
)
def test_wrong_variants_are_refused_by_name(tmp_path: Path, variants: dict[str, Any], words: str) -> None:
    path = write_study(tmp_path)
    tree = yaml.safe_load(path.read_text())
    tree["groups"]["gpt"]["variants"] = variants
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=re.escape(words)):
        tasks_of(load_study(path))


def test_a_directory_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    everything(path)
    (task, *_) = tasks_of(load_study(write_study(tmp_path)))
    assert is_done(task)
    changed = task.config.model_copy(update={"lr": task.config.lr.model_copy(update={"peak": 9.0})})
    with pytest.raises(StudyError, match="other settings"):
        is_done(
            type(task)(
                **{**{k: getattr(task, k) for k in ("group", "variant", "seed", "arguments")}, "config": changed}
            )
        )


def real_study(folder: Path, ranks: int, budget: float = 5.0) -> Path:
    config: RunConfig = tiny_run(folder / "unused", changes={"cycle.flat": {"steps": 6}})
    base = folder / "tiny.yaml"
    base.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return write_study(
        folder, seeds=[7], ranks=ranks, at_once=1, budget_minutes=budget,
        groups={"tiny": {"base": str(base), "variants": {"flat": ["cycle.kind=flat"], "v": []}}},
    )  # fmt: skip


def test_a_study_runs_skips_what_is_done_and_goes_on_after_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = real_study(tmp_path, ranks=1)
    assert cli.run(["study", "--config", str(path), "budget_minutes=0.0001"]) == 75
    assert "the budget of 0.0001 minutes is spent" in capsys.readouterr().err
    assert cli.run(["study", "--config", str(path), "--task", "0"]) == 0
    capsys.readouterr()
    assert cli.run(["study", "--config", str(path)]) == 0
    told = capsys.readouterr()
    assert "1 of 2 runs are done already" in told.err
    assert "tiny/v seed 7: finished" in told.err
    assert "by one seed" in told.out or "not reached" in told.out or "no saving is shown" in told.out
    summary = read_summary(tmp_path / "out" / "results.json")
    assert [run.variant for run in summary.groups[0].runs] == ["flat", "v"]
    assert len(summary.groups[0].of("v")[0].going_up) == 1
    assert not summary.missing


def test_a_failing_run_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = real_study(tmp_path, ranks=1)
    tree = yaml.safe_load(path.read_text())
    tree["groups"]["tiny"]["variants"] = {"flat": ["cycle.kind=flat", "data.path=nowhere"], "v": []}
    path.write_text(yaml.safe_dump(tree))
    assert cli.run(["study", "--config", str(path)]) == 1
    told = capsys.readouterr()
    assert "tiny/flat seed 7: failed" in told.err and "nowhere" in told.err
    assert "tiny/v seed 7: finished" in told.err
    assert "tiny/flat seed 7: failed" in told.out


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    path = write_study(tmp_path, out=str(tmp_path / "file" / "out"))
    assert cli.run(["study", "--config", str(path), "--report"]) == 2
    assert "out/results.json: cannot be written" in capsys.readouterr().err
    assert cli.run(["study", "--config", str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_damaged_run_and_a_group_without_its_baseline_are_told_and_the_rest_reported(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    everything(path)
    tree = yaml.safe_load(path.read_text())
    tree["groups"]["other"] = tree["groups"]["gpt"]
    path.write_text(yaml.safe_dump(tree))
    runs = tmp_path / "out" / "runs"
    (runs / "gpt" / "v-seed-2" / "metrics.jsonl").write_text("x\n")
    study = load_study(path)
    cycle = next(task for task in tasks_of(study) if (task.group, task.variant) == ("other", "v"))
    make_run(cycle.config.run_dir, CYCLES[1], config=cycle.config.model_dump(mode="json"))
    write_status(cycle.config.run_dir, "finished", {})
    summary, _ = summarise(study, tasks_of(study))
    (group,) = summary.groups
    assert {run.seed for run in group.of("v")} == {1, 3} and len(group.of("flat")) == 3
    told = "\n".join(summary.missing)
    assert "gpt/v seed 2: damaged: " in told and "metrics.jsonl:1" in told
    assert "other: its baseline flat is not finished, so nothing is compared" in told
