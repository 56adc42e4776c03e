"""Parent maps: which coarse index each fine index of an axis belongs to (DESIGN section 3). No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ds_vcycle.config import Grouping, UserError


class PlanError(UserError):
    """Two levels cannot be mapped onto each other as asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisMap:
    """``parent[fine] = coarse`` for one axis; every coarse index has at least one fine index."""

    axis: str
    coarse: int
    parent: tuple[int, ...]

    @property
    def fine(self) -> int:
        """Number of fine indices."""
        return len(self.parent)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Group size of each coarse index."""
        counts = Counter(self.parent)
        return tuple(counts[index] for index in range(self.coarse))

    @property
    def merges(self) -> bool:
        """Whether any group has more than one member; without, an axis is at most put in another order."""
        return self.fine > self.coarse

    @property
    def keeps_order(self) -> bool:
        """Whether the groups' first members ascend, so that they stand in the order of the coarse indices."""
        firsts = [group[0] for group in self.groups]
        return firsts == sorted(firsts)

    @property
    def neighbouring(self) -> bool:
        """Whether every group is a run of indices without gaps."""
        return all(group[-1] - group[0] + 1 == len(group) for group in self.groups)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The fine indices of each coarse index, in ascending order."""
        members: list[list[int]] = [[] for _ in range(self.coarse)]
        for fine, coarse in enumerate(self.parent):
            members[coarse].append(fine)
        return tuple(tuple(group) for group in members)


def axis_map(axis: str, *, fine: int, coarse: int, grouping: Grouping, chunks: int = 1) -> AxisMap:
    """The parent map of one axis.

    Args:
        axis: the axis' name, for messages.
        fine: indices at the fine level.
        coarse: indices at the coarse level.
        grouping: ``adjacent`` (2i, 2i+1), ``stack`` (i, i+n/2), ``local_stack`` (stack within each of ``chunks`` equal
            runs: the tensor-parallel ranks), or the explicit list of each coarse index' members.
        chunks: tensor-parallel degree of the fine level where the axis is partitioned, else 1.

    Raises:
        PlanError: the sizes do not divide, or a list is not a partition of the fine indices.
    """
    if isinstance(grouping, list):
        return AxisMap(axis=axis, coarse=coarse, parent=_explicit(axis, fine, coarse, grouping))
    if fine == coarse:
        return AxisMap(axis=axis, coarse=coarse, parent=tuple(range(fine)))
    if fine < coarse or fine % coarse:
        raise PlanError(
            f"groupings.{axis}={grouping}: {fine} fine indices do not divide into {coarse} equal groups; "
            f"change the coarse level's size or give an explicit list of lists"
        )
    members = fine // coarse
    if grouping == "adjacent":
        parent = tuple(index // members for index in range(fine))
    else:
        runs = chunks if grouping == "local_stack" else 1
        if coarse % runs:
            raise PlanError(
                f"groupings.{axis}=local_stack: {coarse} coarse indices do not divide over {runs} tensor-parallel "
                f"ranks; use stack or adjacent"
            )
        run, coarse_run = fine // runs, coarse // runs
        parent = tuple(index // run * coarse_run + index % run % coarse_run for index in range(fine))
    return AxisMap(axis=axis, coarse=coarse, parent=parent)


def _explicit(axis: str, fine: int, coarse: int, groups: list[list[int]]) -> tuple[int, ...]:
    if len(groups) != coarse:
        raise PlanError(
            f"groupings.{axis}: {len(groups)} groups given for {coarse} coarse indices; give one list for each"
        )
    parent = [-1] * fine
    for index, members in enumerate(groups):
        if not members:
            raise PlanError(f"groupings.{axis}: group {index} (from 0) is empty; every coarse index needs a fine one")
        for member in members:
            if not 0 <= member < fine:
                raise PlanError(f"groupings.{axis}: group {index} (from 0) names {member}, outside 0..{fine - 1}")
            if parent[member] >= 0:
                raise PlanError(
                    f"groupings.{axis}: index {member} is in groups {parent[member]} and {index}; keep it in one"
                )
            parent[member] = index
    missing = [member for member, index in enumerate(parent) if index < 0]
    if missing:
        raise PlanError(f"groupings.{axis}: index {missing[0]} is in no group ({len(missing)} missing); add it")
    return tuple(parent)
