"""A prepared corpus on disk: ``prepare.json``, the tokenizer, and one Megatron ``.bin``/``.idx`` pair per split.

Items of an indexed dataset are documents (gpt, the end-of-document token included) or sentences (bert, no
special tokens). Everything about a corpus is checked here, before training reads it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from ds_vcycle.config import ConfigError, ModelConfig
from ds_vcycle.data.errors import DataError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MANIFEST = "prepare.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SplitRecord(_Record):
    """One split: how many documents, items of the indexed dataset (see module) and tokens, and its files."""

    documents: int
    items: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str


class Manifest(_Record):
    """``prepare.json``: what the corpus is and what it was made from."""

    format: Literal[1] = 1
    architecture: Literal["gpt", "bert"]
    vocab_size: int
    role_ids: dict[str, int]
    special_ids: list[int]
    dtype: Literal["uint16", "int32"]
    tokenizer: str
    sources: list[str]
    text_key: str
    split: list[float]
    seed: int
    splits: dict[Split, SplitRecord]
    skipped: dict[str, int]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """One split, memory-mapped: a stream of token ids cut into items, items into documents.

    Attributes:
        item_lengths: tokens of each item, int32 [items].
        document_items: first item of each document and one past the last, int64 [documents + 1].
        tokens: length of the stream.
    """

    dataset: Any
    item_lengths: NDArray[np.int32]
    document_items: NDArray[np.int64]
    tokens: int

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Ids ``start`` to ``start + length`` of the stream, int64."""
        dtype = np.dtype(self.dataset.index.dtype)
        found: NDArray[Any] = self.dataset.bin_reader.read(
            dtype=dtype.type, count=length, offset=start * dtype.itemsize
        )
        return found.astype(np.int64)


def read_manifest(directory: Path) -> Manifest:
    """Read and validate ``prepare.json`` (raises :class:`DataError`)."""
    if not directory.is_dir():
        raise DataError(f"data.path={directory}: no such directory; run ds-vcycle prepare, or change data.path")
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(f"data.path={directory}: holds no {MANIFEST}; give a directory written by ds-vcycle prepare")
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise DataError(f"{path}: not a manifest of this version ({problem}); run ds-vcycle prepare again") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); copy it again or run ds-vcycle prepare again") from error


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write ``prepare.json``."""
    (directory / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n", encoding="utf-8")


def check_model(directory: Path, manifest: Manifest, model: ModelConfig) -> None:
    """Refuse a corpus made for another architecture or another vocabulary (raises :class:`ConfigError`)."""
    if manifest.architecture != model.architecture:
        raise ConfigError(
            f"data.path={directory} was prepared for {manifest.architecture}, but model.architecture="
            f"{model.architecture}; prepare one with --architecture {model.architecture}, or change model.architecture"
        )
    if manifest.vocab_size != model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}, but the tokenizer in {directory} has {manifest.vocab_size} tokens; "
            f"set model.vocab_size={manifest.vocab_size}"
        )


def open_split(directory: Path, manifest: Manifest, split: Split) -> TokenFile:
    """Memory-map one split after comparing its files with the manifest.

    Raises:
        DataError: the split was not written, a file is missing, cut short or not what the manifest says.
    """
    if split not in manifest.splits:
        raise DataError(f"{directory}: was prepared without a {split} split; prepare it again with a share for it")
    record = manifest.splits[split]
    for suffix, expected in (("bin", record.bin_bytes), ("idx", record.idx_bytes)):
        path = directory / f"{split}.{suffix}"
        if not path.is_file():
            raise DataError(f"{path}: missing; copy it again or run ds-vcycle prepare again")
        if path.stat().st_size != expected:
            raise DataError(
                f"{path}: damaged, expected {expected} bytes, found {path.stat().st_size}; copy it again or run "
                "ds-vcycle prepare again"
            )
    try:
        _check_header(directory / f"{split}.idx", record, manifest.dtype)
        return _map(directory / split, record)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); mend its permissions") from error


def new_builder(path: Path, dtype: str) -> Any:
    """A Megatron ``IndexedDatasetBuilder`` writing ``path``."""
    return _indexed().IndexedDatasetBuilder(str(path), dtype=getattr(np, dtype))


def close_builder(builder: Any, directory: Path, split: Split) -> SplitRecord:
    """Write the index of a builder of ``SPLIT.bin`` and describe both files."""
    path, index = directory / f"{split}.bin", directory / f"{split}.idx"
    builder.finalize(str(index))
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return SplitRecord(
        documents=len(builder.document_indices) - 1,
        items=len(builder.sequence_lengths),
        tokens=sum(builder.sequence_lengths),
        bin_bytes=path.stat().st_size,
        idx_bytes=index.stat().st_size,
        bin_sha256=digest,
    )


def _check_header(path: Path, record: SplitRecord, dtype: str) -> None:
    """Megatron's reader fails on a wrong one only in part, and takes another dtype as it comes."""
    header = _indexed()._INDEX_HEADER
    code = _indexed().DType.code_from_dtype(getattr(np, dtype))
    expected = header + struct.pack("<QBQQ", 1, code, record.items, record.documents + 1)
    with path.open("rb") as stream:
        if stream.read(len(expected)) != expected:
            raise DataError(
                f"{path}: damaged, not the index of {record.items} items and {record.documents} documents of {dtype} "
                "ids; copy it again or run ds-vcycle prepare again"
            )


def _map(prefix: Path, record: SplitRecord) -> TokenFile:
    try:
        dataset = _indexed().IndexedDataset(str(prefix))
    except (AssertionError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{prefix}.idx: damaged ({error}); copy it again or run ds-vcycle prepare again") from error
    tokens = int(dataset.sequence_lengths.sum(dtype=np.int64))
    found = (len(dataset.document_indices) - 1, len(dataset.sequence_lengths), tokens)
    if found != (record.documents, record.items, record.tokens):
        raise DataError(
            f"{prefix}.idx: expected {record.documents} documents, {record.items} items and {record.tokens} tokens, "
            f"found {found[0]}, {found[1]} and {found[2]}; copy it again or run ds-vcycle prepare again"
        )
    return TokenFile(
        dataset=dataset, item_lengths=dataset.sequence_lengths, document_items=dataset.document_indices, tokens=tokens
    )


def _indexed() -> Any:
    """Megatron's module, imported late: it brings torch, and remarks about extensions that data does not need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset
