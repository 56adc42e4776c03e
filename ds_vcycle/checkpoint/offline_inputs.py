"""What an offline verb is given: the checkpoints, the configuration that both levels belong to, where to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ds_vcycle.checkpoint.deepspeed.files import LATEST_UNIVERSAL
from ds_vcycle.checkpoint.huggingface.directory import is_huggingface
from ds_vcycle.checkpoint.huggingface.reading import HuggingFaceSource, open_huggingface
from ds_vcycle.checkpoint.huggingface.settings import CONFIG
from ds_vcycle.checkpoint.manifest import MANIFEST, CheckpointError
from ds_vcycle.checkpoint.reader import Checkpoint, open_checkpoint
from ds_vcycle.checkpoint.recorded import locate_checkpoint, recorded, require_shape
from ds_vcycle.checkpoint.retention import LATEST, settled
from ds_vcycle.checkpoint.source import WeightSource
from ds_vcycle.config import ConfigError, RunConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.plan import TransitionPlan, plan_transition
from ds_vcycle.yaml_tree import TreeError, apply_override

Form = Literal["store", "huggingface"]
Source = Checkpoint | HuggingFaceSource
WrittenForm = Literal["store", "huggingface", "deepspeed-universal"]
_MARKS: dict[WrittenForm, str] = {"store": MANIFEST, "huggingface": CONFIG, "deepspeed-universal": LATEST_UNIVERSAL}
_NAMES: dict[WrittenForm, str] = {
    "store": "checkpoint", "huggingface": "Hugging Face directory",
    "deepspeed-universal": "universal DeepSpeed checkpoint",
}  # fmt: skip


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


def form_of(source: Source) -> Form:
    """The form a source is stored in."""
    return "huggingface" if isinstance(source, HuggingFaceSource) else "store"


def tokenizer_directories(source: Source, config: RunConfig) -> list[Path]:
    """Where the tokenizer of a model may lie: beside a Hugging Face model, or in the corpora it was trained on."""
    own = [source.directory.resolve()] if isinstance(source, HuggingFaceSource) else []
    return list(dict.fromkeys([*own, *(corpus.path.resolve() for corpus in config.data.blend)]))


def check_target(to: Path, sources: Sequence[WeightSource], *, overwrite: bool, form: WrittenForm = "store") -> None:
    """Refuse to write where something is that must stay.

    Args:
        to: directory to write.
        sources: what is read.
        overwrite: replace what is there, if it has the form that is written.
        form: that is written.

    Raises:
        CheckpointError: names ``--to`` and what is there.
    """
    if (to.parent / LATEST).is_file():
        raise CheckpointError(
            f"--to {to} lies among a run's checkpoints, which come and go; give a directory elsewhere"
        )
    if not to.exists():
        return
    if any(to.resolve() == source.directory.resolve() for source in sources):
        raise CheckpointError(f"--to {to} is the checkpoint that is read; give another directory")
    if not overwrite:
        raise CheckpointError(f"--to {to} exists; give another directory, or replace it with --overwrite")
    if not to.is_dir() or (any(to.iterdir()) and not (to / _MARKS[form]).is_file()):
        raise CheckpointError(f"--to {to} is no {_NAMES[form]}, so --overwrite leaves it alone; give another directory")


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
        ConfigError: an override that does not fit, or a level that cannot be had.
    """
    tree = config.model_dump(mode="json")
    if config.cycle.visited <= index:
        tree["cycle"] = {"kind": "V", "levels": index + 1}
    tree["levels"] += [{} for _ in range(index + 1 - len(tree["levels"]))]
    if sizes is not None:
        tree["levels"][index] |= sizes
    try:
        for override in overrides:
            apply_override(tree, override)
    except TreeError as error:
        raise ConfigError(str(error)) from error
    return parse_config(tree, source="the recorded configuration" + (" and overrides" if overrides else ""))


def both_levels(fine: WeightSource, coarse: WeightSource, overrides: Sequence[str]) -> tuple[RunConfig, int]:
    """The configuration that both levels belong to, and the fine one's index.

    It is the coarse checkpoint's where that has both levels, else the fine one's with the coarse model's sizes.

    Raises:
        UserError: the coarse model is the larger one, an override does not fit, or the level cannot be had.
    """
    large, small = recorded(fine), recorded(coarse)
    index = large.level.index
    if small.level.index == index + 1:
        return two_levels(small.config, index, overrides), index
    sizes = {key: getattr(small.level.shape, key) for key in ("layers", "hidden", "heads", "kv_groups", "ffn")}
    for key, size in sizes.items():
        if size > getattr(large.level.shape, key):
            raise CheckpointError(
                f"--coarse {coarse.directory} has {key}={size}, more than the {getattr(large.level.shape, key)} of "
                f"--fine {fine.directory}; give the larger model as --fine and the smaller one as --coarse"
            )
    return two_levels(large.config, index, overrides, sizes), index


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
