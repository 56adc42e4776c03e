"""The parameters that DeepSpeed's files hold against the model's: nothing missing, nothing left over. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.levels import ModelShape
from ds_vcycle.schema import Parameter, parameters

_WRAPPER = "module."
_MEGATRON_UNIT = 128  # Megatron pads a vocabulary to a multiple of 128 x TP


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Whose shapes were found, and how the tensors are split.

    Attributes:
        where: the checkpoint, for messages.
        config: whose model is compared, for messages.
        tp: tensor-parallel degree of the shapes.
    """

    where: Path
    config: str
    tp: int


def plain_names(names: Sequence[str]) -> dict[str, str]:
    """Each name without ``module.``, which wrappers put before all of them."""
    depth = 0
    while names and all(name.startswith(_WRAPPER * (depth + 1)) for name in names):
        depth += 1
    return {name: name[len(_WRAPPER) * depth :] for name in names}


def pad_as_real(parameter: Parameter) -> Parameter:
    """The parameter with its pad rows taken for real ones."""
    first = parameter.dims[0]
    return replace(parameter, dims=(replace(first, length=first.length + first.pad, pad=0), *parameter.dims[1:]))


def held_parameters(found: Found, shapes: Mapping[str, tuple[int, ...]], shape: ModelShape) -> dict[str, Parameter]:
    """The model's parameters as the files hold them, which differ in the vocabulary's pad rows at most.

    Args:
        found: whose they are.
        shapes: name -> shape on one tensor-parallel rank. Empty tensors are nobody's.
        shape: of the model.

    Raises:
        CheckpointError: names the parameters missing or left over, or the one whose shape differs.
    """
    table = {parameter.name: parameter for parameter in parameters(shape)}
    there = {name: size for name, size in shapes.items() if math.prod(size)}
    _require_same(found, there, table)
    return {name: _held(found, parameter, there[name], shape) for name, parameter in table.items()}


def _require_same(found: Found, there: Mapping[str, object], table: Mapping[str, Parameter]) -> None:
    over, missing = [name for name in there if name not in table], [name for name in table if name not in there]
    if not over and not missing:
        return
    said = [f"has {some(over)}, which the model has not"] if over else []
    said += [f"lacks {some(missing)}"] if missing else []
    engine = any("layer_norm_weight" in name for name in over)
    remedy = (
        "it was trained with Transformer Engine's layers, which name their norms otherwise: rename them before saving, "
        "or train with Megatron's local layer spec"
        if engine
        else f"give the configuration of the model it was trained as ({found.config} is of another)"
    )
    raise CheckpointError(f"{found.where} {' and '.join(said)}; {remedy}")


def _held(found: Found, parameter: Parameter, size: tuple[int, ...], shape: ModelShape) -> Parameter:
    vocabulary = parameter.dims[0]
    wanted, held = parameter.local_shape(found.tp), parameter
    if vocabulary.axis == "vocab" and len(size) == len(wanted):
        rows = size[0] * (found.tp if parameter.tp_dim == 0 else 1)
        _require_padding(found, parameter.name, rows, shape)
        held = replace(parameter, dims=(replace(vocabulary, pad=rows - vocabulary.real), *parameter.dims[1:]))
        wanted = held.local_shape(found.tp)
    if size != wanted:
        split = f" on each of {found.tp} tensor-parallel ranks" if found.tp > 1 and parameter.tp_dim is not None else ""
        raise CheckpointError(
            f"{found.where}: {parameter.name} has shape {list(size)}{split}, the model of {found.config} has "
            f"{list(wanted)}; give the configuration of the model it was trained as"
        )
    return held


def _require_padding(found: Found, name: str, rows: int, shape: ModelShape) -> None:
    """The rows beyond the vocabulary must be as few as padding makes them: else real ones would be dropped."""
    extra = rows - shape.vocab_size
    if extra < 0 or (extra >= _MEGATRON_UNIT * found.tp and rows != shape.padded_vocab):
        raise CheckpointError(
            f"{found.where}: {name} has {rows} rows, and model.vocab_size={shape.vocab_size} of {found.config} padded "
            f"to a multiple of {_MEGATRON_UNIT * found.tp} gives others; set model.vocab_size to the tokenizer's size"
        )


def some(names: Sequence[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
