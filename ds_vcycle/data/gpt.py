"""Windows over the token stream of a split, for next-token prediction.

The documents lie one after another in the ``.bin`` file, each ended by its end-of-document token, so window k is
simply the tokens k x s to (k + 1) x s + 1 of the file: one pass uses every token once, no index has to be
built or kept, and the corpus is read where it is mapped. (Megatron's GPTDataset gives the same windows over
shuffled documents, but turns every token equal to the pad id into 0, which is fatal when pad is the
end-of-document token.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_vcycle.data.errors import DataError
from ds_vcycle.data.prepared import TokenFile


@dataclass(frozen=True, kw_only=True, slots=True)
class GptWindows:
    """The samples of one pass over one split."""

    file: TokenFile
    sequence_length: int

    def __len__(self) -> int:
        """Whole windows; a remainder at the end is left out."""
        return (self.file.tokens - 1) // self.sequence_length

    def read(self, row: int, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Window ``row``: tokens and labels (the next tokens) int64 [s], weights (all 1) float32 [s]."""
        window = self.file.read(row * self.sequence_length, self.sequence_length + 1)
        return {"tokens": window[:-1], "labels": window[1:], "weights": np.ones(self.sequence_length, np.float32)}


def open_windows(file: TokenFile, *, sequence_length: int, name: str) -> GptWindows:
    """The windows of a split (raises :class:`DataError` if it is shorter than one)."""
    windows = GptWindows(file=file, sequence_length=sequence_length)
    if not len(windows):
        raise DataError(
            f"{name}: {file.tokens} tokens are fewer than one sample of model.sequence_length={sequence_length} + 1; "
            "prepare more text, give the split a larger share, or lower model.sequence_length"
        )
    return windows
