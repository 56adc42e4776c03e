"""What a checkpoint says about the model in it: where it is, its configuration, its level, its shape. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_vcycle.checkpoint.manifest import MANIFEST, CheckpointError
from ds_vcycle.checkpoint.retention import checkpoint_names, find_latest, settled
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import Level, ModelShape, resolve_levels
from ds_vcycle.schema import parameters

if TYPE_CHECKING:
    from ds_vcycle.checkpoint.source import WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The configuration a checkpoint was written under, and which of its levels it holds."""

    config: RunConfig
    level: Level


def locate_checkpoint(path: Path) -> Path:
    """The checkpoint a user means.

    Args:
        path: a checkpoint directory itself; a run directory or its checkpoints/ (the latest); or RUN@STEP, where STEP
            is a number of steps or a checkpoint's name: ``runs/mine@2000``, ``runs/mine@step-00002000-phase-03``.

    Raises:
        CheckpointError: it is none of these; or RUN has no or several such checkpoints, which are named.
    """
    if (settled(path) / MANIFEST).is_file():
        return settled(path)
    for root in _roots(path):
        latest = find_latest(root)
        if latest is not None:
            return latest
    run, at, wanted = str(path).rpartition("@")
    if at and "/" not in wanted and not path.exists():
        return _of_run(Path(run), wanted)
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a Hugging Face directory; make a checkpoint of it with ds-vcycle convert --from {path} --to DIR"
            " (without --tp, --dp and --zero)"
        )
    what = "holds no checkpoint" if path.is_dir() else "is a file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {what}; give a checkpoint directory (RUN/checkpoints/step-..., or one written by ds-vcycle coalesce), "
        "a run directory, or RUN@STEP (ds-vcycle convert makes one of a Hugging Face or DeepSpeed directory)"
    )


def _of_run(run: Path, wanted: str) -> Path:
    """The checkpoint ``wanted`` of a run: a name, or the one of so many steps."""
    names = sorted({name for root in _roots(run) if root.is_dir() for name in checkpoint_names(root)})
    prefix = f"step-{int(wanted):08d}" if wanted.isdecimal() else None
    found = [name for name in names if name == wanted or (prefix and name.partition("-phase")[0] == prefix)]
    if len(found) != 1:
        count = f"{len(found)} checkpoints" if found else "no checkpoint"
        choice = ", ".join(found or names) or "none"
        raise CheckpointError(f"{run}@{wanted}: {run} has {count} of that step; give one by its name, of: {choice}")
    return next(settled(root / found[0]) for root in _roots(run) if settled(root / found[0]).is_dir())


def _roots(run: Path) -> tuple[Path, Path]:
    return run / "checkpoints", run


def recorded(checkpoint: WeightSource) -> Recorded:
    """What a checkpoint of a run, or of ``ds-vcycle coalesce`` or ``refine``, records about its model.

    Raises:
        CheckpointError: it records nothing, as a parked level's does not.
    """
    state = checkpoint.state
    index = state["position"]["level"] if "position" in state else state.get("level")
    if "config" not in state or index is None:
        raise CheckpointError(
            f"{checkpoint.directory} does not say which level of which model it holds (a parked level?); give a run's "
            "step-... checkpoint, or one written by ds-vcycle coalesce or refine"
        )
    config = parse_config(state["config"], source=str(checkpoint.directory))
    return Recorded(config=config, level=resolve_levels(config)[index - 1])


def incomplete(directory: Path, error: Exception) -> CheckpointError:
    """The error for a manifest whose checksum is right and whose record lacks what a run records; ``error``: how."""
    return CheckpointError(f"{directory}: what the run recorded is incomplete ({error!r}); use another checkpoint")


def require_shape(checkpoint: WeightSource, shape: ModelShape, *, whose: str, partly: bool = False) -> None:
    """The checkpoint holds a model of this shape; the vocabulary's padding does not count.

    Args:
        checkpoint: open.
        shape: that is wanted.
        whose: it is, for the message.
        partly: heads that the checkpoint records as missing may be.

    Raises:
        CheckpointError: names the first size or parameter that differs.
    """
    if "config" in checkpoint.state:
        held = recorded(checkpoint).level.shape
        for key in (field.name for field in fields(ModelShape) if field.name != "padded_vocab"):
            mine, wanted = getattr(held, key), getattr(shape, key)
            if mine != wanted:
                raise CheckpointError(
                    f"{checkpoint.directory} holds a model with {key}={_text(mine)}, {whose} has {_text(wanted)}; "
                    "give the checkpoint of such a model, or change the configuration"
                )
    missing = missing_parameters(checkpoint)
    if missing and not partly:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}, which the "
            "Hugging Face model had not either; train a run from it first (training.init_from), which takes them from "
            "its seed"
        )
    checkpoint.expect(parameter for parameter in parameters(shape) if parameter.name not in missing)


def missing_parameters(checkpoint: WeightSource) -> tuple[str, ...]:
    """The heads' parameters that the Hugging Face model a checkpoint was converted from did not have."""
    return tuple(checkpoint.state.get("missing", ()))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
