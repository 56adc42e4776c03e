"""``ds-vcycle convert`` from DeepSpeed's checkpoints to ours, and from ours to DeepSpeed's universal layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_vcycle.checkpoint.deepspeed.files import is_universal, tag_directory
from ds_vcycle.checkpoint.deepspeed.native import NativeSource, open_native
from ds_vcycle.checkpoint.deepspeed.universal import UniversalSource
from ds_vcycle.checkpoint.deepspeed.universal_writing import UniversalExport, write_universal
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.offline.output import Advance, origin_of, state_of
from ds_vcycle.checkpoint.offline.processes import ALONE
from ds_vcycle.checkpoint.offline.streamed import AnnouncedFragment, write_streamed
from ds_vcycle.checkpoint.offline.target import check_target
from ds_vcycle.checkpoint.reader import Checkpoint, open_checkpoint
from ds_vcycle.checkpoint.recorded import locate_checkpoint, recorded, require_shape
from ds_vcycle.checkpoint.store import save_written
from ds_vcycle.config import RunConfig, load_config, parse_config
from ds_vcycle.levels import Level, ModelShape, resolve_levels
from ds_vcycle.schema import Parameter, parameters


def from_deepspeed(
    source_path: Path, to: Path, *, config: Path | None, overrides: Sequence[str] = (), overwrite: bool = False,
    advance: Advance = lambda done, total: None,
) -> str:  # fmt: skip
    """Convert a native or universal DeepSpeed checkpoint to one of ours: masters, Adam's moments and step.

    Memory holds one parameter in up to three copies.

    Args:
        source_path: the directory with ``latest`` (or ``latest_universal``), or a tag's.
        to: directory to write.
        config: the run's YAML file whose level 1 it is: DeepSpeed's files name no sizes.
        overrides: of that configuration.
        overwrite: replace a checkpoint that is there.
        advance: told of the elements done and to do.

    Returns:
        What was written, in words.

    Raises:
        UserError: something is missing, left over, damaged, or would be read wrongly; nothing is written.
    """
    _require_alone()
    if config is None:
        raise CheckpointError(
            f"{source_path} is a DeepSpeed checkpoint, which does not say what model it is of; give --config with a "
            "run's YAML file whose model section has its sizes"
        )
    source = _open(tag_directory(source_path), load_config(config, list(overrides)), str(config))
    check_target(to, [source], overwrite=overwrite)
    level = resolve_levels(source.config)[0]
    for parameter in parameters(level.shape):
        source.check(parameter)
    trained = source.trained_padding()
    origin = {"verb": "convert", "deepspeed": origin_of(source), "counters": source.state["counters"]}
    _store(source, level, to, {**origin, "trained_padding": trained}, advance)
    return "\n".join(_lines(source, level, to, trained))


def to_universal(
    source_path: Path, to: Path, *, overrides: Sequence[str] = (), overwrite: bool = False,
    advance: Advance = lambda done, total: None,
) -> str:  # fmt: skip
    """Convert a checkpoint of ours to DeepSpeed's universal layout; memory holds one parameter.

    Args:
        source_path: a checkpoint, a run directory, or RUN@STEP.
        to: directory to write.
        overrides: of the recorded configuration, where the engine that is to load it differs
            (``training.zero_stage=1``, ``model.tensor_parallel=2``, ``deepspeed.zero_optimization...``).
        overwrite: replace a universal checkpoint that is there.
        advance: told of the elements done and to do.

    Returns:
        What was written, in words.

    Raises:
        UserError: DeepSpeed would load it wrongly, or it lacks parameters; nothing is written.
    """
    _require_alone()
    with open_checkpoint(locate_checkpoint(source_path)) as source:
        check_target(to, [source], overwrite=overwrite, form="deepspeed-universal")
        held = recorded(source)
        config = parse_config(
            held.config.model_dump(mode="json"), source="the recorded configuration", overrides=overrides
        )
        level = resolve_levels(config)[held.level.index - 1]
        require_shape(source, level.shape, whose="the configuration of the engine that loads it")
        _require_loadable(source, config, level)
        export = UniversalExport(
            shape=level.shape, keys=_keys(source, level.shape), adam_step=int(source.state.get("adam_step", 0)),
            counters=_counters(source.state), tp=level.tensor_parallel,
        )  # fmt: skip
        write_universal(to, export, lambda parameter, key: _whole(source, parameter, key), advance)
    moments = f"Adam's moments of step {export.adam_step:,}" if len(export.keys) > 1 else "no moments"
    return (
        f"written: {to} ({export.tag}): level {level.index} of {source.directory}, {moments}\n"
        f'DeepSpeed loads it with engine.load_checkpoint("{to}", load_lr_scheduler_states=False) under ZeRO 1 or 2, '
        'any TP and any number of ranks, where its configuration has "checkpoint": {"load_universal": true}\n'
        f"the vocabulary is that of {level.shape.vocab_size:,} tokens; DeepSpeed pads it with zeros, so the model must "
        "mask the logits of pad rows, as ours does"
    )


Source = NativeSource | UniversalSource


def _open(directory: Path, config: RunConfig, whose: str) -> Source:
    try:
        return (UniversalSource if is_universal(directory) else open_native)(directory, config, whose)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # values of other kinds than DeepSpeed writes
        raise CheckpointError(
            f"{directory} is malformed ({type(error).__name__}: {error}); copy it again, or save it with DeepSpeed "
            "0.19.8"
        ) from error


def _store(source: Source, level: Level, to: Path, origin: dict[str, Any], advance: Advance) -> None:
    table = parameters(level.shape)
    fragments = [
        AnnouncedFragment(parameter=parameter, start=0, length=_real(parameter), keys=source.keys)
        for parameter in table
    ]
    made = _counted((_whole(source, p, key) for p in table for key in source.keys), fragments, advance)
    save_written(
        to, lambda staging, identity: write_streamed(staging, identity, 0, fragments, made),
        state=state_of(source.config, level, source.state["adam_step"], origin), rank=0, world_size=1,
        gather=ALONE.gather, barrier=ALONE.barrier, alone=False,
    )  # fmt: skip


def _lines(source: Source, level: Level, to: Path, trained: Sequence[str]) -> Iterator[str]:
    step = source.state["adam_step"]
    moments = f"Adam's moments of step {step:,}" if step else "no moments"
    yield f"written: {to}: weights of {source.directory} ({source.layout}), {moments}"
    for name, held in source.held.items():
        if held.dims[0].pad:
            yield f"left out: rows {held.dims[0].real} to {held.dims[0].size} of {name}, padding of the vocabulary"
    if trained:
        yield (
            f"pad rows of {', '.join(trained)} were not zero: that model gave tokens that do not exist a share of the "
            "probability; here their logits are masked, so its loss is a little lower"
        )
    yield f"a run of this model starts from it with training.init_from={to}"


def _require_loadable(source: Checkpoint, config: RunConfig, level: Level) -> None:
    """Refuse what DeepSpeed would load without a word and wrongly."""
    if level.zero_stage not in (1, 2):
        key, what = _key(config, level, "zero_stage"), _UNLOADED if level.zero_stage == 0 else _STAGE_3
        raise CheckpointError(
            f"{key}={level.zero_stage}: DeepSpeed's load_universal {what}; load it under ZeRO 1 or 2, and say so with "
            f"{key}=1"
        )
    zero = config.deepspeed.get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        raise CheckpointError(
            "deepspeed.zero_optimization.round_robin_gradients=true: DeepSpeed's load_universal then puts one "
            "parameter's elements in another's place; load it without, and say so with "
            "deepspeed.zero_optimization.round_robin_gradients=false"
        )
    shape, tp = level.shape, level.tensor_parallel
    if tp > 1 and shape.padded_vocab == tp * shape.vocab_size:
        raise CheckpointError(
            f"model.vocab_size={shape.vocab_size} is padded to {shape.padded_vocab}, so a slice of TP {tp} has as many "
            "rows as the vocabulary, and DeepSpeed's load_universal takes it for the whole; load it under another "
            f"degree, and say so with {_key(config, level, 'tensor_parallel')}=1"
        )
    if trained := (source.state.get("origin") or {}).get("trained_padding"):
        raise CheckpointError(
            f"{source.directory} comes from a model whose padding of {', '.join(trained)} was trained, as its logits "
            "were not masked; DeepSpeed's load_universal would replace it by zeros, and the loss would change: train a "
            "run from it first (training.init_from), which masks them"
        )


def _key(config: RunConfig, level: Level, name: str) -> str:
    """Where the configuration sets a level's ZeRO stage or tensor-parallel degree."""
    own = level.index <= len(config.levels) and getattr(config.levels[level.index - 1], name) is not None
    section = "training" if name == "zero_stage" else "model"
    return f"levels.{level.index - 1}.{name}" if own else f"{section}.{name}"


_UNLOADED = "leaves the weights as they are without ZeRO"
_STAGE_3 = "of ZeRO 3 shifts all parameters after a padded vocabulary and cannot cut tensor-parallel slices"


def _keys(source: Checkpoint, shape: ModelShape) -> tuple[str, ...]:
    held = source.keys(parameters(shape)[0]) | {"master"}
    return tuple(key for key in ("master", "exp_avg", "exp_avg_sq") if key in held)


def _counters(state: Any) -> dict[str, int]:
    """DeepSpeed's counters: a run's, or those that came with the checkpoint it was converted from."""
    found = state.get("counters") or (state.get("origin") or {}).get("counters") or {}
    return {key: int(value) for key, value in found.items()}


def _whole(source: Source | Checkpoint, parameter: Parameter, key: str) -> Tensor:
    """A parameter without its pad rows."""
    flat = source.read(parameter, tp=1, tp_rank=0, start=0, length=_real(parameter), key=key)
    return flat.view(-1, *parameter.shape[1:])


def _real(parameter: Parameter) -> int:
    return parameter.numel // parameter.shape[0] * parameter.dims[0].real


def _counted(tensors: Iterator[Tensor], fragments: Sequence[AnnouncedFragment], advance: Advance) -> Iterator[Tensor]:
    total, done = sum(fragment.length * len(fragment.keys) for fragment in fragments), 0
    for tensor in tensors:
        yield tensor.reshape(-1)
        done += tensor.numel()
        advance(done, total)


def _require_alone() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CheckpointError("ds-vcycle convert to or from DeepSpeed is the work of one process: no launcher")
