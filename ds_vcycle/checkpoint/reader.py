"""Reading a checkpoint: any flat range of any shard, put together from whatever files hold it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    describe,
    read_manifest,
)
from ds_vcycle.checkpoint.retention import check_files, settled
from ds_vcycle.checkpoint.shards import ShardReader
from ds_vcycle.schema import Parameter


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
    """Where elements [start, end) of a wanted range come from."""

    start: int
    end: int
    file: str
    entry: FragmentEntry


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a checkpoint and check all but the tensors' checksums (:meth:`Checkpoint.verify` does these).

    Raises:
        CheckpointError: names what is missing, truncated, edited, foreign or of another format version.
    """
    directory = settled(directory)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    for name in manifest.references:
        if not (settled(directory.parent / name) / MANIFEST).is_file():
            raise CheckpointError(
                f"{directory} needs checkpoint {directory.parent / name}, which is missing; restore it"
            )
    return Checkpoint(directory, manifest)


class Checkpoint:
    """An open checkpoint. Files are mapped when first needed, and stay open until :meth:`close`."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._readers: dict[str, ShardReader] = {}
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
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self.manifest.world_size

    def close(self) -> None:
        """Let go of the files."""
        self._readers.clear()

    def expect(self, parameters: Iterable[Parameter], *, tp: int) -> None:
        """The checkpoint holds these parameters, with these shapes and this tensor-parallel degree, and no others.

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
                raise CheckpointError(
                    f"{self.directory} {text}: {some}; resume with the configuration it was saved with"
                )
        for parameter in wanted.values():
            self._stored(parameter, tp)

    def keys(self, parameter: Parameter) -> frozenset[str]:
        """Which tensors a parameter is stored with: "master", and "exp_avg", "exp_avg_sq" if there were moments."""
        entries = (found for (name, _), found in self._index.items() if name == parameter.name)
        return frozenset(key for found in entries for _, _, entry in found for key in entry.tensors)

    def read(self, parameter: Parameter, *, tp: int, tp_rank: int, start: int, length: int, key: str) -> torch.Tensor:
        """A flat range of a local shard as fp32 [length] on the CPU, pad rows zero.

        Args:
            parameter: of the model that is being filled.
            tp: its tensor-parallel degree; must be that of the checkpoint, unless the parameter is replicated.
            tp_rank: whose shard.
            start: first element.
            length: number of elements.
            key: "master", "exp_avg" or "exp_avg_sq".

        Raises:
            CheckpointError: the parameter, the key or a part of the range is not stored; it is laid out or shaped
                differently; a checksum does not match. Names file and parameter.
        """
        wanted = FlatRange(parameter=parameter, tp=tp, tp_rank=tp_rank, start=start, length=length)
        out = torch.zeros(length, dtype=torch.float32)
        for piece in self._pieces(wanted, key):
            into = out[piece.start - start : piece.end - start]
            self._reader(piece.file).copy_range(piece.entry.tensor_name(key), piece.start - piece.entry.start, into)
        return out

    def verify(self, ranges: Iterable[FlatRange] | None = None) -> None:
        """Check the checksums of all that the ranges will read (all keys), or of the whole checkpoint.

        What was checked is not checked again by :meth:`read`.

        Raises:
            CheckpointError: as :meth:`read`.
        """
        if ranges is None:
            for name in self._files:
                self._reader(name).check_all()
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
        if name not in self._readers:
            self._readers[name] = ShardReader(self.directory / name, self._files[name], self.manifest.identity)
        return self._readers[name]

    def _stored(self, parameter: Parameter, tp: int) -> StoredParameter:
        """The stored form of a parameter, which must be the wanted one."""
        stored, wanted = self.manifest.parameters.get(parameter.name), describe(parameter, tp)
        where = f"{self.directory}: {parameter.name}"
        if stored is None:
            raise CheckpointError(f"{where} is not stored; resume with the configuration the checkpoint was saved with")
        if stored.tp != wanted.tp and (stored.tp_dim, stored.shape) == (wanted.tp_dim, wanted.shape):
            raise CheckpointError(
                f"{where} is split over tensor_parallel={stored.tp}, not {wanted.tp}; resume with "
                f"tensor_parallel={stored.tp} (another degree needs the checkpoint to be converted first)"
            )
        if stored != wanted:
            raise CheckpointError(
                f"{where} has shape {_shape(stored)}, the model's is {_shape(wanted)}; resume with the "
                "configuration the checkpoint was saved with"
            )
        return stored

    def _pieces(self, wanted: FlatRange, key: str) -> list[_Piece]:
        """The stored fragments that hold a range, in order, its pad rows aside."""
        stored = self._stored(wanted.parameter, wanted.tp)
        tp_rank = wanted.tp_rank if stored.tp > 1 else 0
        position, end = wanted.start, wanted.start + wanted.length
        assert 0 <= position <= end <= stored.local_numel, f"{stored.name}: [{position}, {end}) of {stored.local_numel}"
        end = min(end, stored.real_numel(tp_rank))
        found = self._index.get((stored.name, tp_rank), [])
        at = max(bisect_right(found, position, key=lambda item: item[0]) - 1, 0)
        pieces: list[_Piece] = []
        for first, file, entry in found[at:]:
            if position >= end or first > position or key not in entry.tensors:
                break
            stop = min(first + entry.length, end)
            pieces.append(_Piece(start=position, end=stop, file=file, entry=entry))
            position = stop
        if position < end:
            raise CheckpointError(
                f"{self.directory}: elements {position} to {end} of {stored.name} ({key}, tensor-parallel rank "
                f"{tp_rank}) are not stored; it has {', '.join(sorted(self.keys(wanted.parameter))) or 'nothing'}"
            )
        return pieces


def _shape(parameter: StoredParameter) -> str:
    padded = "" if parameter.shape == parameter.padded_shape else f" padded to {list(parameter.padded_shape)}"
    return f"{list(parameter.shape)}{padded} (tensor-parallel dim {parameter.tp_dim}, stride {parameter.tp_stride})"
