"""Reading one rank's file of a checkpoint: a piece at a time, nothing before its checksum is compared.

The file is read rather than mapped: pages of a mapped file count as memory in use, and reading a checkpoint larger than
the memory must take none.
"""

from __future__ import annotations

import json
import math
import operator
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_vcycle.checkpoint.manifest import CheckpointError, ShardFile
from ds_vcycle.checkpoint.shards import DTYPES, FILE, IDENTITY, PIECE_BYTES

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A tensor the manifest lists, and where it begins in the file (None: it is not there)."""

    dtype: str
    checksum: str
    numel: int | None
    position: int | None = None
    shape: tuple[int, ...] = ()


class ShardReader:
    """Reads tensors of one file, which is opened when it is needed and can be closed at any time."""

    def __init__(self, path: Path, file: ShardFile, identity: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._checked: set[str] = set()
        try:
            header, start = _read_header(self._opened())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged: no safetensors file ({error}); use another checkpoint"
            ) from error
        metadata = header.get("__metadata__") or {}
        if metadata.get(IDENTITY) != identity:
            raise CheckpointError(
                f"{path} belongs to another checkpoint; restore the right file or use another checkpoint"
            )
        if metadata.get(FILE, file.name) != file.name:
            raise CheckpointError(
                f"{path} holds what belongs into {metadata[FILE]}; restore the right files or use another checkpoint"
            )
        self._stored = {name: self._placed(name, stored, header, start) for name, stored in _expected(file).items()}

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def check(self, name: str) -> None:
        """Compare a tensor with the manifest and its checksum, the first time only.

        Raises:
            CheckpointError: they differ; names file and tensor.
        """
        if name in self._checked:
            return
        size = self._size(name)
        buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
        checksum = 0
        for start in range(0, size, PIECE_BYTES):
            piece = buffer[: min(size - start, PIECE_BYTES)]
            self._fill(name, start, piece)
            checksum = zlib.crc32(piece, checksum)
        self._compare(name, checksum)

    def check_all(self, advance: Callable[[int], None] = lambda size: None) -> None:
        """:meth:`check` every tensor the manifest lists for this file; ``advance`` is told of the bytes done."""
        for name in self._stored:
            self.check(name)
            advance(self._size(name))

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        self.check(name)
        stored = self._stored[name]
        whole = torch.empty(stored.shape, dtype=_BY_NAME[stored.dtype])
        if whole.numel():
            self._fill(name, 0, whole.reshape(-1).view(torch.uint8).numpy().data)
        return whole

    def copy_rows(self, name: str, start: int, stride: int, into: torch.Tensor) -> None:
        """Fill ``into`` [rows, cols], fp32, from a flat tensor: row i from element ``start + i * stride`` onwards."""
        rows, cols = into.shape
        if into.is_contiguous() and (rows == 1 or stride == cols):
            self._copy_range(name, 4 * start, into.view(-1).view(torch.uint8).numpy().data)
            return
        self.check(name)
        at_once = max(1, PIECE_BYTES // (4 * stride))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            flat = torch.empty((count - 1) * stride + cols)
            self._fill(name, 4 * (start + first * stride), flat.view(torch.uint8).numpy().data)
            into[first : first + count].copy_(flat.as_strided((count, cols), (stride, 1)))

    def _copy_range(self, name: str, start: int, into: memoryview) -> None:
        """Copy bytes of a tensor; a whole one that is not checked yet is compared on its way, and so read once only."""
        whole = name not in self._checked and start == 0 and len(into) == self._size(name)
        if not whole:
            self.check(name)
        checksum = 0
        for first in range(0, len(into), PIECE_BYTES):
            piece = into[first : first + PIECE_BYTES]
            self._fill(name, start + first, piece)
            checksum = zlib.crc32(piece, checksum) if whole else checksum
        if whole:
            self._compare(name, checksum)

    def _compare(self, name: str, checksum: int) -> None:
        if f"crc32:{checksum:08x}" != self._stored[name].checksum:
            raise CheckpointError(
                f"{self._path} is damaged: the checksum of {name} does not match the manifest; use another checkpoint"
            )
        self._checked.add(name)

    def _size(self, name: str) -> int:
        """Bytes of a tensor, which must be in the file."""
        stored = self._stored[name]
        if stored.position is None:
            raise CheckpointError(f"{self._path} is damaged: {name} is not in it; use another checkpoint")
        return math.prod(stored.shape) * _BY_NAME[stored.dtype].itemsize

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        return self._file

    def _placed(self, name: str, stored: _Stored, header: Mapping[str, Any], start: int) -> _Stored:
        """A tensor of the manifest with its place in the file, of whose header nothing else is believed."""
        if name not in header:
            return stored
        try:
            found, shape = header[name]["dtype"], tuple(header[name]["shape"])
            position = start + operator.index(header[name]["data_offsets"][0])
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} is damaged: its header's entry of {name} makes no sense; use another checkpoint"
            ) from error
        wanted = shape if stored.numel is None else (stored.numel,)
        if (found, shape) != (stored.dtype, wanted) or found not in _BY_NAME:
            raise CheckpointError(
                f"{self._path} is damaged: {name} is {found} {list(shape)}, the manifest says {stored.dtype} "
                f"{list(wanted)}; use another checkpoint"
            )
        return replace(stored, position=position, shape=shape)

    def _fill(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor from its byte ``start`` on."""
        position = self._stored[name].position
        assert position is not None
        done = 0
        try:
            while done < len(into):
                read = os.preadv(self._opened().fileno(), [into[done:]], position + start + done)
                if read == 0:
                    raise OSError("it ends before the tensor does")
                done += read
        except (OSError, OverflowError) as error:
            raise CheckpointError(
                f"{self._path} is damaged: {name} cannot be read ({error}); use another checkpoint"
            ) from error


def _expected(file: ShardFile) -> dict[str, _Stored]:
    """What the manifest says is in a file, by its name there."""
    named = [
        (entry.tensor_name(key), tensor, entry.length)
        for entry in file.fragments
        for key, tensor in entry.tensors.items()
    ]
    extras = [(f"extra/{name}", tensor, None) for name, tensor in file.extras.items()]
    return {name: _Stored(dtype=t.dtype, checksum=t.checksum, numel=numel) for name, t, numel in (*named, *extras)}


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """A safetensors file's table, and the position its offsets count from.

    Raises:
        ValueError: it has none.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > os.fstat(file.fileno()).st_size - 8:
        raise ValueError(f"its header would have {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    return header, 8 + length
