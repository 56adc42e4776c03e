"""Which sample comes at which position: pure functions of (seed, position), so that a run may be lengthened or resumed.

Only what numpy promises to keep over its versions is used: seed sequences, raw bit streams, and uniform
doubles; not ``Generator.permutation`` or ``choice``, whose results may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_ORDER, _SAMPLE = 0, 1  # the two uses of a seed never share a stream


def permutation(*, seed: int, corpus: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of one pass over a corpus of ``count`` samples, int64 [count]."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_ORDER, corpus, epoch)))
    return np.argsort(bits.random_raw(count), kind="stable")


def sample_generator(*, seed: int, index: int) -> np.random.Generator:
    """The random numbers of sample ``index`` (masks, order of segments)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_SAMPLE, index))))


def blend_ratios(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """For each corpus but the last: its share among itself and those after it, exactly."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(exact[d] / sum(exact[d:]) for d in range(len(exact) - 1))


def blend_position(ratios: Sequence[Fraction], index: int) -> tuple[int, int]:
    """Which corpus the sample at ``index`` is drawn from, and how many were drawn from that corpus before it.

    The first corpus has been drawn round(index x its share) times, and the others share the remaining positions among
    themselves in the same way; so every share is kept to about one sample at every position, without a table.
    """
    for corpus, ratio in enumerate(ratios):
        drawn = _round(index * ratio)
        if _round((index + 1) * ratio) > drawn:
            return corpus, drawn
        index -= drawn
    return len(ratios), index


def _round(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)
