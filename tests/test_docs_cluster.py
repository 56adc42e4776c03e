"""docs/cluster.md: every block that shows a command shows what it prints."""

from __future__ import annotations

import re
import shlex
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from ds_vcycle import cli

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"^```\n\$ (.+)\n((?:.*\n)*?)```$", PAGE, flags=re.MULTILINE)


def printed(command: str) -> str:
    """The command's output: ours in this process, what it is piped through in a shell."""
    ours, pipe, rest = command.partition(" | ")
    program, *arguments = shlex.split(ours)
    assert program == "ds-vcycle"
    with redirect_stdout(StringIO()) as out:
        assert cli.run(arguments) == 0
    text = out.getvalue()
    if pipe:
        shell = ["bash", "-o", "pipefail", "-c", rest]
        text = subprocess.run(shell, input=text, capture_output=True, text=True, check=True).stdout
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def test_all_blocks_are_found() -> None:
    assert len(BLOCKS) == PAGE.count("```\n$ ") >= 15


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_block_shows_what_its_command_prints(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert printed(command) == shown


def test_named_files_are_there() -> None:
    named = set(re.findall(r"`((?:configs|tests|slurm)/[\w.]+)`", PAGE))
    assert len(named) >= 7 and all((ROOT / name).is_file() for name in named)
