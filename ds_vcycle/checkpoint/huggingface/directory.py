"""The tensor files of a Hugging Face directory: which tensors there are, and rows or columns of one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ds_vcycle.checkpoint.huggingface.json_files import read_json
from ds_vcycle.checkpoint.huggingface.settings import CONFIG
from ds_vcycle.checkpoint.manifest import MANIFEST, CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")


def is_huggingface(path: Path) -> bool:
    """Whether a path is a Hugging Face directory rather than a checkpoint or a run of ours."""
    theirs = any((path / name).is_file() for name in (CONFIG, WEIGHTS, INDEX))
    return theirs and not (path / MANIFEST).is_file() and not (path / "checkpoints").is_dir()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor: its name in the file (older files say gamma and beta for a norm's weight and bias), dtype, shape."""

    file: Path
    stored_as: str
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """The safetensors files of a directory, one or several with an index. Mapped when first needed."""

    def __init__(self, directory: Path) -> None:
        self._open: dict[Path, Any] = {}
        self._digest = hashlib.sha256()
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in self._listed(directory):
            other = self.tensors.setdefault(_current_name(tensor.stored_as), tensor)
            if other is not tensor:
                raise CheckpointError(
                    f"{directory} has one tensor twice: {other.stored_as} in {other.file.name} and {tensor.stored_as} "
                    f"in {tensor.file.name}; remove one"
                )

    @property
    def identity(self) -> str:
        """A digest of names, dtypes, shapes and file sizes: tells another model, not another set of its weights."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def rows(self, name: str, first: int, last: int, *, transposed: bool = False) -> torch.Tensor:
        """Rows [first, last) of a tensor, or such columns as rows, as float32.

        Raises:
            CheckpointError: a value is NaN or infinite; names file and tensor.
        """
        tensor = self.tensors[name]
        part = self._file(tensor.file).get_slice(tensor.stored_as)
        found: torch.Tensor = part[:, first:last].t() if transposed else part[first:last]
        found = found.float()
        wrong = first_not_finite(found)
        if wrong is not None:
            raise CheckpointError(
                f"{tensor.file}: {tensor.stored_as} has a value that is {wrong}; no model with such a "
                "weight is converted: take an earlier checkpoint of it, or copy the file again"
            )
        return found

    def equal(self, one: str, other: str, *, bucket: int = 1 << 22) -> bool:
        """Whether two tensors have the same shape and the same bits; a few rows are in memory at a time."""
        shape = self.tensors[one].shape
        if self.tensors[other].shape != shape:
            return False
        width = shape[1] if len(shape) > 1 else 1
        count = max(1, bucket // width)
        spans = ((first, min(first + count, shape[0])) for first in range(0, shape[0], count))
        return all(torch.equal(self.rows(one, *span), self.rows(other, *span)) for span in spans)

    def _listed(self, directory: Path) -> list[StoredTensor]:
        found: list[StoredTensor] = []
        for path in _files(directory):
            opened = self._file(path)
            self._digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            for name in sorted(opened.keys()):
                part = opened.get_slice(name)
                tensor = StoredTensor(file=path, stored_as=name, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                self._digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
                found.append(tensor)
        _check_index(directory, found)
        return found

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged: no safetensors file ({error}); copy it again") from error
        return self._open[path]


def first_not_finite(values: torch.Tensor) -> str | None:
    """ "nan", "inf" or "-inf" where a value is that, else None; nothing of the values' size is made."""
    bounds = torch.stack(torch.aminmax(values)) if values.numel() else values.new_zeros(1)
    wrong = bounds[~bounds.isfinite()]
    return str(wrong[0].item()) if wrong.numel() else None


def require_floats(tensors: Iterable[StoredTensor]) -> None:
    """Refuse quantised weights.

    Raises:
        CheckpointError: names the tensor and its dtype.
    """
    for tensor in tensors:
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{tensor.file}: {tensor.stored_as} is {tensor.dtype}; only {', '.join(_FLOATS)} can be converted: "
                "save the model with weights of such a type"
            )


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        names = sorted(set(_index(directory).values()))
        if (directory / WEIGHTS).is_file() and WEIGHTS not in names:
            raise CheckpointError(
                f"{directory} has both {WEIGHTS} and {INDEX}, which does not list it; remove the one that is not meant"
            )
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{directory / INDEX}: file name {name!r} leads out of the directory")
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory / name}, which {INDEX} lists, is missing; copy it again")
        return [directory / name for name in names]
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    others = sorted(path.name for path in directory.glob("*.bin")) + sorted(
        path.name for path in directory.glob("*.safetensors")
    )
    there = f"; it has {', '.join(others[:3])}: load it with transformers and save_pretrained" if others else ""
    raise CheckpointError(f"{directory} has neither {WEIGHTS} nor {INDEX}{there}")


def _index(directory: Path) -> dict[str, str]:
    found = read_json(directory / INDEX).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{directory / INDEX} is damaged: it has no weight_map; copy it again")
    return found


def _check_index(directory: Path, found: list[StoredTensor]) -> None:
    if not (directory / INDEX).is_file():
        return
    wanted, held = _index(directory), {tensor.stored_as: tensor.file.name for tensor in found}
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            raise CheckpointError(
                f"{directory / INDEX} is damaged: {name} is listed in {wanted.get(name)} and lies in {held.get(name)}; "
                "copy the directory again"
            )


def _current_name(name: str) -> str:
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(f"LayerNorm{old}"):
            return name.removesuffix(old) + new
    return name
