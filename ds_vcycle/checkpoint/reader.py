"""Reading a checkpoint: any flat range of any shard under any layout, put together from whatever files hold it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ds_vcycle.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FragmentEntry,
    Manifest,
    StoredParameter,
    check_coverage,
    describe,
    read_manifest,
)
from ds_vcycle.checkpoint.retention import check_files, settled
from ds_vcycle.checkpoint.shard_reader import ShardReader
from ds_vcycle.checkpoint.slices import Block, shared_blocks
from ds_vcycle.schema import Parameter

_OPEN_FILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatRange:
    """Elements [start, start + length) of the flat shard of ``parameter`` on one of ``tp`` tensor-parallel ranks."""

    parameter: Parameter
    tp: int
    tp_rank: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A rectangle of a stored shard that one fragment holds."""

    file: str
    entry: FragmentEntry
    block: Block


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a checkpoint and check all but the tensors' checksums (:meth:`Checkpoint.verify` does these).

    Raises:
        CheckpointError: names what is missing, truncated, edited, foreign or of another format version.
    """
    directory = settled(directory)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    try:
        check_coverage(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / MANIFEST} is malformed: {error}; use another checkpoint") from error
    for name, identity in manifest.references.items():
        _check_reference(directory, settled(directory.parent / name), identity)
    return Checkpoint(directory, manifest)


def _check_reference(directory: Path, needed: Path, identity: str) -> None:
    """Another checkpoint that ``directory`` needs is there, whole, and the one it was saved with."""
    if not (needed / MANIFEST).is_file():
        raise CheckpointError(f"{directory} needs checkpoint {needed}, which is missing; restore it")
    manifest = read_manifest(needed)
    if manifest.identity != identity:
        raise CheckpointError(
            f"{directory} needs checkpoint {needed} as it was then, and that is another one now; restore it"
        )
    check_files(needed, manifest)


class Checkpoint:
    """An open checkpoint. Files are opened when first needed, until :meth:`close`."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._readers: dict[str, ShardReader] = {}
        self._recent: dict[str, ShardReader] = {}  # in the order of their last use
        self._files = {file.name: file for file in manifest.files}
        index: defaultdict[tuple[str, int], list[tuple[int, str, FragmentEntry]]] = defaultdict(list)
        for file in manifest.files:
            for entry in file.fragments:
                index[entry.parameter, entry.tp_rank].append((entry.start, file.name, entry))
        self._index = {at: sorted(found, key=lambda item: item[0]) for at, found in index.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def state(self) -> Mapping[str, Any]:
        """The JSON that was given to ``save``."""
        return self.manifest.state

    @property
    def identity(self) -> str:
        """Of the checkpoint, as each of its files names it."""
        return self.manifest.identity

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self.manifest.world_size

    @property
    def tensor_parallel(self) -> int:
        """The tensor-parallel degree it was written under."""
        return max((parameter.tp for parameter in self.manifest.parameters.values()), default=1)

    def close(self) -> None:
        """Let go of the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._recent.clear()

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """The checkpoint holds these parameters, with these shapes, and no others; padding and degree may differ.

        Raises:
            CheckpointError: names the parameters left over on either side, or the first that differs.
        """
        wanted = {parameter.name: parameter for parameter in parameters}
        for text, names in (
            ("lacks parameters of the model", wanted.keys() - self.manifest.parameters.keys()),
            ("holds parameters the model does not have", self.manifest.parameters.keys() - wanted.keys()),
        ):
            if names:
                some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                raise CheckpointError(f"{self.directory} {text}: {some}; use the configuration it was saved with")
        for parameter in wanted.values():
            self._stored(parameter)

    def keys(self, parameter: Parameter) -> frozenset[str]:
        """Which tensors a parameter is stored with, of :data:`ds_vcycle.checkpoint.store.KEYS`."""
        entries = (found for (name, _), found in self._index.items() if name == parameter.name)
        return frozenset(key for found in entries for _, _, entry in found for key in entry.tensors)

    def read(self, parameter: Parameter, *, tp: int, tp_rank: int, start: int, length: int, key: str) -> torch.Tensor:
        """A flat range of a local shard as fp32 [length] on the CPU, pad rows zero.

        Args:
            parameter: of the model that is being filled.
            tp: its tensor-parallel degree there, whatever it was stored with.
            tp_rank: whose shard.
            start: first element.
            length: number of elements.
            key: one of :data:`ds_vcycle.checkpoint.store.KEYS`.

        Raises:
            CheckpointError: the parameter, the key or a part of the range is not stored; it has another shape; a
                checksum does not match. Names file and parameter.
        """
        wanted = FlatRange(parameter=parameter, tp=tp, tp_rank=tp_rank, start=start, length=length)
        out = torch.zeros(length, dtype=torch.float32)
        stride, stored_stride = describe(parameter, tp).width, self._stored(parameter).width
        for piece in self._pieces(wanted, key):
            (top, bottom), (left, right) = piece.block.rows, piece.block.cols
            into = out.as_strided((bottom - top, right - left), (stride, 1), piece.block.into - start)
            first = top * stored_stride + left - piece.entry.start
            self._reader(piece.file).copy_rows(piece.entry.tensor_name(key), first, stored_stride, into)
        return out

    def verify(
        self, ranges: Iterable[FlatRange] | None = None, advance: Callable[[int], None] = lambda size: None
    ) -> None:
        """Check the checksums of all that the ranges will read (all keys), or of the whole checkpoint.

        What was checked is not checked again by :meth:`read`. ``advance``: told of the bytes of a whole checkpoint.

        Raises:
            CheckpointError: as :meth:`read`.
        """
        if ranges is None:
            for name in self._files:
                self._reader(name).check_all(advance)
            return
        for wanted in ranges:
            for key in self.keys(wanted.parameter) | {"master"}:
                for piece in self._pieces(wanted, key):
                    self._reader(piece.file).check(piece.entry.tensor_name(key))

    def extras(self, rank: int) -> dict[str, torch.Tensor]:
        """The further tensors that rank ``rank`` saved; empty if it saved none.

        Raises:
            CheckpointError: there was no such rank; a checksum does not match.
        """
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"{self.directory} was saved by {self.world_size} ranks: it has nothing of rank {rank}"
            )
        return {
            name: self._reader(file.name).tensor(f"extra/{name}")
            for file in self.manifest.files
            if file.rank == rank
            for name in file.extras
        }

    def _reader(self, name: str) -> ShardReader:
        """The reader of a file; of very many files, those used last are open."""
        if name not in self._readers:
            self._readers[name] = ShardReader(self.directory / name, self._files[name], self.manifest.identity)
        self._recent.pop(name, None)
        self._recent[name] = self._readers[name]
        if len(self._recent) > _OPEN_FILES:
            self._recent.pop(next(iter(self._recent))).close()
        return self._readers[name]

    def _stored(self, parameter: Parameter) -> StoredParameter:
        """The stored form of a parameter, which must have the wanted one's shape."""
        stored, wanted = self.manifest.parameters.get(parameter.name), describe(parameter, 1)
        where = f"{self.directory}: {parameter.name}"
        if stored is None:
            raise CheckpointError(f"{where} is not stored; use the configuration the checkpoint was saved with")
        if (stored.shape, stored.tp_dim, stored.tp_stride) != (wanted.shape, wanted.tp_dim, wanted.tp_stride):
            raise CheckpointError(
                f"{where} has shape {_shape(stored)}, the model's is {_shape(wanted)}; use the "
                "configuration the checkpoint was saved with"
            )
        return stored

    def _pieces(self, wanted: FlatRange, key: str) -> list[_Piece]:
        """The parts of stored fragments that make up a range, its pad rows aside."""
        stored, layout = self._stored(wanted.parameter), describe(wanted.parameter, wanted.tp)
        start, end = wanted.start, wanted.start + wanted.length
        assert 0 <= start <= end <= layout.local_numel, f"{stored.name}: [{start}, {end}) of {layout.local_numel}"
        tp_rank = wanted.tp_rank if layout.tp > 1 else 0
        pieces: list[_Piece] = []
        for block in shared_blocks(stored, layout, tp_rank, start, wanted.length):
            found = list(self._holders(stored, block, layout.width, key))
            if sum(piece.block.numel for piece in found) < block.numel:
                first, last = _span(block, stored.width)
                held = ", ".join(sorted(self.keys(wanted.parameter))) or "nothing"
                raise CheckpointError(
                    f"{self.directory}: elements {first} to {last} of {stored.name} ({key}, tensor-parallel rank "
                    f"{block.tp_rank}) are not stored; it has {held}"
                )
            pieces += found
        return pieces

    def _holders(self, stored: StoredParameter, block: Block, wanted_width: int, key: str) -> Iterator[_Piece]:
        """The fragments that hold parts of a rectangle of a stored shard, and which parts."""
        entries = self._index.get((stored.name, block.tp_rank), [])
        first, last = _span(block, stored.width)
        at = max(bisect_right(entries, first, key=lambda item: item[0]) - 1, 0)
        for start, file, entry in entries[at:]:
            if start >= last:
                break
            if key in entry.tensors:
                for part in block.within(start, entry.length, stored.width, wanted_width):
                    yield _Piece(file=file, entry=entry, block=part)


def _span(block: Block, width: int) -> tuple[int, int]:
    """The flat range of a shard from a rectangle's first element to its last."""
    return block.rows[0] * width + block.cols[0], (block.rows[1] - 1) * width + block.cols[1]


def _shape(parameter: StoredParameter) -> str:
    padded = "" if parameter.shape == parameter.padded_shape else f" padded to {list(parameter.padded_shape)}"
    return f"{list(parameter.shape)}{padded} (tensor-parallel dim {parameter.tp_dim}, stride {parameter.tp_stride})"
