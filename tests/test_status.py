"""A run as others see it: heartbeat, events, and ``ds-vcycle status`` while it goes on, stopped, killed, finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_vcycle import cli
from ds_vcycle.cycle.journal import Pace, append_event
from ds_vcycle.cycle.requeues import Requeues, read_requeues, write_requeues
from ds_vcycle.cycle.status import read_run_status, render_status
from tests.dist.cases_resume import Attempt
from tests.resumed import attempts
from tests.tiny import tiny_run


def status_of(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.run(["status", str(run_dir), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_a_run_that_is_stopped_goes_on_and_finishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path / "run", changes={"logging.every_steps": 1})
    first, second = attempts(
        Attempt(config=config, disturb="step@5:1:SIGUSR1"), Attempt(config=config, resume="always")
    )
    assert [first.text, second.text] == ["stopped", "finished"]
    told = [(event["event"], event["phase"], event["step"]) for event in events(config.run_dir)]
    # phases: train 3 steps, coalesce, train 4, refine, train 3; a signal during step 5 is heeded after step 6
    assert told == [
        ("started", 0, 0),
        ("phase_begun", 0, 0), ("phase_ended", 0, 3), ("saved", 0, 3),
        ("phase_begun", 1, 3), ("phase_ended", 1, 3), ("saved", 1, 3),
        ("phase_begun", 2, 3), ("saved", 2, 6), ("stopped", 2, 6),
        ("resumed", 2, 6),
        ("phase_begun", 2, 6), ("phase_ended", 2, 7), ("saved", 2, 7),
        ("phase_begun", 3, 7), ("phase_ended", 3, 7), ("saved", 3, 7),
        ("phase_begun", 4, 7), ("phase_ended", 4, 10), ("saved", 4, 10),
        ("finished", 4, 10),
    ]  # fmt: skip
    assert next(e for e in events(config.run_dir) if e["event"] == "stopped")["reason"] == "SIGUSR1"

    found = status_of(config.run_dir, capsys)
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["event"] == "step"]
    assert found["loss"] == steps[-1]["loss"]
    assert found["held_out"] == [r for r in map(json.loads, lines) if r["event"] == "evaluation"][-1]["loss"]
    assert (found["status"], found["phase"], found["of"], found["step"], found["steps"]) == ("finished", 4, 5, 10, 10)
    assert found["checkpoint"] == "step-00000010-phase-04" and found["requeues"] == 0
    assert found["eta_seconds"] == 0


BEAT = {
    "time": 0.0, "host": os.uname().nodename, "pid": os.getpid(), "job": None, "phase": 1, "level": 2, "phase_step": 40,
    "step": 70, "of": 5, "title": "train level 2", "phase_steps": 100, "steps": 500, "loss": 3.25, "held_out": None,
    "step_seconds": 0.5, "eta_seconds": 7200.0, "checkpoint": None,
}  # fmt: skip


def write_run(run_dir: Path, **beat: object) -> Path:
    run_dir.mkdir()
    (run_dir / "status.json").write_text(json.dumps({"status": "running", "phase": 1}))
    (run_dir / "heartbeat.json").write_text(json.dumps({**BEAT, **beat}))
    return run_dir


def test_the_words_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    write_requeues(run_dir, Requeues(count=3, idle=1, checkpoint="x", job="7"))
    text = render_status(read_run_status(run_dir))
    assert f"{run_dir}: running (heard of" in text
    assert "hangs" in text  # the heartbeat is of 1970
    assert "2 of 5: train level 2, step 40 of 100" in text
    assert "70 of 500" in text and "3.2500" in text
    assert "2.0 h of steps, now 0.5 s each" in text
    assert "none yet" in text
    assert "3, the last 1 without progress" in text


def test_a_killed_run_is_called_killed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert read_run_status(write_run(tmp_path / "here", pid=ended.pid)).word == "killed"
    assert read_run_status(write_run(tmp_path / "there", pid=ended.pid, host="n17")).word == "running"


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", str(tmp_path)]) == 2
    assert "no run has begun there" in capsys.readouterr().err


def test_status_imports_no_torch(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    code = f"import sys; from ds_vcycle import cli; cli.run(['status', {str(run_dir)!r}]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_an_event_comes_on_a_line_of_its_own_after_a_cut_one(tmp_path: Path) -> None:
    append_event(tmp_path, "started", loss=float("nan"))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "sav')
    append_event(tmp_path, "resumed")
    whole, cut, last = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(whole)["loss"] is None
    assert cut == '{"event": "sav' and json.loads(last)["event"] == "resumed"


def test_pace_of_a_level_not_yet_seen_is_in_proportion_of_flops() -> None:
    pace = Pace({1: 800, 2: 100, 3: 10})
    assert pace.remaining({1: 5}) is None
    for seconds in (9.0, 2.0, 2.0):  # the first step warms up
        pace.add(2, seconds)
    assert pace.seconds(2) == pytest.approx(2.0)
    assert pace.remaining({1: 10, 2: 3, 3: 10}) == pytest.approx(10 * 16.0 + 3 * 2.0 + 10 * 0.2)


def test_requeues_without_progress_are_counted_per_job(tmp_path: Path) -> None:
    requeues = Requeues()
    seen = []
    for job, checkpoint in [("1", None), ("1", None), ("1", "a"), ("1", "a"), ("1", "a"), ("1", "b"), ("2", "b")]:
        requeues = requeues.once_more(job, checkpoint)
        seen.append((requeues.count, requeues.idle))
    assert seen == [(1, 0), (2, 1), (3, 0), (4, 1), (5, 2), (6, 0), (7, 0)]
    write_requeues(tmp_path, requeues)
    assert read_requeues(tmp_path) == requeues
    (tmp_path / "requeues.json").write_text("{")
    assert read_requeues(tmp_path) == Requeues()
