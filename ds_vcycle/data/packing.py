"""Consecutive sentences of a document packed into sequences, in whole-array numpy operations.

A unit is a sentence, or a part of one that is too long. The list of sequences is computed when a corpus is opened
(it depends on the sequence length, which ``prepare`` does not know); it takes 16 bytes per unit and sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Sequences as ranges of units.

    Attributes:
        unit_starts: first token of each unit and one past the last, int64 [units + 1].
        first: first unit of each sequence, int64 [sequences].
        last: one past the last unit of each sequence, int64 [sequences].
    """

    unit_starts: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def pack(
    item_lengths: NDArray[np.int32], document_items: NDArray[np.int64], *, budget: int, longest: int, least: int
) -> Packing:
    """Fill sequences of at most ``budget`` tokens greedily with consecutive units of one document.

    Args:
        item_lengths: tokens of each sentence, none 0, [items].
        document_items: first sentence of each document and one past the last, [documents + 1].
        budget: tokens of a sequence.
        longest: sentences longer than this are cut into parts of nearly equal length, <= budget.
        least: documents with fewer sentences and sequences with fewer units are left out.
    """
    assert 0 < longest <= budget
    unit_starts, document_units = _cut(item_lengths.astype(np.int64), document_items, longest)
    units = len(unit_starts) - 1
    document_ends = np.repeat(document_units[1:], np.diff(document_units))
    fitting = np.searchsorted(unit_starts, unit_starts[:-1] + budget, side="right") - 1
    after = np.minimum(fitting, document_ends)  # for a sequence that starts at a unit: one past its last unit
    assert (after > np.arange(units)).all()  # or following it would never end
    starts = document_units[:-1][np.diff(document_items) >= least]
    onward = np.append(np.where(after < document_ends, after, units), units)
    first = _reachable(starts, onward)
    last = after[first]
    kept = last - first >= least
    return Packing(unit_starts=unit_starts, first=first[kept], last=last[kept])


def _cut(
    lengths: NDArray[np.int64], document_items: NDArray[np.int64], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    parts = -(-lengths // longest)
    part_starts = np.append(0, np.cumsum(parts))
    item = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(item)) - part_starts[item]
    item_starts = np.append(0, np.cumsum(lengths))
    unit_starts = item_starts[item] + number * lengths[item] // parts[item]
    return np.append(unit_starts, item_starts[-1]), part_starts[document_items]


def _reachable(starts: NDArray[np.int64], onward: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every unit reached from ``starts`` by following ``onward`` until its last entry, which leads to itself.

    By doubling: after k rounds everything within 2^k - 1 steps is marked, so long documents cost few rounds.
    """
    end = len(onward) - 1
    reached = np.zeros(end + 1, dtype=bool)
    reached[starts] = True
    while (onward != end).any():
        reached[onward[reached]] = True
        onward = onward[onward]
    reached[end] = False
    return np.flatnonzero(reached)
