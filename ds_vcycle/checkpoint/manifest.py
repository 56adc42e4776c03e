"""The manifest of a checkpoint: what is stored, where, and the checksum of each tensor. Imports no torch.

A fragment is given in the coordinates of the tensor-parallel shard it was cut from; with the shape, the
tensor-parallel dim and its stride beside it, any other layout can be worked out from the manifest alone. Nothing
in it depends on ZeRO stages or data-parallel ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ds_vcycle.config import UserError
from ds_vcycle.schema import Parameter

FORMAT = "ds-vcycle shard store"
VERSION = 2
MANIFEST = "manifest.json"
Run = tuple[int, int]  # indices [start, end)


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is missing, damaged or not the one that is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file: safetensors' name of its dtype, and ``algorithm:hex`` over its little-endian bytes."""

    dtype: str
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """Shape and layout of one parameter, as the fragments' coordinates mean them.

    ``shape``: global, without pad rows; ``padded_shape``: with them. ``tp``: degree of the shards the fragments are
    cut from, 1 for a parameter that is the same on all tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    tp_dim: int | None
    tp_stride: int
    tp: int

    @property
    def local_numel(self) -> int:
        """Elements of one tensor-parallel shard, pad rows included."""
        return math.prod(self.padded_shape) // self.tp

    @property
    def width(self) -> int:
        """Columns of one tensor-parallel shard; a vector has one."""
        return self.local_numel // (self.padded_shape[0] // (self.tp if self.tp_dim == 0 else 1))

    def runs(self, dim: int, tp_rank: int) -> tuple[Run, ...]:
        """The global index ranges of ``dim`` that a shard holds, in local order, pad rows included.

        Dim 1 of a vector is its one column.
        """
        size = self.padded_shape[dim] if dim < len(self.padded_shape) else 1
        if dim != self.tp_dim:
            return ((0, size),)
        per_part = size // self.tp_stride
        run = per_part // self.tp
        starts = (part * per_part + tp_rank * run for part in range(self.tp_stride))
        return tuple((start, start + run) for start in starts)

    def real_numel(self, tp_rank: int) -> int:
        """Elements of a shard before its pad rows begin; pad rows are the last rows of dim 0 over all ranks."""
        if self.shape == self.padded_shape:
            return self.local_numel
        ranks = self.tp if self.tp_dim == 0 else 1
        rows = self.padded_shape[0] // ranks
        first = tp_rank * rows if ranks > 1 else 0
        return min(max(self.shape[0] - first, 0), rows) * (self.local_numel // rows)

    def real_length(self, tp_rank: int, start: int, length: int) -> int:
        """How many elements of a range of a shard come before its pad rows; these are not stored."""
        return max(min(start + length, self.real_numel(tp_rank)) - start, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentEntry:
    """Elements [start, start + length) of the flat shard of ``tp_rank``; ``tensors`` by key ("master", ...)."""

    parameter: str
    tp_rank: int
    start: int
    length: int
    tensors: Mapping[str, StoredTensor]

    def tensor_name(self, key: str) -> str:
        """Name of one of its tensors inside the file."""
        return f"{self.parameter}/{self.tp_rank}/{self.start}/{key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One rank's file: its size, its fragments and the rank's own further tensors (RNG states)."""

    name: str
    rank: int
    bytes: int
    fragments: tuple[FragmentEntry, ...]
    extras: Mapping[str, StoredTensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All of a checkpoint but the numbers.

    ``identity`` is also in every file, so that a file of another checkpoint is told. ``created``: seconds since 1970.
    ``references``: names of sibling checkpoints this one needs, with their identities. ``state``: the caller's JSON.
    """

    identity: str
    created: float
    world_size: int
    references: Mapping[str, str]
    parameters: Mapping[str, StoredParameter]
    files: tuple[ShardFile, ...]
    state: Mapping[str, Any]


def describe(parameter: Parameter, tp: int) -> StoredParameter:
    """The stored form of a parameter laid out over ``tp`` tensor-parallel ranks."""
    assert all(dim.pad == 0 for dim in parameter.dims[1:]), f"{parameter.name}: pad rows outside dim 0"
    assert not parameter.dims[0].pad or parameter.tp_stride == 1, f"{parameter.name}: pad rows in a strided dim"
    return StoredParameter(
        name=parameter.name,
        shape=tuple(dim.real for dim in parameter.dims),
        padded_shape=parameter.shape,
        tp_dim=parameter.tp_dim,
        tp_stride=parameter.tp_stride,
        tp=1 if parameter.tp_dim is None else tp,
    )


def merge_parameters(tables: Iterable[Mapping[str, StoredParameter]]) -> dict[str, StoredParameter]:
    """One table from the ranks' tables.

    Raises:
        CheckpointError: two ranks describe a parameter differently.
    """
    merged: dict[str, StoredParameter] = {}
    for table in tables:
        for name, parameter in table.items():
            if merged.setdefault(name, parameter) != parameter:
                raise CheckpointError(f"ranks disagree about {name}: {merged[name]} and {parameter}")
    return merged


def check_coverage(manifest: Manifest) -> None:
    """Every element of every parameter is stored exactly once, in each kind of tensor that any parameter has.

    Raises:
        CheckpointError: a range is missing or stored twice; names parameter, range and files.
    """
    ranges: defaultdict[tuple[str, str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for file in manifest.files:
        for fragment in file.fragments:
            for key in fragment.tensors:
                at = (fragment.parameter, key, fragment.tp_rank)
                ranges[at].append((fragment.start, fragment.start + fragment.length, file.name))
    for name, key in product(sorted(manifest.parameters), sorted({"master"} | {key for _, key, _ in ranges})):
        parameter = manifest.parameters[name]
        for tp_rank in range(parameter.tp):
            shard = f"{name} ({key}, tensor-parallel rank {tp_rank})"
            _check_shard(shard, sorted(ranges[name, key, tp_rank]), parameter.real_numel(tp_rank))


def _check_shard(shard: str, ranges: Sequence[tuple[int, int, str]], numel: int) -> None:
    position, previous = 0, ""
    for start, end, file in [*ranges, (numel, numel, "")]:
        if start > position:
            raise CheckpointError(f"elements {position} to {start} of {shard} are in no rank's file")
        if start < position:
            raise CheckpointError(
                f"elements {start} to {position} of {shard} are in {previous} and again in {file or 'none'}"
            )
        position, previous = end, file


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a checksum of its own content.

    Raises:
        CheckpointError: the caller's state holds something JSON has no form for.
    """
    try:
        state = json.loads(json.dumps(manifest.state))  # as it will be read: keys are text, tuples are lists
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of a checkpoint must be JSON: {error}") from error
    body = {
        "format": FORMAT,
        "version": VERSION,
        "identity": manifest.identity,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "references": dict(manifest.references),
        "parameters": {name: _record(parameter, "name") for name, parameter in manifest.parameters.items()},
        "files": {file.name: _file_record(file) for file in manifest.files},
        "state": state,
    }
    return json.dumps({**body, "checksum": _checksum(body)})


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint directory; the files beside it are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged or edited, or another version wrote it.
    """
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{directory} is no checkpoint: {MANIFEST} cannot be read ({error.strerror}); "
            "give a directory like RUN/checkpoints/step-00000100"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a manifest of ds-vcycle ('format' is not '{FORMAT}'); use another checkpoint"
        )
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {body.get('version')!r}, this ds-vcycle reads version {VERSION}; "
            "use the ds-vcycle that wrote it"
        )
    if body.pop("checksum", None) != _checksum(body):
        raise CheckpointError(f"{path} is damaged or was edited: its checksum does not match; use another checkpoint")
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = repr(error) if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} is malformed ({reason}); use another checkpoint") from error


def _parse(body: Mapping[str, Any]) -> Manifest:
    parameters = {
        name: StoredParameter(
            name=name, **{**p, "shape": tuple(p["shape"]), "padded_shape": tuple(p["padded_shape"])}
        )
        for name, p in body["parameters"].items()
    }  # fmt: skip
    manifest = Manifest(
        identity=body["identity"], created=float(body["created"]), world_size=int(body["world_size"]),
        references=dict(body["references"]), parameters=parameters,
        files=tuple(_parse_file(name, file) for name, file in body["files"].items()), state=dict(body["state"]),
    )  # fmt: skip
    for parameter in parameters.values():
        _check_parameter(parameter)
    for file in manifest.files:
        for fragment in file.fragments:
            _check_fragment(fragment, parameters, file.name)
    return manifest


def _check_parameter(parameter: StoredParameter) -> None:
    """The layout it was stored under can be."""
    dims, dim = len(parameter.shape), parameter.tp_dim
    if dims not in (1, 2) or len(parameter.padded_shape) != dims or dim not in (None, *range(dims)):
        raise ValueError(f"{parameter.name}: shape {parameter.shape}, tensor-parallel dim {dim}")
    if min(parameter.shape) < 1 or any(a > b for a, b in zip(parameter.shape, parameter.padded_shape, strict=True)):
        raise ValueError(f"{parameter.name}: shape {parameter.shape} padded to {parameter.padded_shape}")
    split = 1 if dim is None else parameter.padded_shape[dim]
    if min(parameter.tp, parameter.tp_stride) < 1 or split % (parameter.tp * parameter.tp_stride):
        raise ValueError(f"{parameter.name}: {split} rows over {parameter.tp} ranks in {parameter.tp_stride} parts")


def _check_fragment(fragment: FragmentEntry, parameters: Mapping[str, StoredParameter], file: str) -> None:
    """It lies in its parameter, and is of numbers as masters and moments are kept."""
    name = fragment.parameter
    if name not in parameters:
        raise ValueError(f"{file}: {name} is no parameter of the checkpoint")
    if not 0 <= fragment.tp_rank < parameters[name].tp:
        raise ValueError(f"{file}: {name} has no tensor-parallel rank {fragment.tp_rank}")
    if min(fragment.start, fragment.length) < 0 or (
        fragment.start + fragment.length > parameters[name].real_numel(fragment.tp_rank)
    ):
        raise ValueError(f"{file}: {name} reaches past its shape {list(parameters[name].shape)}")
    for key, tensor in fragment.tensors.items():
        if tensor.dtype != "F32":
            raise ValueError(f"{file}: {key} of {name} is {tensor.dtype}, where F32 is kept")


def _parse_file(name: str, file: Mapping[str, Any]) -> ShardFile:
    if Path(name).name != name:
        raise ValueError(f"file name {name!r} leads out of the directory")
    fragments = (FragmentEntry(**{**f, "tensors": _parse_tensors(f["tensors"])}) for f in file["fragments"])
    return ShardFile(name=name, **{**file, "fragments": tuple(fragments), "extras": _parse_tensors(file["extras"])})


def _parse_tensors(tensors: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {key: StoredTensor(**tensor) for key, tensor in tensors.items()}


def _file_record(file: ShardFile) -> dict[str, Any]:
    fragments = [{**_record(f), "tensors": _tensor_records(f.tensors)} for f in file.fragments]
    return {**_record(file, "name"), "fragments": fragments, "extras": _tensor_records(file.extras)}


def _tensor_records(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {key: _record(tensor) for key, tensor in tensors.items()}


def _record(item: StoredParameter | FragmentEntry | ShardFile | StoredTensor, *leave_out: str) -> dict[str, Any]:
    """The item's fields. (``dataclasses.asdict`` copies deeply; with 10^5 fragments that takes most of a save.)"""
    return {name: getattr(item, name) for name in item.__slots__ if name not in leave_out}


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
