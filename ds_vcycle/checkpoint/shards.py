"""One rank's file of a checkpoint, written tensor by tensor.

The files are ordinary safetensors files (https://huggingface.co/docs/safetensors), readable by any other reader. They
are written here rather than by the library so that a tensor leaves the accelerator only when its turn comes, is
checksummed on its way, and the file is synced before anything relies on it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_vcycle.checkpoint.manifest import CheckpointError, StoredTensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PIECE_BYTES = 1 << 24
IDENTITY, FILE = "checkpoint", "file"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], identity: str) -> dict[str, StoredTensor]:
    """Write a new safetensors file of tensors that exist already (see :func:`stream_shard`)."""
    # The widest elements first: every tensor then starts at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    return stream_shard(path, table, ordered.values(), identity)


def stream_shard(
    path: Path, table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[torch.Tensor], identity: str
) -> dict[str, StoredTensor]:
    """Write a new safetensors file and sync it to the disk.

    Args:
        path: must not exist.
        table: dtype and shape of each tensor, in the file's order.
        tensors: in that order, on any device; one at a time is made, copied to the host and let go.
        identity: of the checkpoint the file belongs to; kept in the file's metadata.

    Returns:
        The checksum of every tensor.

    Raises:
        CheckpointError: the disk is full, or the file system refuses otherwise.
    """
    written = {}
    try:
        with path.open("xb") as file:
            file.write(_header(table, identity, path.name))
            for (name, (dtype, shape)), tensor in zip(table.items(), tensors, strict=True):
                assert tensor.dtype == dtype and tuple(tensor.shape) == shape, f"{name} is not as announced"
                written[name] = _write_tensor(file, tensor)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; free space or mend the permissions") from error
    return written


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> StoredTensor:
    checksum = 0
    for piece in _pieces(tensor):
        checksum = zlib.crc32(piece, checksum)
        file.write(piece)
    return StoredTensor(dtype=DTYPES[tensor.dtype], checksum=f"crc32:{checksum:08x}")


def _header(table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], identity: str, name: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", IDENTITY: identity, FILE: name}}
    position = 0
    for name, (dtype, shape) in table.items():
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes, a piece at a time."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
