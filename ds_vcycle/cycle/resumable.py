"""What of a run's configuration may change when it is resumed, and the refusal of all that may not."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ds_vcycle.checkpoint.recorded import incomplete
from ds_vcycle.checkpoint.store import Checkpoint, CheckpointError
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.cycle.phases import Coalesce, Phase, Refine, first_difference, from_records
from ds_vcycle.cycle.position import position_from
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.axes import plan_axes
from ds_vcycle.train.deepspeed_config import MONITORS

# As patterns of dotted keys: where and what is written, and how the ranks share the work
_FREE = (
    "run_dir", "preset", "evaluation.*", "saving.*", "logging.*", "*.zero_stage", "*.micro_batch",
    "model.tensor_parallel", "levels.*.tensor_parallel", "cycle.park", "operators.kernels", "deepspeed.log_level",
    "training.rank_timeout_seconds",
    *(f"deepspeed.{monitor}.*" for monitor in MONITORS),
)  # fmt: skip


def check_resumable(checkpoint: Checkpoint, config: RunConfig, phases: Sequence[Phase]) -> None:
    """Refuse to go on under another configuration than the checkpoint's.

    A key that the checkpoint's version did not have yet has its default there.

    Raises:
        CheckpointError: names the first key or phase that differs, both values, and the remedy.
        ConfigError: the checkpoint records a key that this version does not have.
    """
    state = checkpoint.state
    if "position" not in state:
        raise CheckpointError(
            f"{checkpoint.directory} is no checkpoint of a run, so there is nothing to go on with; resume from a run's "
            f"step-... checkpoint, or start a run from its weights with training.init_from={checkpoint.directory}"
        )
    remedy = (
        f"resume with the configuration it was saved with, or start anew with another run_dir than {config.run_dir}"
    )
    _check_whole(checkpoint)
    difference = first_difference(from_records(state["phases"]), phases)
    if difference:
        raise CheckpointError(f"{checkpoint.directory}: {difference}; {remedy}")
    recorded = parse_config(state["config"], source=str(checkpoint.directory))
    before, wanted = (_flat(tree.model_dump(mode="json")) for tree in (recorded, config))
    for key in sorted(before.keys() | wanted.keys()):
        if before.get(key) != wanted.get(key) and not any(fnmatchcase(key, pattern) for pattern in _FREE):
            raise CheckpointError(
                f"{checkpoint.directory}: {key} is {before.get(key)!r} in the run and {wanted.get(key)!r} in the "
                f"configuration; {remedy}"
            )
    _check_groups(checkpoint, recorded, config, phases)


def _check_whole(checkpoint: Checkpoint) -> None:
    """All of a run's state is recorded; a checksum says only that the manifest is as it was written."""
    state = checkpoint.state
    try:
        position_from(state["position"])
        from_records(state["phases"])
        for key in ("config", "counters", "adam_step"):
            _ = state[key]
    except (LookupError, TypeError, AttributeError) as error:
        raise incomplete(checkpoint.directory, error) from error


def _check_groups(checkpoint: Checkpoint, recorded: RunConfig, config: RunConfig, phases: Sequence[Phase]) -> None:
    """Refuse another tensor-parallel degree where ``local_stack`` would then group other indices together."""
    before, after = resolve_levels(recorded), resolve_levels(config)
    by_groups = {phase.fine for phase in phases if isinstance(phase, Coalesce | Refine)}  # the growth methods have none
    for index in sorted(by_groups):
        maps = [plan_axes(levels[index - 1], levels[index], config.operators).axes for levels in (before, after)]
        for axis in maps[0]:
            if maps[0][axis] != maps[1][axis]:
                was, now = before[index - 1].tensor_parallel, after[index - 1].tensor_parallel
                raise CheckpointError(
                    f"{checkpoint.directory}: groupings.{axis}=local_stack of level {index + 1} stacks within each of "
                    f"the tensor-parallel ranks of level {index}, {was} in the run and {now} in the configuration; "
                    f"resume with tensor_parallel={was} at level {index} (model.tensor_parallel or "
                    f"levels.{index - 1}.tensor_parallel)"
                )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested tree as dotted keys, sections in a list by their index; an empty section has none."""
    if isinstance(tree, list) and all(isinstance(value, dict) for value in tree):
        tree = dict(enumerate(tree))
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): tree}
