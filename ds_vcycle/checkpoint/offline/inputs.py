"""What an offline verb is given: the checkpoints, the configuration that both levels belong to, where to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ds_vcycle.checkpoint.huggingface.directory import is_huggingface
from ds_vcycle.checkpoint.huggingface.reading import HuggingFaceSource, open_huggingface
from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.checkpoint.reader import Checkpoint, open_checkpoint
from ds_vcycle.checkpoint.recorded import Recorded, locate_checkpoint, recorded, require_shape
from ds_vcycle.checkpoint.retention import settled
from ds_vcycle.checkpoint.source import WeightSource
from ds_vcycle.config import ConfigError, GroupingsConfig, RunConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.plan import TransitionPlan, plan_transition

Form = Literal["store", "huggingface"]
Source = Checkpoint | HuggingFaceSource
_SIZES = ("layers", "hidden", "heads", "kv_groups", "ffn")


def open_source(path: Path, *, config: Path | None, overrides: Sequence[str]) -> Source:
    """Open what an offline verb reads: a checkpoint, a run's, or a Hugging Face directory.

    Args:
        path: as the user gave it.
        config: a run's YAML file, for a Hugging Face directory, which records none.
        overrides: of the configuration a Hugging Face model is recorded with.

    Raises:
        UserError: it is none of these, or damaged; or a configuration is given for a checkpoint that has its own.
    """
    if is_huggingface(settled(path)):
        return open_huggingface(settled(path), config=config, overrides=overrides)
    found = locate_checkpoint(path)
    if config is not None:
        raise CheckpointError(
            f"--config {config}: {found} records its own configuration; change that with overrides (key=value)"
        )
    return open_checkpoint(found)


def of_model(overrides: Sequence[str]) -> list[str]:
    """The overrides of the model section; those of further levels fit only a configuration that has them."""
    return [override for override in overrides if override.startswith("model.")]


def of_maps(overrides: Sequence[str], *sources: Source) -> list[str]:
    """The overrides of levels and policies: all, but those that a Hugging Face model was opened with."""
    opened = of_model(overrides) if any(form_of(source) == "huggingface" for source in sources) else []
    return [override for override in overrides if override not in opened]


def form_of(source: Source) -> Form:
    """The form a source is stored in."""
    return "huggingface" if isinstance(source, HuggingFaceSource) else "store"


def tokenizer_directories(source: Source, config: RunConfig) -> list[Path]:
    """Where the tokenizer of a model may lie: beside a Hugging Face model, or in the corpora it was trained on."""
    own = [source.directory.resolve()] if isinstance(source, HuggingFaceSource) else []
    return list(dict.fromkeys([*own, *(corpus.path.resolve() for corpus in config.data.blend)]))


def two_levels(
    config: RunConfig, index: int, overrides: Sequence[str], sizes: Mapping[str, int] | None = None
) -> RunConfig:
    """A recorded configuration that has level ``index`` + 1, with overrides; by default it halves level ``index``.

    Args:
        config: as recorded; a flat run's has one level.
        index: of the fine level.
        overrides: as on the command line.
        sizes: of the coarse level, if they are known.

    Raises:
        ConfigError: an override that does not fit or is not of operators or levels, or a level that cannot be had.
    """
    for override in overrides:
        key, assigned, _ = override.partition("=")
        if assigned and key.split(".")[0] not in ("operators", "levels"):
            raise ConfigError(f"{override} changes no level and no map; give overrides of operators and levels only")
    tree = config.model_dump(mode="json")
    if config.cycle.visited <= index:
        tree["cycle"] = {"kind": "V", "levels": index + 1}
        tree["levels"] = tree["levels"][: index + 1]  # a flat run may be of a file with more levels
    tree["levels"] += [{} for _ in range(index + 1 - len(tree["levels"]))]
    if sizes is not None:
        tree["levels"][index] |= sizes
    return parse_config(tree, source="the recorded configuration", overrides=overrides)


def both_levels(fine: WeightSource, coarse: WeightSource, overrides: Sequence[str]) -> tuple[RunConfig, int]:
    """The configuration that both levels belong to, and the fine one's index.

    It is the one the coarse model was coalesced under, where the coarse checkpoint has both levels or the checkpoint
    that its run began from does, if that is still there; else the fine one's with the coarse model's sizes.

    Raises:
        UserError: the coarse model is the larger one, an override does not fit or would map otherwise than the coarse
            model was coalesced, or the level cannot be had.
    """
    large, small = recorded(fine), recorded(coarse)
    index = large.level.index
    coalesced = _coalesced_under(small, index)
    if coalesced is not None:
        config = two_levels(coalesced, index, overrides)
        _same_maps(config, coalesced, index, coarse.directory)
        return config, index
    _require_smaller(fine, coarse)
    sizes = {key: getattr(small.level.shape, key) for key in _SIZES}
    config = two_levels(large.config, index, overrides, sizes)
    for axis in ("head", "ffn"):
        if getattr(resolve_levels(config)[index].groupings, axis) == "local_stack":
            raise CheckpointError(
                f"groupings.{axis}=local_stack depends on the tensor-parallel degree at which --coarse "
                f"{coarse.directory} was coalesced, and the checkpoint that its run began from is not there any more; "
                "put it back, or give the groups as lists"
            )
    return config, index


def _require_smaller(fine: WeightSource, coarse: WeightSource) -> None:
    """The coarse model is not the fine one, no larger, and no level further down."""
    large, small = recorded(fine), recorded(coarse)
    remedy = "give the larger model as --fine and the smaller one, of the level below, as --coarse"
    for key in _SIZES:
        size, limit = getattr(small.level.shape, key), getattr(large.level.shape, key)
        if size > limit:
            raise CheckpointError(
                f"--coarse {coarse.directory} has {key}={size}, more than the {limit} of --fine {fine.directory}; "
                f"{remedy}"
            )
    if small.level.index not in (1, large.level.index + 1):
        raise CheckpointError(
            f"--coarse {coarse.directory} is level {small.level.index} and --fine {fine.directory} level "
            f"{large.level.index}; {remedy}"
        )
    if all(getattr(small.level.shape, key) == getattr(large.level.shape, key) for key in _SIZES):
        raise CheckpointError(
            f"--coarse {coarse.directory} is as large as --fine {fine.directory}; {remedy} (RUN@STEP is another "
            "checkpoint of a run than its latest)"
        )


def _coalesced_under(small: Recorded, index: int) -> RunConfig | None:
    """The configuration of the transition from level ``index`` that a coarse model came from, if it can be known."""
    if small.level.index == index + 1:
        return small.config
    start = small.config.training.init_from
    if start is None or is_huggingface(settled(start)):
        return None
    try:
        with open_checkpoint(locate_checkpoint(start)) as held:
            began = recorded(held)
    except CheckpointError:
        return None  # gone meanwhile: it is not needed, what it says can be given as overrides
    same = replace(began.level.shape, padded_vocab=0) == replace(small.level.shape, padded_vocab=0)
    return began.config if same and began.level.index == index + 1 else None


def _same_maps(config: RunConfig, coalesced: RunConfig, index: int, directory: Path) -> None:
    """A model goes up as it came down: the overrides leave the policies and groupings alone."""
    groupings = (resolve_levels(each)[index].groupings for each in (config, coalesced))
    pairs = {
        "operators.embedding": (config.operators.embedding, coalesced.operators.embedding),
        "operators.depth_residual": (config.operators.depth_residual, coalesced.operators.depth_residual),
        f"levels.{index}.groupings": tuple(groupings),
    }
    for key, (given, before) in pairs.items():
        if given != before:
            raise CheckpointError(
                f"{key} is {_plain(given)} here, but --coarse {directory} was coalesced under {_plain(before)}; leave "
                "it as it was"
            )


def _plain(value: str | GroupingsConfig) -> str:
    return value if isinstance(value, str) else str(value.model_dump())


def plan_between(
    config: RunConfig, index: int, *, fine: WeightSource, coarse: WeightSource | None = None
) -> TransitionPlan:
    """The transition between levels ``index`` and ``index`` + 1, which the checkpoints must hold.

    Raises:
        UserError: a checkpoint holds another model, or the two levels cannot be mapped.
    """
    levels = resolve_levels(config)
    require_shape(fine, levels[index - 1].shape, whose=f"level {index}")
    if coarse is not None:
        require_shape(coarse, levels[index].shape, whose=f"level {index + 1}")
    return plan_transition(levels[index - 1], levels[index], config.operators)
