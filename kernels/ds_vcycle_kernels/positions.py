"""Where the fine indices of a block lie in the coarse rectangle: a few integers where the map is regular, else a table.

``adjacent``, ``stack`` and ``local_stack`` groups, on single indices or on whole heads, with or without a gate and an
up half, are one and the same pattern: runs of ``span`` indices in order, each run repeated ``members`` times before the
next begins. ``adjacent`` on single indices has span 1, a stack of n has span n / members, heads of 64 in pairs have
span 64, and the identity has one member. A cut takes a window of it: ``shift`` indices are missing in front, and
positions count from ``base``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Positions:
    """The coarse position of each of ``count`` fine indices.

    With ``table`` None, i -> j // (members * span) * span + j % span - base, where j = i + shift; else ``table[i]``
    (int32 on the host).
    """

    count: int
    members: int = 1
    span: int = 1
    shift: int = 0
    base: int = 0
    table: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether the pattern is regular and begins and ends between two groups, so that every group is complete."""
        closed = self.table is None and self.shift == 0 and self.base == 0
        return closed and self.count % (self.members * self.span) == 0

    @property
    def identity(self) -> bool:
        """Whether each index is its own position."""
        return self.whole and self.members == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Fine indices in order, as [units, members, length], and the coarse ones they lie on, as [units, length]."""

    fine: int
    coarse: int
    units: int = 1
    members: int = 1
    length: int

    @property
    def fine_end(self) -> int:
        """The fine index after the last."""
        return self.fine + self.units * self.members * self.length

    @property
    def coarse_end(self) -> int:
        """The coarse index after the last."""
        return self.coarse + self.units * self.length


def positions(table: Tensor) -> Positions:
    """The positions of a table, in closed form where the table has one.

    The form is guessed from the table's steps and then held against every entry, so it is right or not used. Equal
    tables give the same object.

    Args:
        table: coarse position of each fine index, [count], integers on the host, not negative.

    Raises:
        ValueError: the table is empty, has a negative entry, or is no vector of integers on the host.
    """
    if table.dim() != 1 or table.numel() == 0 or table.dtype.is_floating_point or table.device.type != "cpu":
        raise ValueError(f"positions: a vector of integers on the host, not {list(table.shape)} {table.dtype}")
    return _fitted(table.to(torch.int64).contiguous().numpy().tobytes())


@lru_cache(maxsize=1024)
def indices(rule: Positions) -> Tensor:
    """The position of each fine index, int64 [count] on the host."""
    if rule.table is not None:
        return rule.table.to(torch.int64)
    return _evaluated(torch.arange(rule.count), rule)


@lru_cache(maxsize=1024)
def bounds(rule: Positions) -> tuple[int, int]:
    """The smallest and the largest position."""
    values = indices(rule)
    return int(values.min()), int(values.max())


@lru_cache(maxsize=1024)
def children(rule: Positions) -> tuple[Tensor, Tensor]:
    """The inverse: the fine indices ordered by position, and these positions; each int64 [count] on the host."""
    ordered, order = torch.sort(indices(rule), stable=True)
    return order, ordered


def runs(rule: Positions, first: int, last: int) -> Iterator[Run]:
    """The fine indices on the positions from ``first`` up to ``last``, in as few runs as the pattern allows."""
    if rule.table is not None:
        for fine, coarse, length in _ascents(rule):
            begin, end = max(coarse, first), min(coarse + length, last)
            if begin < end:
                yield Run(fine=fine + begin - coarse, coarse=begin, length=end - begin)
        return
    members, span, shift, base = rule.members, rule.span, rule.shift, rule.base
    begin, end, unit = first + base, last + base, members * span
    whole_begin = max(_ceil(begin, span), _ceil(shift, unit))
    whole_end = max(whole_begin, min(end // span, (rule.count + shift) // unit))
    if whole_begin < whole_end:
        units = whole_end - whole_begin
        yield Run(
            fine=whole_begin * unit - shift, coarse=whole_begin * span - base, units=units, members=members, length=span
        )
    for cut in range(begin // span, _ceil(end, span)):
        if not whole_begin <= cut < whole_end:
            yield from _cut_unit(rule, cut, begin, end)


def scattered(rule: Positions) -> bool:
    """Whether the runs are so short that gathering index by index is the better way."""
    return rule.table is not None and len(_ascents(rule)) * 8 > rule.count


def _cut_unit(rule: Positions, unit: int, begin: int, end: int) -> Iterator[Run]:
    """What a window leaves of one unit: a part of the span, and of each member what the fine range still has."""
    offset, stop = max(begin - unit * rule.span, 0), min(end - unit * rule.span, rule.span)
    for member in range(rule.members):
        origin = (unit * rule.members + member) * rule.span - rule.shift
        fine, fine_end = max(origin + offset, 0), min(origin + stop, rule.count)
        if fine < fine_end:
            yield Run(fine=fine, coarse=unit * rule.span + fine - origin - rule.base, length=fine_end - fine)


@lru_cache(maxsize=1024)
def _ascents(rule: Positions) -> list[tuple[int, int, int]]:
    """A table as runs that ascend by one: (fine index, position, length)."""
    values = indices(rule)
    starts = [0, *(torch.nonzero(values.diff() != 1).flatten() + 1).tolist()]
    ends = [*starts[1:], rule.count]
    return [(a, int(values[a]), b - a) for a, b in zip(starts, ends, strict=True)]


@lru_cache(maxsize=1024)
def _fitted(entries: bytes) -> Positions:
    table = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    if int(table.min()) < 0:
        raise ValueError(f"positions: position {int(table.min())} is negative")
    guess = _guess(table)
    if guess is not None and torch.equal(_evaluated(torch.arange(len(table)), guess), table):
        return guess
    return Positions(count=len(table), table=table.to(torch.int32))


def _guess(table: Tensor) -> Positions | None:
    """The one pattern that the steps between neighbours allow; whether it fits is for the caller to see.

    A step within a run, and from the last member's run to the next unit, is +1; from one member to the next it goes
    back by span - 1. With span 1 those are the steps of 0.
    """
    count, steps = len(table), table.diff()
    back = 1 if count == 1 else int(steps.min())
    if back > 1:
        return None
    breaks = (torch.nonzero(steps == back).flatten() + 1).tolist() if back < 1 else []
    span = 1 - back if breaks else 1
    groups = _split_at_gaps(breaks, span)
    members = max((len(group) for group in groups), default=0) + 1
    unit = members * span
    boundary = groups[0][-1] + span if len(groups) > 1 else groups[0][0] - span if groups else 0
    shift = -boundary % unit
    base = shift // unit * span + shift % span - int(table[0])
    return Positions(count=count, members=members, span=span, shift=shift, base=base)


def _split_at_gaps(breaks: list[int], span: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in breaks:
        if groups and index - groups[-1][-1] == span:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _evaluated(index: Tensor, rule: Positions) -> Tensor:
    shifted = index + rule.shift
    return shifted // (rule.members * rule.span) * rule.span + shifted % rule.span - rule.base


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
