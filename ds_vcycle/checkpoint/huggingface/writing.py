"""Writing a Hugging Face directory: one tensor in memory at a time, committed by one rename."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ds_vcycle.checkpoint.huggingface.directory import INDEX, WEIGHTS, first_not_finite
from ds_vcycle.checkpoint.huggingface.settings import CONFIG, require_counterpart, write_settings
from ds_vcycle.checkpoint.huggingface.tensors import BASE, NamedTensor, head_of, model_type, named_tensors
from ds_vcycle.checkpoint.huggingface.token_ids import within
from ds_vcycle.checkpoint.huggingface.tokenizer_files import GENERATION, TokenizerFiles, copy_tokenizer
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.retention import staged, sync_directory
from ds_vcycle.checkpoint.shards import stream_shard
from ds_vcycle.config import ModelConfig
from ds_vcycle.levels import ModelShape
from ds_vcycle.schema import Parameter, parameters

Advance = Callable[[int, int], None]
DEFAULT_SHARD = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_NAMES = {"gpt2": "GPT2", "megatron-bert": "MegatronBert", "bert": "Bert"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is to be written.

    Attributes:
        shape: of the level.
        model: what is the same at every level.
        parameters: those that are there, in the order their values are given in.
        identity: of what they come from; kept in the files' metadata.
        tokenizer: its files and ids.
        max_shard_bytes: a file holds so much, or one tensor.
    """

    shape: ModelShape
    model: ModelConfig
    parameters: Sequence[Parameter]
    identity: str
    tokenizer: TokenizerFiles
    max_shard_bytes: int

    @property
    def architecture(self) -> str:
        """transformers' class of the model.

        Raises:
            CheckpointError: it has no class for a model of these parameters; names those missing.
        """
        name = _NAMES[model_type(self.shape)]
        there = {parameter.name for parameter in self.parameters}
        missing = [parameter for parameter in parameters(self.shape) if parameter.name not in there]
        heads = {head_of(parameter) for parameter in missing}
        held = {head_of(parameter) for parameter in self.parameters}
        if not missing:
            kind = "ForPreTraining" if self.shape.sentence_order else "ForMaskedLM"
            return name + ("LMHeadModel" if self.shape.architecture == "gpt" else kind)
        if "lm_head" in heads and None not in heads and "binary_head" not in held:
            return f"{name}Model"
        raise CheckpointError(
            f"{', '.join(parameter.name for parameter in missing[:4])} are missing, and transformers has no class of "
            f"{name} that lacks these and no others; train the model from it first (training.init_from), or convert it "
            "from its Hugging Face directory with model.sentence_order=false"
        )


def shard_bytes(text: str) -> int:
    """Bytes of "5GB", "200MB", "1GiB" or a plain number.

    Raises:
        CheckpointError: it is none of these, or nothing.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if size < 1:
        raise CheckpointError(f"--max-shard-size {text}: give a size like 5GB, 200MB or 1GiB")
    return size


def write_huggingface(
    to: Path, export: Export, wholes: Iterable[Tensor], advance: Advance = lambda done, total: None
) -> None:
    """Write a directory that ``from_pretrained`` loads. What was there before goes only after the new one is complete.

    Args:
        to: the directory; its parent may hold other things.
        export: what is to be written; checked already (:func:`require_exportable`).
        wholes: the value of each parameter, fp32 of its shape without pad rows, made when its turn comes.
        advance: told of the elements done and to do.

    Raises:
        CheckpointError: a value is NaN or infinite; the disk is full, or the file system refuses otherwise. Nothing is
            left behind.
    """
    require_exportable(export)
    with staged(to) as staging:
        _write_weights(staging, export, wholes, advance)
        _write_rest(staging, export)


def require_exportable(export: Export) -> None:
    """Refuse what transformers cannot compute or has no class for (raises :class:`CheckpointError`)."""
    require_counterpart(export.shape, export.model)
    assert export.architecture


def _write_weights(staging: Path, export: Export, wholes: Iterable[Tensor], advance: Advance) -> None:
    table = _table(export)
    sizes = {name: 4 * math.prod(tensor.shape) for name, tensor in table.items()}
    files = _split(sizes, export.max_shard_bytes)
    made = _counted(_tensors(export, wholes), sum(sizes.values()) // 4, advance)
    names = [WEIGHTS] if len(files) == 1 else [_numbered(i, len(files)) for i in range(len(files))]
    for name, held in zip(names, files, strict=True):
        entries = {key: (torch.float32, table[key].shape) for key in held}
        stream_shard(staging / name, entries, islice(made, len(held)), export.identity)
    assert next(made, None) is None, "more values than parameters"
    if len(files) > 1:
        listed = {key: name for name, held in zip(names, files, strict=True) for key in held}
        _write(staging / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": listed})


def _write_rest(staging: Path, export: Export) -> None:
    text = write_settings(export.shape, export.model, export.architecture, export.tokenizer.ids)
    (staging / CONFIG).write_text(text, encoding="utf-8")
    ends = within(export.tokenizer.generation, export.shape.vocab_size)
    if export.shape.architecture == "gpt" and ends:
        made = {"_from_model_config": True} if ends.items() <= export.tokenizer.ids.items() else {}
        _write(staging / GENERATION, {**made, **ends})
    copy_tokenizer(export.tokenizer, staging, max_length=export.shape.sequence_length)
    for path in (path for path in staging.iterdir() if path.suffix != ".safetensors"):  # those are synced already
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(staging)


def _write(path: Path, tree: Mapping[str, object]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _table(export: Export) -> dict[str, NamedTensor]:
    """The tensors by the name they are written under, in the order they are made in."""
    base = BASE[model_type(export.shape)]
    bare = export.architecture.endswith("Model") and not export.architecture.endswith("LMHeadModel")
    return {
        name.removeprefix(base) if bare else name: tensor
        for parameter, tensors in _by_parameter(export)
        for tensor in tensors
        for name in (tensor.name, *tensor.copies)
    }


def _by_parameter(export: Export) -> Iterator[tuple[Parameter, list[NamedTensor]]]:
    found: dict[str, list[NamedTensor]] = {}
    for tensor in named_tensors(export.shape):
        found.setdefault(tensor.parameter.name, []).append(tensor)
    for parameter in export.parameters:
        yield parameter, found[parameter.name]


def _tensors(export: Export, wholes: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors of :func:`_table`, each made of its parameter's rows."""
    for (parameter, tensors), whole in zip(_by_parameter(export), wholes, strict=True):
        wrong = first_not_finite(whole)
        if wrong is not None:
            raise CheckpointError(
                f"{parameter.name} has a value that is {wrong}; no model with such a weight is exported: take an "
                "earlier checkpoint (RUN@STEP)"
            )
        for tensor in tensors:
            runs = sorted(tensor.runs, key=lambda run: run.theirs)
            parts = [whole[run.ours : run.ours + run.rows] for run in runs]
            made = parts[0] if len(parts) == 1 else torch.cat(parts)
            for _ in (tensor.name, *tensor.copies):
                yield made.t().contiguous() if tensor.transposed else made


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, in as many files as it takes."""
    files: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _numbered(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _counted(tensors: Iterator[Tensor], total: int, advance: Advance) -> Iterator[Tensor]:
    done = 0
    for tensor in tensors:
        yield tensor
        done += tensor.numel()
        advance(done, total)
