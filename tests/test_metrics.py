import json
import math

import pytest

from ds_vcycle.train.flops import Flops
from ds_vcycle.train.metrics import (
    EvaluationRecord,
    MetricsError,
    MetricsWriter,
    Place,
    StepRecord,
    Totals,
    evaluation_record,
    last_of_each_place,
    read_metrics,
    save_record,
    step_record,
    transition_record,
)

COST = {"samples": 4, "tokens": 64, "flops": Flops(blocks=300, head=100), "seconds": 0.5}


def write_run(path, phases=((0, 1, 3), (2, 2, 4)), resume_at=None, first=(0, 0)):
    """Two training phases around a transition; writes only what comes after the place ``first``."""
    writer = MetricsWriter(path, resume_at=resume_at)
    totals = Totals()
    for phase, level, steps in phases:
        for phase_step in range(1, steps + 1):
            before, totals = totals, totals.after_step(**COST)
            place = Place(phase=phase, level=level, step=totals.steps, phase_step=phase_step)
            if (phase, phase_step) > first:
                writer.write(step_record(place, loss=5.0, lr=1e-3, grad_norm=0.7, before=before, after=totals))
                writer.write(evaluation_record(place, loss=5.5, samples=32, totals=totals))
        before, totals = totals, totals.after_seconds(2.0)
        place = Place(phase=phase + 1, level=level + 1, step=totals.steps, phase_step=1)
        if (phase + 1, 1) > first:
            record = transition_record(
                place, kind="coalesce", fine=level, coarse=level + 1, before=before, after=totals
            )
            writer.write(record)
    writer.close()
    return totals


def test_costs_add_up_over_the_run_and_each_step_has_its_own(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    totals = write_run(path)
    assert totals == Totals(steps=7, samples=28, tokens=448, flops=2800, flops_blocks=2100, seconds=7.5)
    steps = [record for record in read_metrics(path) if isinstance(record, StepRecord)]
    assert [(r.phase, r.phase_step, r.step, r.tokens, r.flops) for r in steps][2:4] == [
        (0, 3, 3, 192, 1200),
        (2, 1, 4, 256, 1600),
    ]
    assert {(r.step_tokens, r.step_flops, r.step_flops_blocks, r.step_seconds) for r in steps} == {(64, 400, 300, 0.5)}
    assert steps[3].seconds == 3 * 0.5 + 2.0 + 0.5
    assert steps[0].tokens_per_second == 128.0


def test_every_line_is_an_object_with_its_event(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, phases=((0, 1, 1),))
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["event"], second["event"], third["event"]) == ("step", "evaluation", "transition")
    assert second == {
        "event": "evaluation", "phase": 0, "level": 1, "step": 1, "phase_step": 1, "loss": 5.5, "samples": 32,
        "tokens": 64, "flops": 400, "flops_blocks": 300, "seconds": 0.5,
    }  # fmt: skip
    assert third["own_seconds"] == 2.0


def test_all_kinds_come_back_as_written(tmp_path):
    place = Place(phase=3, level=1, step=9, phase_step=1)
    before, after = Totals(steps=9, seconds=10.0), Totals(steps=9, seconds=12.5)
    records = (
        step_record(place, loss=4.0, lr=1e-3, grad_norm=1.0, before=Totals(), after=after),
        evaluation_record(place, loss=4.5, samples=8, totals=after),
        transition_record(place, kind="refine", fine=1, coarse=2, alpha=1.0, beta=0.25, before=before, after=after),
        save_record(place, path="checkpoints/step-9", totals=after, own_seconds=2.5, stall_seconds=0.25),
    )
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for record in records:
        writer.write(record)
    assert read_metrics(tmp_path / "metrics.jsonl") == records  # flushed, although the file is still open
    assert (records[3].seconds, records[3].own_seconds, records[3].stall_seconds) == (12.5, 2.5, 0.25)
    writer.close()


def test_values_that_are_not_finite_stay_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    place = Place(phase=0, level=1, step=1, phase_step=1)
    writer.write(step_record(place, loss=math.inf, lr=1.0, grad_norm=math.nan, before=Totals(), after=Totals(steps=1)))
    writer.close()
    assert json.loads(path.read_text())["loss"] is None
    (record,) = read_metrics(path)
    assert math.isnan(record.loss) and math.isnan(record.grad_norm) and math.isnan(record.tokens_per_second)


@pytest.mark.parametrize("at", [(0, 0), (0, 2), (0, 3), (1, 1), (2, 1), (2, 4), (3, 1)])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path, at):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_run(whole)
    write_run(resumed)
    with resumed.open("a") as file:
        file.write('{"event": "step", "phase": 9, "lo')  # killed while writing
    write_run(resumed, resume_at=at, first=at)
    assert resumed.read_text() == whole.read_text()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_new_run_does_not_write_into_an_old_ones_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path)
    old = path.read_text()
    with pytest.raises(MetricsError, match=r"metrics.jsonl: holds the metrics of an earlier run; .*--resume"):
        MetricsWriter(path)
    assert path.read_text() == old


def test_damage_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(MetricsError, match="no such file"):
        read_metrics(path)
    write_run(path)
    lines = path.read_text().splitlines()
    for damage in ('{"event": "step"}', '{"event": "party"}', "[]", lines[1][:-5]):
        path.write_text("\n".join([lines[0], damage, *lines[2:]]) + "\n")
        with pytest.raises(MetricsError, match=r"metrics\.jsonl:2: not a metrics record"):
            read_metrics(path)


def test_bytes_that_are_no_text_are_named_or_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path)
    good = path.read_bytes()
    path.write_bytes(good + b"\xff\xfe")
    assert len(read_metrics(path)) == good.count(b"\n")
    path.write_bytes(b"\xff\xfe\n" + good)
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:1: "):
        read_metrics(path)


def test_a_place_evaluated_twice_counts_once_with_the_later_value():
    def evaluation(phase_step, loss):
        place = Place(phase=0, level=1, step=phase_step, phase_step=phase_step)
        return evaluation_record(place, loss=loss, samples=1, totals=Totals())

    kept = last_of_each_place([evaluation(1, 5.0), evaluation(2, 4.0), evaluation(2, 4.5), evaluation(3, 3.0)])
    assert [record.loss for record in kept] == [5.0, 4.5, 3.0]
    assert all(isinstance(record, EvaluationRecord) for record in kept)
