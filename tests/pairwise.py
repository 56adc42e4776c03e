"""Pairwise covering lists: few cases in which every two values of different factors meet at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Every allowed combination."""
    combinations = (dict(zip(factors, values)) for values in itertools.product(*factors.values()))
    return [case for case in combinations if allowed(case)]


def covering(cases: Sequence[Case], seed: int = 0) -> list[Case]:
    """A list of the cases that holds every pair of values which any of them holds; the richest ones are taken first."""
    order = [(case, _pairs(case)) for case in cases]
    random.Random(seed).shuffle(order)
    missing = set().union(*(pairs for _, pairs in order))
    chosen = []
    for least in (40, 30, 20, 12, 8, 5, 3, 2, 1):
        for case, pairs in order:
            if len(pairs & missing) >= least:
                chosen.append(case)
                missing -= pairs
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))
