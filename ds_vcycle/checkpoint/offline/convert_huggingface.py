"""``ds-vcycle convert``: a checkpoint to a Hugging Face directory, and back; weights only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from torch import Tensor

from ds_vcycle.checkpoint.huggingface.reading import HuggingFaceSource
from ds_vcycle.checkpoint.huggingface.token_ids import beyond
from ds_vcycle.checkpoint.huggingface.tokenizer_files import find_tokenizer
from ds_vcycle.checkpoint.huggingface.writing import Export, require_exportable, shard_bytes, write_huggingface
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.offline.inputs import Form, Source, form_of, open_source, tokenizer_directories
from ds_vcycle.checkpoint.offline.output import Advance, Output, origin_of, state_of
from ds_vcycle.checkpoint.offline.processes import ALONE
from ds_vcycle.checkpoint.offline.streamed import AnnouncedFragment, write_streamed
from ds_vcycle.checkpoint.offline.target import check_target
from ds_vcycle.checkpoint.recorded import missing_parameters, recorded, require_shape
from ds_vcycle.checkpoint.store import save_written
from ds_vcycle.schema import Parameter, parameters


def convert(
    source_path: Path, output: Output, *, config: Path | None = None, overrides: Sequence[str] = (),
    advance: Advance = lambda done, total: None,
) -> str:  # fmt: skip
    """Convert to the other form; memory holds one parameter, in up to three copies.

    Args:
        source_path: a checkpoint, a run directory, RUN@STEP, or a Hugging Face directory.
        output: where, and how; by default in the form the source has not.
        config: a run's YAML file, for a Hugging Face model that is to be recorded with levels and policies.
        overrides: of a Hugging Face model's configuration.
        advance: told of the elements done and to do.

    Returns:
        What was written, in words.

    Raises:
        UserError: something is missing, left over, damaged or has no counterpart; nothing is written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CheckpointError("ds-vcycle convert to or from Hugging Face is the work of one process: no launcher")
    source = open_source(source_path, config=config, overrides=overrides)
    with source:
        form: Form = output.form or ("store" if form_of(source) == "huggingface" else "huggingface")
        check_target(output.to, [source], overwrite=output.overwrite, form=form)
        if overrides and form_of(source) == "store":
            raise CheckpointError(
                f"{overrides[0]}: {source.directory} records its own configuration, which is not changed"
            )
        held = recorded(source)
        require_shape(source, held.level.shape, whose="its configuration", partly=True)
        if form == "huggingface":
            return _to_huggingface(source, output, advance)
        if isinstance(source, HuggingFaceSource):
            return _to_store(source, output.to, advance)
    raise CheckpointError(
        f"--format store: {source_path} is a checkpoint already, which any layout reads as it is; leave --format out "
        "for a Hugging Face directory, or give --tp, --dp or --zero to have it rewritten"
    )


def _to_store(source: HuggingFaceSource, to: Path, advance: Advance) -> str:
    held = recorded(source)
    fragments = [
        AnnouncedFragment(parameter=parameter, start=0, length=_real(parameter), keys=("master",))
        for parameter in source.parameters
    ]
    origin = {"verb": "convert", "huggingface": origin_of(source)}
    state = state_of(held.config, held.level, 0, origin) | {"missing": list(missing_parameters(source))}
    made = (tensor.reshape(-1) for tensor in _counted(source, source.parameters, advance))
    save_written(
        to, lambda staging, identity: write_streamed(staging, identity, 0, fragments, made), state=state, rank=0,
        world_size=1, gather=ALONE.gather, barrier=ALONE.barrier, alone=False,
    )  # fmt: skip
    return "\n".join(_store_lines(source, to))


def _to_huggingface(source: Source, output: Output, advance: Advance) -> str:
    held = recorded(source)
    absent = missing_parameters(source)
    table = tuple(parameter for parameter in parameters(held.level.shape) if parameter.name not in absent)
    tokenizer = find_tokenizer(tokenizer_directories(source, held.config))
    export = Export(
        shape=held.level.shape, model=held.config.model, parameters=table, identity=source.identity,
        tokenizer=tokenizer, max_shard_bytes=shard_bytes(output.max_shard_size),
    )  # fmt: skip
    require_exportable(export)
    write_huggingface(output.to, export, _wholes(source, table), advance)
    looked = ", ".join(str(path) for path in tokenizer_directories(source, held.config))
    lines = [
        f"written: {output.to}: {export.architecture}, level {held.level.index} of {source.directory}",
        f"tokenizer files: {', '.join(path.name for path in tokenizer.files)}"
        if tokenizer.files
        else f"no tokenizer files: there are none in {looked}",
    ]
    unknown = [
        f"{key}={token}"
        for ids in (tokenizer.ids, tokenizer.generation)
        for key, tokens in beyond(ids, held.level.shape.vocab_size).items()
        for token in tokens
    ]
    if unknown:
        lines.append(
            f"not written, as the vocabulary has only {held.level.shape.vocab_size} tokens: "
            f"{', '.join(dict.fromkeys(unknown))}"
        )
    if absent:
        lines.append(f"missing, and so not in it: {', '.join(absent)}")
    return "\n".join(lines)


def _store_lines(source: HuggingFaceSource, to: Path) -> Iterator[str]:
    held, absent = recorded(source), missing_parameters(source)
    shape = held.level.shape
    yield (
        f"written: {to}: {shape.architecture} (layers {shape.layers}, hidden {shape.hidden}, heads {shape.heads}, "
        f"ffn {shape.ffn}), weights of {source.directory}"
    )
    if absent:
        yield (
            f"missing there, and so not in it: {', '.join(absent)}; a run that starts from it takes them from its seed"
        )
    if source.left_out:
        yield f"left out, as model.* says: {', '.join(source.left_out)}"
    if source.unread:
        yield f"not read: {'; '.join(source.unread)}"
    yield f"a run starts from it with training.init_from={to} and a model of these sizes:"
    decided = {key: getattr(held.config.model, key) for key in _DECIDED}
    if shape.architecture == "bert":
        decided["sentence_order"] = shape.sentence_order
    section = {**source.settings.section, **decided}
    yield yaml.safe_dump({"model": section}, sort_keys=False).rstrip()


_DECIDED = ("vocab_size", "sequence_length", "dropout", "attention_dropout", "init_std")


def _wholes(source: Source, table: Sequence[Parameter]) -> Iterator[Tensor]:
    """Every parameter in its shape without pad rows."""
    for parameter in table:
        whole = source.read(parameter, tp=1, tp_rank=0, start=0, length=_real(parameter), key="master")
        yield whole.view(-1, *parameter.shape[1:])


def _counted(source: Source, table: Sequence[Parameter], advance: Advance) -> Iterator[Tensor]:
    total, done = sum(map(_real, table)), 0
    for whole in _wholes(source, table):
        yield whole
        done += whole.numel()
        advance(done, total)


def _real(parameter: Parameter) -> int:
    """Elements without pad rows."""
    return parameter.numel // parameter.shape[0] * parameter.dims[0].real
