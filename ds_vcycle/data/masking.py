"""BERT's masked-token objective: which positions are predicted, and what stands there instead.

Of the tokens that are not special, ``probability`` are predicted; of those 80 % become the mask token, 10 % a random
ordinary token and 10 % stay (Devlin et al. 2018, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASKED, RANDOM = 0.8, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """The objective for one vocabulary.

    Attributes:
        probability: share of ordinary tokens predicted.
        mask_id: the mask token.
        special: True for special tokens, bool [vocab].
        ordinary: ids of all others, int64.
        slots: predicted positions of every sample, used or not.
    """

    probability: float
    mask_id: int
    special: NDArray[np.bool_]
    ordinary: NDArray[np.int64]
    slots: int


def make_masking(
    *, probability: float, sequence_length: int, vocab_size: int, mask_id: int, special_ids: list[int]
) -> Masking:
    """Masking with ceil(probability x sequence_length) slots."""
    special = np.zeros(vocab_size, dtype=bool)
    special[special_ids] = True
    return Masking(
        probability=probability,
        mask_id=mask_id,
        special=special,
        ordinary=np.flatnonzero(~special),
        slots=math.ceil(probability * sequence_length),
    )


def mask(tokens: NDArray[np.int64], masking: Masking, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Hide some of ``tokens`` [s] (padding included, as it is a special token).

    Returns:
        tokens int64 [s] with the replacements, masked_positions and labels int64 [slots], weights float32 [slots];
        unused slots have position, label and weight 0.
    """
    candidates = np.flatnonzero(~masking.special[tokens])
    count = min(len(candidates), max(1, round(masking.probability * len(candidates))))
    chosen = np.sort(candidates[np.argsort(generator.random(len(candidates)), kind="stable")[:count]])
    kind, pick = generator.random((2, count))
    random_ids = masking.ordinary[(pick * len(masking.ordinary)).astype(np.int64)]
    hidden = tokens.copy()
    hidden[chosen] = np.where(
        kind < MASKED, masking.mask_id, np.where(kind < MASKED + RANDOM, random_ids, tokens[chosen])
    )
    positions, labels = np.zeros((2, masking.slots), dtype=np.int64)
    weights = np.zeros(masking.slots, dtype=np.float32)
    positions[:count], labels[:count], weights[:count] = chosen, tokens[chosen], 1
    return {"tokens": hidden, "masked_positions": positions, "labels": labels, "weights": weights}
