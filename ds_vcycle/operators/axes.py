"""How the axes of two adjacent levels map onto each other, and whether de-coalescing loses anything.

All that ``ds-vcycle plan`` says of a transition, from two shapes and the policies. Imports neither torch nor numpy: the
answer must not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_vcycle.config import OperatorsConfig
from ds_vcycle.levels import Level, ModelShape
from ds_vcycle.operators.maps import AxisMap, PlanError, axis_map


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPlan:
    """The map of each axis, whether de-coalescing keeps the coarse model's function, and if not, why."""

    axes: Mapping[str, AxisMap]
    lossless: bool
    notes: tuple[str, ...]


def plan_axes(fine: Level, coarse: Level, operators: OperatorsConfig) -> AxisPlan:
    """Map the axes of two adjacent levels (see :func:`ds_vcycle.operators.plan.plan_transition`).

    Raises:
        PlanError: shapes that cannot be mapped, a grouping that is no partition, or a policy refused for the model.
    """
    _check_shapes(fine.shape, coarse.shape)
    axes = _axis_maps(fine, coarse)
    pre = fine.shape.norm_placement == "pre"
    if pre and operators.embedding == "reference" and not fine.shape.tied_embeddings and axes["hidden"].merges:
        raise PlanError(
            "operators.embedding=reference with model.tied_embeddings=false on a pre-LN model: nothing would undo the "
            "scaling of the embeddings; use operators.embedding=lossless"
        )
    if not pre and operators.depth_residual == "split" and axes["layer"].merges:
        raise PlanError(
            "operators.depth_residual=split on a post-LN model (model.norm_placement=post): the norm after each branch "
            "acts again in every copied layer, however little a branch adds; use operators.depth_residual=first or copy"
        )
    notes = _losses(axes, operators, pre=pre)
    return AxisPlan(axes=axes, lossless=not notes, notes=notes)


def _check_shapes(fine: ModelShape, coarse: ModelShape) -> None:
    mapped = {"layers", "hidden", "heads", "kv_groups", "ffn"}
    for key in ModelShape.__dataclass_fields__:
        a, b = getattr(fine, key), getattr(coarse, key)
        if key not in mapped and a != b:
            raise PlanError(f"{key} differs between the levels ({a} and {b}); it must be the same at every level")
        if key in mapped and b > a:
            raise PlanError(
                f"{key}={b} of the coarse level exceeds the fine level's {a}; make the coarse level smaller"
            )
    if fine.heads_per_group != coarse.heads_per_group:
        raise PlanError(
            f"query heads per KV group differ between the levels ({fine.heads_per_group}, {coarse.heads_per_group}); "
            f"whole KV groups are mapped, so change heads and kv_groups together"
        )


def _axis_maps(fine: Level, coarse: Level) -> dict[str, AxisMap]:
    groupings, tp = coarse.groupings, fine.tensor_parallel
    a, b = fine.shape, coarse.shape
    try:
        return {
            "layer": axis_map("layer", fine=a.layers, coarse=b.layers, grouping=groupings.layer),
            "hidden": axis_map("hidden", fine=a.hidden, coarse=b.hidden, grouping=groupings.hidden),
            "head": axis_map("head", fine=a.kv_groups, coarse=b.kv_groups, grouping=groupings.head, chunks=tp),
            "ffn": axis_map("ffn", fine=a.ffn, coarse=b.ffn, grouping=groupings.ffn, chunks=tp),
        }
    except PlanError as error:
        raise PlanError(
            f"level {fine.index} to {coarse.index}: operators.{error} (for these levels alone: "
            f"levels.{coarse.index - 1}.groupings)"
        ) from error


def _losses(axes: Mapping[str, AxisMap], operators: OperatorsConfig, *, pre: bool) -> tuple[str, ...]:
    """Why de-coalescing changes the coarse model's function; nothing if it keeps it."""
    notes, policy = [], operators.depth_residual
    if pre and axes["hidden"].merges and operators.embedding == "reference":
        notes.append("embedding=reference changes the logits of a pre-LN model; lossless keeps them")
    if len(set(axes["hidden"].sizes)) > 1:
        notes.append("unequal hidden groups change the norms' mean and variance")
    if axes["layer"].merges and policy == "copy":
        notes.append("depth_residual=copy adds each copied layer's output again; first keeps the function")
    if axes["layer"].merges and policy == "split":
        notes.append("depth_residual=split keeps the function to first order only; first keeps it")
    if not pre and axes["layer"].merges and policy == "first" and not axes["layer"].neighbouring:
        notes.append("depth_residual=first keeps a post-LN model's function for groups of neighbouring layers only")
    if not axes["layer"].keeps_order:
        notes.append("groupings.layer puts the coarse layers in another order; let the groups' first layers ascend")
    return tuple(notes)
