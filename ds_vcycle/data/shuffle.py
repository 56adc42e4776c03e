"""Documents of many sources, deduplicated and shuffled by array jobs; each task can be killed and run again.

``scatter``, task i of N: every N-th document, into N buckets by a hash of its text. ``gather``, task b of N: bucket b
of all tasks, each text once, in an order drawn from the seed. Equal texts meet in one bucket, so the whole is
deduplicated, and a bucket is a uniform draw of all documents, so the buckets one after another are shuffled. The result
depends on the sources, the seed and N, on nothing else. A task's directory or file appears complete or not at all, and
a task that is done is not done again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ds_vcycle.data.corpus import Document, find_sources, read_documents
from ds_vcycle.data.errors import DataError

_KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a task did; all 0 if it was done before."""

    documents: int = 0
    duplicates: int = 0
    broken: int = 0


def scatter(
    sources: Sequence[str], out: Path, *, task: int, tasks: int, text_key: str = "text",
    dataset_config: str | None = None, dataset_split: str = "train",
) -> Counts:  # fmt: skip
    """Write this task's share of the documents into OUT/parts/TASK/, a file for each bucket.

    Raises:
        DataError: a source cannot be read, or the task is none of these.
    """
    _check(task, tasks)
    final = _part(out, task)
    if final.is_dir():
        return Counts()
    staging = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    documents = broken = 0
    found = find_sources(sources, dataset_config=dataset_config, dataset_split=dataset_split)
    with ExitStack() as stack:
        files = [stack.enter_context(gzip.open(staging / _bucket(b), "wt", compresslevel=1)) for b in range(tasks)]
        for number, document in enumerate(read_documents(found, text_key=text_key)):
            if number % tasks != task:
                continue
            if not isinstance(document, Document):
                broken += 1
                continue
            documents += 1
            files[int.from_bytes(_key(document.text)[:8]) % tasks].write(_line(document.text))
    staging.replace(final)
    return Counts(documents=documents, broken=broken)


def gather(out: Path, *, task: int, tasks: int, seed: int = 1234) -> Counts:
    """Write bucket TASK, each text once, in the seed's order, to OUT/shuffled/; it must fit in memory.

    Raises:
        DataError: a task of ``scatter`` is not done, or the task is none of these.
    """
    _check(task, tasks)
    final = out / "shuffled" / _bucket(task)
    if final.is_file():
        return Counts()
    parts = [_part(out, number) / _bucket(task) for number in range(tasks)]
    undone = [str(number) for number, part in enumerate(parts) if not part.is_file()]
    if undone:
        raise DataError(f"{out}/parts: tasks {', '.join(undone)} of scatter are not done; run them again first")
    order: dict[bytes, str] = {}
    seen = 0
    for text in (text for part in parts for text in _texts(part)):
        seen += 1
        order[hashlib.blake2b(_key(text), digest_size=_KEY_BYTES, salt=seed.to_bytes(8)).digest()] = text
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}.{os.getpid()}")
    with gzip.open(staging, "wt", compresslevel=1) as file:
        file.writelines(_line(order[key]) for key in sorted(order))
    staging.replace(final)
    return Counts(documents=len(order), duplicates=seen - len(order))


def _check(task: int, tasks: int) -> None:
    if not 0 <= task < tasks:
        raise DataError(f"task {task} is none of {tasks}, which count from 0 (#SBATCH --array=0-{tasks - 1})")


def _part(out: Path, task: int) -> Path:
    return out / "parts" / f"{task:04d}"


def _bucket(number: int) -> str:
    return f"{number:04d}.jsonl.gz"


def _key(text: str) -> bytes:
    """Of a text; white space at its ends and its case make no other document of it."""
    return hashlib.blake2b(text.strip().casefold().encode(), digest_size=_KEY_BYTES).digest()


def _line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def _texts(part: Path) -> Iterator[str]:
    with gzip.open(part, "rt") as file:
        for line in file:
            yield json.loads(line)["text"]
