"""Documents deduplicated and shuffled by array tasks: the result, a task that is killed, a task run twice."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from ds_vcycle.data.errors import DataError
from ds_vcycle.data.shuffle import Counts, gather, scatter
from tests.data_corpora import SPEECHES

TASKS = 3


def documents(folder: Path) -> list[str]:
    found = []
    for path in sorted((folder / "shuffled").iterdir()):
        with gzip.open(path, "rt") as file:
            found += [json.loads(line)["text"] for line in file]
    return found


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """200 documents, of which 50 are there twice, once with other white space and case; and a broken one."""
    lines = [json.dumps({"text": f"Document {number}, of its own.\n"}) for number in range(150)]
    again = [json.dumps({"text": f"  DOCUMENT {number}, of its own."}) for number in range(100, 150)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join([*again, "{}"]) + "\n")
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def shuffled(sources: list[str], out: Path, seed: int = 1234) -> tuple[list[Counts], list[Counts]]:
    scattered = [scatter(sources, out, task=task, tasks=TASKS) for task in range(TASKS)]
    return scattered, [gather(out, task=task, tasks=TASKS, seed=seed) for task in range(TASKS)]


def test_each_document_comes_once_in_another_order_than_it_was(tmp_path: Path, sources: list[str]) -> None:
    scattered, gathered = shuffled(sources, tmp_path / "out")
    assert sum(done.documents for done in scattered) == 200 and sum(done.broken for done in scattered) == 1
    assert sum(done.documents for done in gathered) == 150 and sum(done.duplicates for done in gathered) == 50
    found = documents(tmp_path / "out")
    numbers = [int(text.split()[1].rstrip(",")) for text in found]
    assert sorted(numbers) == list(range(150))
    ascending = sum(a < b for a, b in pairwise(numbers))
    assert 50 < ascending < 100  # of 149 pairs, half if the order is a draw
    shuffled(sources, tmp_path / "again")
    assert documents(tmp_path / "again") == found
    shuffled(sources, tmp_path / "other", seed=1)
    assert documents(tmp_path / "other") != found and sorted(documents(tmp_path / "other")) == sorted(found)


def test_a_killed_task_is_made_again_and_a_done_one_is_not(tmp_path: Path, sources: list[str]) -> None:
    out = tmp_path / "out"
    cut = out / "parts" / ".0001.99"
    cut.mkdir(parents=True)  # what a killed task leaves
    (cut / "0000.jsonl.gz").write_bytes(b"half")
    scatter(sources, out, task=0, tasks=TASKS)
    with pytest.raises(DataError, match="tasks 1, 2 of scatter are not done"):
        gather(out, task=0, tasks=TASKS)
    shuffled(sources, out)
    first = documents(out)
    assert shuffled([str(tmp_path / "nothing.jsonl")], out) == ([Counts()] * TASKS, [Counts()] * TASKS)
    assert documents(out) == first and len(first) == 150


def test_a_task_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task 3 is none of 3.*--array=0-2"):
        scatter([str(SPEECHES)], tmp_path, task=3, tasks=3)
