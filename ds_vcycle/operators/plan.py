"""The plan of one transition: for every coarse parameter its fine children and the map of each dim. No torch.

A parameter's map is the product of its dims' maps, times what the depth policy says about the ``layer`` axis.
The plan is the same whatever the layout; ``apply`` runs it on whole tensors, ``sharding.transfer`` on fragments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ds_vcycle.config import DepthPolicy, OperatorsConfig
from ds_vcycle.levels import Level
from ds_vcycle.operators.axes import plan_axes
from ds_vcycle.operators.maps import AxisMap
from ds_vcycle.schema import Dim, Parameter, Role, parameters

Index = npt.NDArray[np.int64]
_DEFAULTS = OperatorsConfig()


@dataclass(frozen=True, kw_only=True, eq=False)
class DimMap:
    """One dim: ``parent[fine row] = coarse row``; ``sizes[coarse row]`` fine rows share it. Pad rows are left out."""

    role: Role
    parent: Index
    sizes: Index


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """A fine parameter and how it reads its coarse parent along the ``layer`` axis when de-coalescing.

    ``up_divisor``: 1, or the layer group's size. ``constant``: what it gets instead of a coarse value (policy
    ``first``), None where it reads one. ``sums_down``: whether coalescing reads it.
    ``moment_zero``: its first moment starts at zero (policy ``first``: all layers of a group but the one that reads).
    """

    parameter: Parameter
    up_divisor: int
    constant: float | None
    sums_down: bool
    moment_zero: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterMap:
    """One coarse parameter, its children in layer order, and the map of each dim.

    ``down_divisor``: the layer group's size where coalescing takes the mean along ``layer``, else 1.
    ``moment_divisor``: the ``layer`` part of k in m/k, v/k^2 when Adam's moments are mapped up.
    """

    coarse: Parameter
    children: tuple[Child, ...]
    dims: tuple[DimMap, ...]
    down_divisor: int
    moment_divisor: int

    def divisors(self, role: Role) -> tuple[Index, ...]:
        """Per dim an integer for each coarse index: the group size where the dim has ``role``, else one."""
        return tuple(dim.sizes if dim.role == role else np.ones_like(dim.sizes) for dim in self.dims)


@dataclass(frozen=True, kw_only=True)
class TransitionPlan:
    """How the parameters of two adjacent levels map onto each other."""

    fine: Level
    coarse: Level
    axes: Mapping[str, AxisMap]
    maps: tuple[ParameterMap, ...]
    lossless: bool
    notes: tuple[str, ...]


def plan_transition(fine: Level, coarse: Level, operators: OperatorsConfig = _DEFAULTS) -> TransitionPlan:
    """Plan the transition between two adjacent levels (both directions use the same plan).

    Args:
        fine: the larger level.
        coarse: the smaller one, whose groupings hold.
        operators: whose policies hold; the blend and the moments do not matter here.

    Raises:
        PlanError: shapes that cannot be mapped, a grouping that is no partition, or a policy refused for the model.
    """
    mapping = plan_axes(fine, coarse, operators)
    axes = mapping.axes
    fine_by_template: dict[str, list[Parameter]] = {}
    for parameter in parameters(fine.shape, operators.embedding):
        fine_by_template.setdefault(parameter.template, []).append(parameter)
    layer_groups = axes["layer"].groups
    maps = []
    for target in parameters(coarse.shape, operators.embedding):
        members = layer_groups[target.layer] if target.layer is not None else (0,)
        children = [fine_by_template[target.template][member] for member in members]
        maps.append(_parameter_map(target, children, axes, operators.depth_residual))
    mapped = sum(len(item.children) for item in maps)
    assert mapped == sum(map(len, fine_by_template.values())), "a fine parameter has no coarse parent"
    return TransitionPlan(
        fine=fine, coarse=coarse, axes=axes, maps=tuple(maps), lossless=mapping.lossless, notes=mapping.notes
    )


def _parameter_map(
    target: Parameter, children: list[Parameter], axes: Mapping[str, AxisMap], policy: DepthPolicy
) -> ParameterMap:
    """A coarse parameter's map.

    Under ``first`` one layer of a group reads some parameters alone. Residual writers: the first layer, the others get
    zero, and all are summed going down. Norms after the branches of post-LN layers: the norm after attention is the
    first layer's, the norm after the MLP the last layer's, going down too; the others get weight 1 and bias 0, so that
    what follows the group's one working layer norms what is normed already. Adam's moments: the layer that reads takes
    the coarse ones, the others m = 0 and the same v.
    """
    dims = tuple(_dim_map(a, b, axes.get(a.axis)) for a, b in zip(children[0].dims, target.dims, strict=True))
    members = len(children)
    consumes_layer = target.residual_writer and policy != "copy"
    reader = _only_reader(target, members) if policy == "first" else None
    down = 1 if consumes_layer or reader is not None else members
    up = members if consumes_layer and policy == "split" else 1
    constant = 1.0 if target.initial == "one" else 0.0
    return ParameterMap(
        coarse=target,
        children=tuple(
            Child(
                parameter=child,
                up_divisor=up,
                constant=None if reader in (None, position) else constant,
                sums_down=target.residual_writer or reader in (None, position),
                moment_zero=policy == "first" and position != (reader or 0),
            )
            for position, child in enumerate(children)
        ),
        dims=dims,
        down_divisor=down,
        moment_divisor=1 if policy == "first" else down,
    )


def _only_reader(target: Parameter, members: int) -> int | None:
    """Under ``first`` the position in its group of the layer that alone reads the parameter; None if all do."""
    if target.normed_branch == "mlp":
        return members - 1
    return 0 if target.residual_writer or target.normed_branch == "attention" else None


@lru_cache(maxsize=256)  # layer after layer asks for the same maps
def _dim_map(fine: Dim, coarse: Dim, axis: AxisMap | None) -> DimMap:
    """Rows (part, index, offset) -> (part, parent[index], offset); without a map, rows to themselves."""
    assert (fine.parts, fine.block, fine.role) == (coarse.parts, coarse.block, coarse.role)
    if axis is None:
        assert fine.length == coarse.length
        return DimMap(role=fine.role, parent=np.arange(fine.real), sizes=np.ones(fine.real, dtype=np.int64))
    part, index, offset = np.ix_(np.arange(fine.parts), np.asarray(axis.parent, dtype=np.int64), np.arange(fine.block))
    parent = ((part * coarse.length + index) * fine.block + offset).reshape(-1)
    sizes = np.tile(np.repeat(np.asarray(axis.sizes, dtype=np.int64), fine.block), fine.parts)
    return DimMap(role=fine.role, parent=parent, sizes=sizes)
