"""Fine elements that are copies of a group's first member: filled from a second source, fragment by fragment.

Growth methods that are two gathers (baselines.growth.SecondSource) de-coalesce twice, from two sources, and take of the
second what is written here. No rank needs what another has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ds_vcycle.operators.plan import Child, DimMap, Index, ParameterMap, TransitionPlan
from ds_vcycle.sharding.geometry import Block, Geometry, blocks
from ds_vcycle.sharding.rectangles import index_tensor, view

Taken = Callable[[ParameterMap, Child, Block], tuple[Index, Index]]
"""Positions of the rows and of the columns of a block that are taken from the second source; either suffices."""


def from_next_layer(plan: TransitionPlan) -> TransitionPlan:
    """The plan with each layer's children reading the coarse layer after it; the last layer's read it as before."""
    by_place = {(item.coarse.template, item.coarse.layer): item.coarse for item in plan.maps}

    def source(item: ParameterMap) -> ParameterMap:
        if item.coarse.layer is None:
            return item
        return replace(item, coarse=by_place.get((item.coarse.template, item.coarse.layer + 1), item.coarse))

    return replace(plan, maps=tuple(source(item) for item in plan.maps))


@torch.no_grad()
def take(second: Mapping[str, Tensor], into: Mapping[str, Tensor], geometry: Geometry, rank: int, taken: Taken) -> None:
    """Overwrite in place what ``taken`` says of this rank's fine fragments with the same elements of ``second``.

    Args:
        second: this rank's flat fine fragments by parameter name, [length] each.
        into: the same fragments, written in place.
        geometry: whose plan the groups are of.
        rank: of this process.
        taken: which rows and columns of each block.
    """
    for item, child, block in _held(geometry, rank):
        name = child.parameter.name
        source, target = view(second[name], block), view(into[name], block)
        rows, cols = taken(item, child, block)
        for dim, positions in ((0, rows), (1, cols)):
            if len(positions):
                at = index_tensor(positions, target.device)
                target.index_copy_(dim, at, source.index_select(dim, at))


def new_outputs(item: ParameterMap, child: Child, block: Block) -> tuple[Index, Index]:
    """What produces a copied feature: of the layers' matrices and their biases, norms left out."""
    if child.parameter.layer is None or "layernorm" in child.parameter.template:
        return _NONE, _NONE
    return _copied(item.dims[0], block.rows), _copied(item.dims[1], block.cols) if len(item.dims) > 1 else _NONE


def new_layers(item: ParameterMap, child: Child, block: Block) -> tuple[Index, Index]:
    """All of the layers that are no group's first."""
    is_copy = child.parameter.layer is not None and child is not item.children[0]
    return (np.arange(len(block.rows)) if is_copy else _NONE), _NONE


_NONE: Index = np.zeros(0, dtype=np.int64)


def _copied(dim: DimMap, indices: Index) -> Index:
    """The positions of those indices that produce a feature and are not the first of their group."""
    if dim.role != "produces":
        return _NONE
    first = np.full(len(dim.sizes), len(dim.parent))
    np.minimum.at(first, dim.parent, np.arange(len(dim.parent)))
    return np.flatnonzero(first[dim.parent[indices]] != indices)


def _held(geometry: Geometry, rank: int) -> Iterator[tuple[ParameterMap, Child, Block]]:
    placements, layout = geometry.fine_placements(rank), geometry.fine
    for item in geometry.plan.maps:
        for child in item.children:
            placement = placements.get(child.parameter.name)
            for block in blocks(child.parameter, placement, layout.tp, layout.coordinates(rank)[1]):
                yield item, child, block
