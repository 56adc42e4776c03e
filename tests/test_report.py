import copy
import csv
import json
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from rich.console import Console

from ds_vcycle.config import UserError, parse_config
from ds_vcycle.report import compare, markdown, render, to_json, write
from ds_vcycle.train.flops import Flops
from ds_vcycle.train.metrics import MetricsWriter, Place, Totals, evaluation_record, step_record, transition_record

CONFIG = {
    "model": {"architecture": "gpt", "layers": 4, "hidden": 64, "heads": 4, "sequence_length": 16, "vocab_size": 100},
    "training": {"global_batch": 8, "micro_batch": 4},
    "data": {"path": "data/x"},
    "cycle": {"kind": "flat", "flat": {"steps": 40}},
}
V_CYCLE = {"kind": "V", "initial": {"steps": 10}, "coarse": {"steps": 20}, "final": {"steps": 20}}
LEVEL_FLOPS = {1: Flops(blocks=80, head=20), 2: Flops(blocks=10, head=10)}


def make_run(directory: Path, phases, config=None, **sections) -> Path:
    """A run directory whose phases are (level, [(steps since the phase's start, held-out loss), ...])."""
    directory.mkdir(parents=True)
    tree = copy.deepcopy({**(config or CONFIG), **sections})
    (directory / "config.yaml").write_text(yaml.safe_dump(parse_config(tree).model_dump(mode="json")))
    writer = MetricsWriter(directory / "metrics.jsonl")
    totals, index = Totals(), 0
    for (level, losses), following in pairwise([*phases, None]):
        done = 0
        for steps, loss in losses:
            while done < steps:
                done += 1
                before = totals
                totals = totals.after_step(samples=8, tokens=128, flops=LEVEL_FLOPS[level], seconds=1.0 / level)
                place = Place(phase=index, level=level, step=totals.steps, phase_step=done)
                writer.write(step_record(place, loss=loss, lr=1e-3, grad_norm=1.0, before=before, after=totals))
            place = Place(phase=index, level=level, step=totals.steps, phase_step=done)
            writer.write(evaluation_record(place, loss=loss, samples=32, totals=totals))
        if following:
            before, totals = totals, totals.after_seconds(3.0)
            fine, coarse = sorted((level, following[0]))
            kind = "coalesce" if following[0] == coarse else "refine"
            place = Place(phase=index + 1, level=following[0], step=totals.steps, phase_step=1)
            writer.write(transition_record(place, kind=kind, fine=fine, coarse=coarse, before=before, after=totals))
        index += 2
    writer.close()
    return directory


FLAT = [(1, [(0, 8.0), (10, 6.0), (20, 5.0), (30, 4.5), (40, 4.0)])]
CYCLE = [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 3.9)]), (1, [(0, 4.6), (10, 4.2), (20, 3.8)])]


@pytest.fixture
def flat(tmp_path):
    return make_run(tmp_path / "flat", FLAT)


@pytest.fixture
def cycle(tmp_path):
    return make_run(tmp_path / "cycle", CYCLE, cycle=V_CYCLE)


def test_costs_are_interpolated_and_count_from_the_first_step(flat, cycle):
    comparison = compare([flat, cycle])
    base, row = comparison.rows
    assert comparison.loss == 4.0
    assert (base.reached.flops, base.reached.seconds, base.saved_flops) == (4000, 40.0, 0.0)
    # 10 steps of level 1, 20 of level 2, then half-way between the steps 10 (4.2) and 20 (3.8) of the last phase
    assert row.reached.flops == pytest.approx(10 * 100 + 20 * 20 + 15 * 100)
    assert row.reached.flops_blocks == pytest.approx(10 * 80 + 20 * 10 + 15 * 80)
    assert row.reached.tokens == pytest.approx(45 * 128)
    assert row.reached.seconds == pytest.approx(10 + 3 + 20 / 2 + 3 + 15)
    assert row.saved_flops == pytest.approx(1 - 2900 / 4000)
    assert row.saved_flops_blocks == pytest.approx(1 - 2200 / 3200)
    assert row.saved_seconds == pytest.approx(1 - 41 / 40)
    assert (row.final_loss, row.best_loss, row.run.total.flops) == (3.8, 3.8, 3400)


def test_a_coarse_level_below_the_loss_does_not_reach_it(tmp_path, flat):
    run = make_run(tmp_path / "run", [(1, [(10, 6.0)]), (2, [(20, 3.0)]), (1, [(0, 4.6), (10, 4.5)])], cycle=V_CYCLE)
    row = compare([flat, run]).rows[1]
    assert row.reached is None and row.saved_flops is None and row.saved_seconds is None


def test_no_line_is_drawn_through_another_level(tmp_path, flat):
    run = make_run(tmp_path / "run", [(1, [(10, 6.0)]), (2, [(20, 3.0)]), (1, [(0, 3.9), (10, 3.8)])], cycle=V_CYCLE)
    assert compare([flat, run]).rows[1].reached.flops == 10 * 100 + 20 * 20


def test_the_line_from_a_refine_to_the_next_evaluation_is_drawn(tmp_path, flat):
    run = make_run(tmp_path / "run", [(1, [(10, 6.0)]), (2, [(20, 3.0)]), (1, [(10, 3.5)])], cycle=V_CYCLE)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"refine"' in line)
    refined = json.loads(lines[at])
    kept = ("phase", "level", "step", "phase_step", "tokens", "flops", "flops_blocks", "seconds")
    evaluation = {"event": "evaluation", **{key: refined[key] for key in kept}, "loss": 4.5, "samples": 32}
    (run / "metrics.jsonl").write_text("\n".join([*lines[: at + 1], json.dumps(evaluation), *lines[at + 1 :]]) + "\n")
    # half way from 4.5 to 3.5: half of the ten steps of level 1 at 100 each
    assert compare([flat, run]).rows[1].reached.flops == pytest.approx(10 * 100 + 20 * 20 + 5 * 100)


def test_a_run_that_costs_more_has_a_negative_saving(tmp_path, flat):
    slow = make_run(tmp_path / "slow", [(1, [(20, 6.0), (40, 4.5), (60, 3.5)])])
    comparison = compare([flat, slow])
    assert comparison.rows[1].saved_flops == pytest.approx(1 - 50 / 40)
    assert "-25.0%" in markdown(comparison)


def test_the_baseline_is_charged_only_until_it_first_had_its_last_loss(tmp_path, cycle):
    early = make_run(tmp_path / "early", [(1, [(0, 8.0), (20, 3.5), (40, 4.0)])])
    comparison = compare([early, cycle])
    assert comparison.rows[0].reached.flops == pytest.approx(2000 * 4 / 4.5)
    assert any("first reached its last loss after 44.4% of its FLOPs" in note for note in comparison.notes)


def test_another_baseline_can_be_named(flat, cycle):
    comparison = compare([flat, cycle], baseline=cycle)
    assert (comparison.baseline, comparison.loss) == ("cycle", 3.8)
    assert [row.run.name for row in comparison.rows] == ["cycle", "flat"]
    assert comparison.rows[1].reached is None


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, flat):
    other = make_run(tmp_path / "more" / "flat", FLAT)
    assert [row.run.name for row in compare([flat, other]).rows] == [str(flat), str(other)]


def test_notes_name_what_differs_besides_the_schedule(tmp_path, flat, cycle):
    assert any("same settings" in note for note in compare([flat, cycle]).notes)
    other = make_run(tmp_path / "other", FLAT, data={"path": "data/x", "seed": 7}, lr={"peak": 5e-4})
    notes = compare([flat, other]).notes
    assert any("other differs from the baseline in data.seed (7; baseline 1234)." in note for note in notes)
    assert not any("same settings" in note for note in notes)
    assert any("peak learning rate is 0.0005" in note for note in compare([other, flat]).notes)


def test_notes_name_a_run_that_did_not_make_its_steps(tmp_path, flat):
    short = make_run(tmp_path / "short", [(1, [(10, 6.0), (25, 4.8)])])
    notes = compare([flat, short]).notes
    assert any("short made 25 of 40 planned steps" in note for note in notes)
    assert not any("flat made" in note for note in notes)


def test_table_and_markdown_say_the_same(flat, cycle, tmp_path):
    never = make_run(tmp_path / "never", [(1, [(10, 6.0), (40, 4.8)])])
    comparison = compare([flat, cycle, never])
    console = Console(file=StringIO(), width=160)
    render(comparison, console)
    for text in (console.file.getvalue(), markdown(comparison)):
        for part in ("+27.5%", "-2.5%", "not reached", "2.90e3", "to loss 4.0000: FLOPs", "One run each"):
            assert part in text
    values = json.loads(json.dumps(to_json(comparison)))
    assert values["runs"][1]["saved_flops"] == pytest.approx(0.275)
    assert values["runs"][2]["reached"] is None


def test_the_chart_shows_every_run_in_its_colour(flat, cycle, tmp_path):
    path, table, values = write(compare([flat, cycle]), tmp_path / "out" / "two.runs")
    assert (path.name, table.name) == ("two.runs.png", "two.runs.md")
    base, row = csv.DictReader(values.read_text().splitlines())
    assert (base["saved_flops"], float(row["reached_flops"])) == ("0.0", pytest.approx(10 * 100 + 20 * 20 + 15 * 100))
    assert "| saved FLOPs | baseline | +27.5% |" in table.read_text()
    pixels = np.round(imread(path)[..., :3] * 255).astype(int)
    assert pixels.shape[0] > 600 and pixels.shape[1] > 1000
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (np.abs(pixels - colour).max(axis=2) < 3).sum() > 500


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: run.rename(run.with_name("gone")), r"run: no such run directory"),
        (lambda run: (run / "config.yaml").unlink(), r"run: no config.yaml in it"),
        (lambda run: (run / "config.yaml").write_text("model: ["), r"config.yaml: not readable"),
        (lambda run: (run / "config.yaml").write_text("- 1"), r"config.yaml: not a run's configuration"),
        (lambda run: (run / "metrics.jsonl").unlink(), r"metrics.jsonl: no such file"),
        (lambda run: (run / "metrics.jsonl").write_text(""), r"run: metrics.jsonl has no evaluation of level 1"),
        (lambda run: (run / "metrics.jsonl").write_text("x\n"), r"metrics.jsonl:1: not a metrics record"),
    ],
)
def test_a_bad_run_directory_is_named_with_what_is_missing(tmp_path, flat, damage, message):
    run = make_run(tmp_path / "run", FLAT)
    damage(run)
    with pytest.raises(UserError, match=message):
        compare([flat, run])


@pytest.mark.parametrize("out", [".", "/", "file/compare"])
def test_an_unwritable_out_is_named(tmp_path, flat, cycle, out):
    (tmp_path / "file").write_text("in the way")
    target = Path(out) if out in (".", "/") else tmp_path / out
    with pytest.raises(UserError, match="--out"):
        write(compare([flat, cycle]), target)


def test_losses_of_another_vocabulary_are_not_compared(tmp_path, flat):
    model = yaml.safe_load((flat / "config.yaml").read_text())["model"]
    other = make_run(tmp_path / "other", FLAT, model={**model, "vocab_size": model["vocab_size"] + 1})
    with pytest.raises(UserError, match=r"other: model\.vocab_size is .* not comparable"):
        compare([flat, other])


def test_the_baseline_under_another_spelling_is_itself(tmp_path, flat, cycle):
    again = compare([flat, cycle, tmp_path / "cycle" / ".." / "flat"])
    assert [row.run.name for row in again.rows] == ["flat", "cycle"]


def test_a_baseline_without_progress_is_refused(tmp_path, flat):
    flat_line = make_run(tmp_path / "line", [(1, [(0, 5.0), (40, 5.0)])])
    with pytest.raises(
        UserError, match=r"line: the baseline was at its final held-out loss 5\.0000 before its first step"
    ):
        compare([flat_line, flat])
    broken = make_run(tmp_path / "nan", [(1, [(0, 5.0), (40, float("nan"))])])
    with pytest.raises(UserError, match="nan: the baseline's final held-out loss is nan"):
        compare([broken, flat])
    assert compare([flat, broken]).rows[1].best_loss == 5.0


def test_a_coarse_level_that_is_there_already_is_told(flat, tmp_path):
    early = [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 3.9)]), (1, [(0, 3.95), (10, 3.8)])]
    late = [(1, [(10, 6.0)]), (2, [(10, 5.0), (20, 4.1)]), (1, [(0, 4.2), (10, 3.8)])]
    runs = [make_run(tmp_path / name, losses, cycle=V_CYCLE) for name, losses in (("early", early), ("late", late))]
    told = [note for note in compare([flat, *runs]).notes if "would do" in note]
    # 10 steps of level 1 and 20 of level 2, of the 40 steps that the baseline took
    assert len(told) == 1 and told[0].startswith(
        "early: level 2 alone was at 4.0000 after 35.0% of the baseline's FLOPs"
    )
