"""Where DeepSpeed's flat partitions hold the elements of each parameter. Imports no torch.

Worked out from the order and shapes of the parameters (``param_shapes``) and the paddings. The addresses that stage 1
and 2 checkpoints also carry (``param_slice_mappings``) follow another order under ``round_robin_gradients``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_GATHER_ALIGNMENT = 2  # stage 1 and 2 pad a flat group to a multiple of 2 x dp elements

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements [start, start + length) of a parameter, from ``offset`` in a rank's flat tensor of ``group``."""

    name: str
    dp_rank: int
    group: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatSizes:
    """Elements of a rank's flat tensor of one group: with the padding at its end, and without."""

    padded: int
    real: int


def flat_pieces(groups: Sequence[Shapes], gaps: Sequence[Sequence[int]], dp: int) -> Iterator[Piece]:
    """Stages 1 and 2: each group is laid end to end and cut into dp equal runs.

    Args:
        groups: name -> local shape, in the order they are laid out in.
        gaps: unused elements after each parameter of each group.
        dp: ranks the groups are cut over.
    """
    for group, (shapes, unused) in enumerate(zip(groups, gaps, strict=True)):
        run, offset = _run(shapes, unused, dp), 0
        for (name, shape), gap in zip(shapes.items(), unused, strict=True):
            numel = math.prod(shape)
            for dp_rank in range(offset // run, -(-(offset + numel) // run)):
                first, last = max(offset, dp_rank * run), min(offset + numel, (dp_rank + 1) * run)
                if first < last:
                    yield Piece(
                        name=name, dp_rank=dp_rank, group=group, offset=first - dp_rank * run, start=first - offset,
                        length=last - first,
                    )  # fmt: skip
            offset += numel + gap


def flat_sizes(shapes: Shapes, gaps: Sequence[int], dp: int, dp_rank: int) -> FlatSizes:
    """Stages 1 and 2: how long a rank's flat tensor of a group is."""
    run = _run(shapes, gaps, dp)
    return FlatSizes(padded=run, real=min(max(_numel(shapes, gaps) - dp_rank * run, 0), run))


def split_pieces(groups: Sequence[Shapes], dp: int) -> Iterator[Piece]:
    """Stage 3: each parameter is cut into dp equal runs, the last ones short; a rank's runs are laid end to end.

    Args:
        groups: name -> local shape of each sub-group, in the order they are laid out in.
        dp: ranks the parameters are cut over.
    """
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            run = -(-numel // dp)
            for dp_rank in range(dp):
                length = min(run, numel - dp_rank * run)
                if length > 0:
                    yield Piece(
                        name=name, dp_rank=dp_rank, group=group, offset=offset, start=dp_rank * run, length=length
                    )
            offset += run


def split_sizes(shapes: Shapes, dp: int) -> FlatSizes:
    """Stage 3: how long every rank's flat tensor of a sub-group is."""
    size = sum(-(-math.prod(shape) // dp) for shape in shapes.values())
    return FlatSizes(padded=size, real=size)


def _numel(shapes: Shapes, gaps: Sequence[int]) -> int:
    return sum(map(math.prod, shapes.values())) + sum(gaps)


def _run(shapes: Shapes, gaps: Sequence[int], dp: int) -> int:
    unit = _GATHER_ALIGNMENT * dp
    return max(-(-_numel(shapes, gaps) // unit) * unit // dp, 1)
