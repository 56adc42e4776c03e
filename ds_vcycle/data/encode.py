"""Texts to token ids in several processes; the result does not depend on how many.

Chunks are handed out and taken back in order, a bounded number at a time. A worker imports this module and
``tokenizers``, nothing heavier.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ds_vcycle.data.errors import DataError
from ds_vcycle.data.sentences import split_sentences

CHUNK_CHARACTERS = 1 << 19
CHUNK_TEXTS = 1024
Label = TypeVar("Label")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """What a worker needs: the tokenizer as JSON, the id that ends a document (None: cut into sentences), the dtype."""

    tokenizer: str
    end_id: int | None
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One document: ids [tokens], and the tokens of each of its items (none: the text gave no tokens)."""

    ids: NDArray[Any]
    lengths: list[int]


def encode(texts: Iterable[tuple[Label, str]], encoding: Encoding, *, workers: int) -> Iterator[tuple[Label, Encoded]]:
    """Encode labelled texts in order; ``workers=1`` stays in this process.

    Raises:
        DataError: a worker died.
    """
    if workers == 1:
        tokenizer = _open(encoding)
        for labels, chunk in _chunks(texts):
            yield from zip(labels, _encode(tokenizer, encoding, chunk), strict=True)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (encoding,))
    try:
        pending: deque[tuple[list[Label], Future[list[Encoded]]]] = deque()
        for labels, chunk in _chunks(texts):
            pending.append((labels, pool.submit(_work, chunk)))
            if len(pending) > 3 * workers:
                yield from _result(pending)
        while pending:
            yield from _result(pending)
    except BrokenProcessPool as error:
        raise DataError(
            f"one of the {workers} tokenising processes died; short of memory? Try fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _result(pending: deque[tuple[list[Label], Future[list[Encoded]]]]) -> Iterator[tuple[Label, Encoded]]:
    labels, future = pending.popleft()
    return zip(labels, future.result(), strict=True)


def _chunks(texts: Iterable[tuple[Label, str]]) -> Iterator[tuple[list[Label], list[str]]]:
    labels: list[Label] = []
    chunk: list[str] = []
    characters = 0
    for label, text in texts:
        labels.append(label)
        chunk.append(text)
        characters += len(text)
        if characters >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_TEXTS:
            yield labels, chunk
            labels, chunk, characters = [], [], 0
    if chunk:
        yield labels, chunk


_worker: tuple[Tokenizer, Encoding] | None = None


def _start(encoding: Encoding) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = (_open(encoding), encoding)


def _work(chunk: list[str]) -> list[Encoded]:
    assert _worker is not None
    return _encode(*_worker, chunk)


def _open(encoding: Encoding) -> Tokenizer:
    tokenizer = Tokenizer.from_str(encoding.tokenizer)
    tokenizer.encode_special_tokens = True  # a text that spells "[MASK]" or "<|endoftext|>" must not forge the token
    return tokenizer


def _encode(tokenizer: Tokenizer, encoding: Encoding, chunk: list[str]) -> list[Encoded]:
    items = [[text] if encoding.end_id is not None else split_sentences(text) for text in chunk]
    flat = [item for document in items for item in document]
    ids = iter([found.ids for found in tokenizer.encode_batch_fast(flat, add_special_tokens=False)])
    documents = []
    for document in items:
        found = [tokens for _, tokens in zip(document, ids) if tokens]
        if found and encoding.end_id is not None:
            found[-1].append(encoding.end_id)
        joined = np.array([i for tokens in found for i in tokens], dtype=encoding.dtype)
        documents.append(Encoded(ids=joined, lengths=[len(tokens) for tokens in found]))
    return documents
