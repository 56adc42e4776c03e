"""How many bytes each rank sends in a transition, and which maps stay within a rank. No torch.

Counted over the very pieces that :mod:`ds_vcycle.sharding.transfer` sends; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ds_vcycle.config import RunConfig
from ds_vcycle.levels import Level
from ds_vcycle.operators.plan import ParameterMap, plan_transition
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import Placement, layout_of

DOWN_BYTES = 8  # float64 partial sums
UP_BYTES = 4  # float32 coarse values


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterTraffic:
    """Bytes each rank sends to others for one quantity of one coarse parameter, by rank."""

    name: str
    template: str
    matrix: bool
    coarse_elements: int
    coalesce: tuple[int, ...]
    refine: tuple[int, ...]

    @property
    def local(self) -> bool:
        """Whether nothing leaves any rank, in both directions."""
        return not any(self.coalesce) and not any(self.refine)


def transition_traffic(config: RunConfig, fine: Level, coarse: Level, ranks: int) -> tuple[ParameterTraffic, ...]:
    """The traffic between two adjacent levels of a run on ``ranks`` ranks."""
    plan = plan_transition(fine, coarse, config.operators)
    layouts = {"fine": layout_of(fine, config, ranks), "coarse": layout_of(coarse, config, ranks)}
    return traffic(Geometry(plan=plan, **layouts))


def traffic(geometry: Geometry) -> tuple[ParameterTraffic, ...]:
    """What each coarse parameter costs to coalesce and to refine, for the weights or one of Adam's moments.

    Layers that lie alike on the ranks are worked out once.
    """
    known: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    rows = []
    for item in geometry.plan.maps:
        key = _lie(geometry, item)
        if key not in known:
            known[key] = _sent(geometry, item)
        coalesce, refine = known[key]
        rows.append(
            ParameterTraffic(
                name=item.coarse.name,
                template=item.coarse.template,
                matrix=len(item.coarse.dims) > 1,
                coarse_elements=item.coarse.numel,
                coalesce=coalesce,
                refine=refine,
            )
        )
    return tuple(rows)


def _sent(geometry: Geometry, item: ParameterMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    parameter, ranks = geometry.parameter(item), range(geometry.fine.world_size)
    down, up = [0] * len(ranks), [0] * len(ranks)
    holders = [rank for rank in ranks if parameter.touches(rank)], [rank for rank in ranks if parameter.blocks(rank)]
    for fine_rank, coarse_rank in product(*holders):
        pair = {"fine_rank": fine_rank, "coarse_rank": coarse_rank}
        goes_down, goes_up = parameter.goes_down(**pair), parameter.goes_up(**pair)
        if fine_rank != coarse_rank and (goes_down or goes_up):
            elements = sum(piece.numel for piece in parameter.pieces(**pair))
            down[fine_rank] += elements * DOWN_BYTES * goes_down
            up[coarse_rank] += elements * UP_BYTES * goes_up
    return tuple(down), tuple(up)


def _lie(geometry: Geometry, item: ParameterMap) -> object:
    """What decides the traffic of a parameter: its template, its members and where all of it lies."""
    ranks = range(geometry.fine.world_size)
    fine, coarse = geometry.fine_placements, geometry.coarse_placements
    return (
        item.coarse.template,
        tuple(_where(fine, child.parameter.name, ranks) for child in item.children),
        _where(coarse, item.coarse.name, ranks),
    )


def _where(
    held: Callable[[int], Mapping[str, Placement]], name: str, ranks: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    found = ((rank, held(rank).get(name)) for rank in ranks)
    return tuple((rank, placement.start, placement.length) for rank, placement in found if placement is not None)
