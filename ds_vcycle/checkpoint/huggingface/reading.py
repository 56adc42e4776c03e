"""A Hugging Face directory as a source of our parameters: every tensor accounted for, read row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ds_vcycle.checkpoint.huggingface.directory import StoredTensor, TensorFiles, require_floats
from ds_vcycle.checkpoint.huggingface.settings import SHORTER, Settings, read_settings, run_config
from ds_vcycle.checkpoint.huggingface.tensors import BASE, SENTENCE_ORDER, UNREAD, NamedTensor, head_of, named_tensors
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.config import RunConfig
from ds_vcycle.levels import ModelShape, resolve_levels
from ds_vcycle.schema import Parameter, parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What of the model the files hold.

    Attributes:
        names: of each parameter's tensors, the name it is read by.
        missing: those of heads that are not there.
        left_out: what the configuration leaves out.
        unread: what transformers does not read either, and why.
    """

    names: dict[str, list[tuple[NamedTensor, str]]] = field(default_factory=dict)
    missing: list[NamedTensor] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


class HuggingFaceSource:
    """Weights of a Hugging Face directory under our names (a :class:`ds_vcycle.checkpoint.source.WeightSource`).

    Attributes:
        config: the configuration it is recorded with; level 1 is the model.
        left_out: what it has and the configuration leaves out, in words.
        unread: what it has and transformers does not read either, in words.
    """

    def __init__(self, files: TensorFiles, settings: Settings, config: RunConfig, held: _Held) -> None:
        self.config = config
        self.left_out = tuple(held.left_out)
        self.unread = tuple(held.unread)
        self.settings = settings
        self._files = files
        self._names = held.names
        self._state = {
            "level": 1,
            "config": config.model_dump(mode="json"),
            "adam_step": 0,
            "missing": [tensor.parameter.name for tensor in held.missing],
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    @property
    def directory(self) -> Path:
        """The Hugging Face directory."""
        return self.settings.path.parent

    @property
    def identity(self) -> str:
        """A digest of its tensors' names and shapes."""
        return self._files.identity

    @property
    def state(self) -> Mapping[str, Any]:
        """As a checkpoint of ours would record it; ``missing``: the parameters that are not there."""
        return self._state

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those that are there."""
        return tuple(p for p in parameters(resolve_levels(self.config)[0].shape) if p.name in self._names)

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """It holds these parameters and no others.

        Raises:
            CheckpointError: names the parameters left over on either side.
        """
        differing = sorted(self._names.keys() ^ {parameter.name for parameter in parameters})
        if differing:
            raise CheckpointError(
                f"{self.directory} differs from the model in {_some(differing)}; use its own configuration"
            )

    def read(self, parameter: Parameter, *, tp: int, tp_rank: int, start: int, length: int, key: str) -> torch.Tensor:
        """A flat range of a whole parameter as fp32 [length] on the CPU, pad rows zero; only its rows are read.

        Args:
            parameter: of the level.
            tp: must be 1.
            tp_rank: must be 0.
            start: first element.
            length: number of elements.
            key: must be "master".

        Raises:
            CheckpointError: a value is NaN or infinite; names file and tensor.
        """
        assert (tp, tp_rank, key) == (1, 0, "master"), f"{parameter.name}: {tp}, {tp_rank}, {key}"
        width = parameter.shape[1] if len(parameter.shape) > 1 else 1
        first, last = start // width, -(-(start + length) // width)
        out = torch.zeros(last - first, *parameter.shape[1:])
        for tensor, name in self._names[parameter.name]:
            for run in tensor.runs:
                low, high = max(run.ours, first), min(run.ours + run.rows, last)
                if low < high:
                    theirs = run.theirs + low - run.ours
                    rows = self._files.rows(name, theirs, theirs + high - low, transposed=tensor.transposed)
                    out[low - first : high - first] = rows
        return out.view(-1)[start - first * width :][:length]


def open_huggingface(
    directory: Path, *, config: Path | None = None, overrides: Sequence[str] = ()
) -> HuggingFaceSource:
    """Open a Hugging Face directory; no weight is read but those that must be equal.

    Args:
        directory: with config.json and safetensors files.
        config: a run's YAML file to record the model with, instead of a flat run of the model alone.
        overrides: of that configuration. ``model.sentence_order=false`` leaves pooler and sentence-order head out,
            ``model.vocab_size`` and ``model.sequence_length`` the embeddings beyond.

    Raises:
        UserError: it is damaged, of another model, has tensors left over or lacks some (whole heads may be missing);
            names files, keys and tensors.
    """
    settings = read_settings(directory)
    files = TensorFiles(directory)
    _check_layers(files, settings)
    present = any(SENTENCE_ORDER.fullmatch(name) for name in files.tensors)
    found = run_config(settings, sentence_order=present, config=config, overrides=overrides)
    held = _account(files, settings, resolve_levels(found)[0].shape)
    return HuggingFaceSource(files, settings, found, held)


def _account(files: TensorFiles, settings: Settings, shape: ModelShape) -> _Held:
    """Find every tensor of the model, and a reason for every tensor of the files."""
    held, used = _Held(), set[str]()
    base = BASE[settings.model_type]
    bare = not any(name.startswith(base) for name in files.tensors)
    for tensor in named_tensors(shape):
        names = [name.removeprefix(base) if bare else name for name in (tensor.name, *tensor.aliases)]
        there = [name for name in names if name in files.tensors]
        copies = [name for name in tensor.copies if name in files.tensors]
        used.update(there, copies)
        if there or copies:
            _hold(held, tensor, there, copies, files, settings)
        else:
            held.missing.append(tensor)
    _check_left_over(held, files, used, settings, shape)
    _check_missing(settings, parameters(shape), held.missing)
    return held


def _hold(
    held: _Held, tensor: NamedTensor, there: Sequence[str], copies: Sequence[str], files: TensorFiles,
    settings: Settings,
) -> None:  # fmt: skip
    """One tensor of the model is read by the first of the names it has; what else is there of it is no other.

    Of a copy that differs transformers reads nothing either, so that it is left out by name.
    """
    name, *others = (*there, *copies)
    require_floats(files.tensors[each] for each in (name, *others))
    cut = [_checked_shape(files.tensors[each], tensor, settings) for each in (name, *others)]
    for other in others:
        same = files.equal(name, other)
        if not same and other not in copies:
            raise CheckpointError(
                f"{settings.path.parent}: {name} and {other} differ, although {settings.path.name} ties them; "
                "remove the one that is not meant, or set tie_word_embeddings=false there if both are"
            )
        if not same:
            held.unread.append(f"{other} differs from {name}, and transformers computes with the latter")
    held.names.setdefault(tensor.parameter.name, []).append((tensor, name))
    held.left_out.extend(cut[0])


def _check_left_over(held: _Held, files: TensorFiles, used: set[str], settings: Settings, shape: ModelShape) -> None:
    """Every tensor of the files is of the model, or one that it leaves out."""
    unread = UNREAD[settings.model_type]
    over = sorted(name for name in files.tensors.keys() - used if not unread.fullmatch(name))
    if shape.architecture == "bert" and not shape.sentence_order:
        held.left_out.extend(name for name in over if SENTENCE_ORDER.fullmatch(name))
        over = [name for name in over if not SENTENCE_ORDER.fullmatch(name)]
    if over:
        raise CheckpointError(
            f"{settings.path.parent} has tensors that a {settings.model_type} pretraining model has no place for: "
            f"{_some(over)}; save the model without them"
        )


def _check_layers(files: TensorFiles, settings: Settings) -> None:
    """Every layer has tensors of its own: a number of layers beyond is told before anything is made for each."""
    layers = settings.section["layers"]
    if layers > len(files.tensors):
        raise CheckpointError(
            f"{settings.path}: {settings.key('layers')}={layers}, but {settings.path.parent} has only "
            f"{len(files.tensors)} tensors; copy the directory again"
        )


def _check_missing(settings: Settings, table: Sequence[Parameter], missing: Sequence[NamedTensor]) -> None:
    """Whole heads may be missing, nothing else may."""
    heads = {head_of(tensor.parameter) for tensor in missing}
    members = {parameter.name for parameter in table if head_of(parameter) in heads}
    if None in heads or members != {tensor.parameter.name for tensor in missing}:
        raise CheckpointError(
            f"{settings.path.parent} lacks tensors of the model that {settings.path.name} describes: "
            f"{_some([tensor.name for tensor in missing])}; copy it again from where the model comes from"
        )


def _checked_shape(stored: StoredTensor, tensor: NamedTensor, settings: Settings) -> list[str]:
    """The shape is that of config.json; what of it the configuration leaves out."""
    axis = tensor.parameter.dims[0].axis
    key = {"vocab": SHORTER[0], "position": SHORTER[1]}.get(axis)
    wanted = (settings.section[key], *tensor.shape[1:]) if key else tensor.shape
    if stored.shape != wanted:
        raise CheckpointError(
            f"{stored.file}: {stored.stored_as} has shape {list(stored.shape)}, {settings.path.name} says "
            f"{list(wanted)}; copy the directory again"
        )
    return [] if wanted == tensor.shape else [f"rows {tensor.shape[0]} to {wanted[0]} of {stored.stored_as}"]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
