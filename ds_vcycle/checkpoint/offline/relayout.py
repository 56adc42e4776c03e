"""The configuration of a run under another layout, and what of a layout a run in progress cannot change. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_vcycle.checkpoint.manifest import CheckpointError
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import Level, lowered_micro_batch, resolve_levels
from ds_vcycle.operators.maps import axis_map
from ds_vcycle.sharding.placement import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """What a user asks for: tensor-parallel degree, data-parallel ranks, ZeRO stage; None leaves it as it was."""

    tp: int | None = None
    dp: int | None = None
    zero_stage: int | None = None


def target_layout(target: TargetLayout, before: Layout) -> Layout:
    """The layout asked for, where ``before`` is the checkpoint's.

    Raises:
        CheckpointError: TP does not divide the ranks, which are to stay as many.
    """
    tp = target.tp or before.tp
    if target.dp is None and before.world_size % tp:
        raise CheckpointError(
            f"--tp {tp} does not divide the {before.world_size} ranks the checkpoint was saved by; give --dp too"
        )
    world = tp * (target.dp or before.world_size // tp)
    return Layout(
        world_size=world, tp=tp, zero_stage=before.zero_stage if target.zero_stage is None else target.zero_stage
    )


def relaid(config: RunConfig, layout: Layout, *, run_dir: Path, where: Path) -> RunConfig:
    """A run's configuration with one layout for all of its levels.

    Args:
        config: as it was recorded.
        layout: of all levels from now on.
        run_dir: where the run goes on.
        where: the checkpoint, for messages.

    Raises:
        UserError: a level cannot be split that way, or the levels' groupings would change under way.
    """
    tree = config.model_dump(mode="json")
    tree["model"]["tensor_parallel"], tree["training"]["zero_stage"] = layout.tp, layout.zero_stage
    tree["levels"] = [{**level, "tensor_parallel": None, "zero_stage": None} for level in tree["levels"]]
    tree["run_dir"] = str(run_dir)
    changed = parse_config(tree, source=f"{where} for TP {layout.tp}, ZeRO {layout.zero_stage}")
    for index, level in enumerate(resolve_levels(changed)):
        micro_batch = _micro_batch(level, layout, config.training.global_batch, where)
        if micro_batch != level.micro_batch:
            tree["levels"] += [{}] * (index + 1 - len(tree["levels"]))
            tree["levels"][index] = {**tree["levels"][index], "micro_batch": micro_batch}
    changed = parse_config(tree, source=f"{where} for TP {layout.tp}, ZeRO {layout.zero_stage}")
    before, after = resolve_levels(config), resolve_levels(changed)
    for fine, coarse, refined in zip(before, before[1:], after):
        for axis in ("head", "ffn"):
            if _grouping(axis, fine, coarse, fine.tensor_parallel) != _grouping(
                axis, fine, coarse, refined.tensor_parallel
            ):
                raise CheckpointError(
                    f"{where}: groupings.{axis}=local_stack of level {coarse.index} stacks within each of the "
                    f"{fine.tensor_parallel} tensor-parallel ranks of level {fine.index}: with --tp {layout.tp} other "
                    f"indices would be grouped in the midst of the run; keep --tp {fine.tensor_parallel}"
                )
    return changed


def lowered_micro_batches(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """What :func:`relaid` changed so that the global batch divides over the new ranks, in words."""
    pairs = zip(resolve_levels(before), resolve_levels(after))
    return tuple(
        f"level {old.index}: micro_batch {old.micro_batch} -> {new.micro_batch}"
        for old, new in pairs
        if old.micro_batch != new.micro_batch
    )


def _micro_batch(level: Level, layout: Layout, global_batch: int, where: Path) -> int:
    """The level's, or the largest below it that divides each data-parallel rank's share of the global batch."""
    dp = layout.world_size // layout.tp
    if global_batch % dp:
        raise CheckpointError(
            f"{where}: training.global_batch={global_batch} does not divide over {dp} data-parallel ranks, and a run "
            "keeps its global batch; give a --dp that divides it"
        )
    return lowered_micro_batch(level.micro_batch, global_batch // dp)


def _grouping(axis: str, fine: Level, coarse: Level, tp: int) -> object:
    key = {"head": "kv_groups", "ffn": "ffn"}[axis]
    sizes = {"fine": getattr(fine.shape, key), "coarse": getattr(coarse.shape, key)}
    return axis_map(axis, **sizes, grouping=getattr(coarse.groupings, axis), chunks=tp)
