"""A rank that dies, stops or hangs: the others end within the timeout and name it, and the run can go on."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks
from tests.resumed import status, write_config
from tests.tiny import tiny_run

_NAMED = f"rank 1 ({socket.gethostname()}, process "
# (what happens to rank 1 at its fourth step, what rank 0 says of it)
ENDS = [
    ("SIGKILL", ("has gone",)),
    ("SIGSTOP", ("has gone or hangs", "nothing heard for 4 s")),  # whichever is first: gloo's timeout, the thread's
    ("hang", ("does not go on from training.py:",)),
]


@pytest.mark.parametrize(("what", "said"), ENDS, ids=[what for what, _ in ENDS])
def test_the_culprit_is_named(tmp_path: Path, what: str, said: tuple[str, ...]) -> None:
    config = tiny_run(tmp_path / "run", changes={"training.rank_timeout_seconds": 4.0})
    command = ["train", "--config", str(write_config(config, tmp_path / "run.yaml"))]
    target, log = "tests.dist.cases_resume:command_line", str(tmp_path / "log")
    results = run_ranks(2, target, [command, log, f"step@4:1:{what}"], check=False, grace_s=1)
    text = Path(f"{log}.0").read_text()
    assert results[0].exit_code == 76, text
    (line,) = [line for line in text.splitlines() if "ds-vcycle: error:" in line]
    assert _NAMED in line and any(words in line for words in said), line
    assert line.endswith("go on with --resume")
    assert status(config.run_dir)["status"] == "running"  # it has not failed
    if what != "SIGSTOP":
        events = [json.loads(line) for line in (config.run_dir / "events.jsonl").read_text().splitlines()]
        assert events[-1]["event"] == "lost" and events[-1]["culprit"].startswith(_NAMED)
