"""Which document goes into which split, and the count of those that go nowhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ds_vcycle.data.corpus import Broken, Document
from ds_vcycle.data.errors import DataError
from ds_vcycle.data.prepared import SPLITS

EXAMPLES = 20


class Skipped:
    """Counts every document left out and keeps the first few."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[Broken] = []

    def add(self, broken: Broken) -> None:
        """Count one."""
        self.counts[broken.kind] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(broken)


def parse_shares(split: str) -> tuple[float, float, float]:
    """Shares of train, validation and test out of ``"0.9,0.05,0.05"`` (raises :class:`DataError`)."""
    try:
        train, validation, test = (float(part) for part in split.split(","))
    except ValueError as error:
        raise DataError(f"split={split}: expected three shares (train,validation,test), e.g. 0.9,0.05,0.05") from error
    if not (train > 0 and validation > 0 and test >= 0 and abs(train + validation + test - 1) < 1e-6):
        raise DataError(f"split={split}: shares of train and validation must be above 0, and all must add up to 1")
    return train, validation, test


def survey(documents: Iterator[Document | Broken], seed: int, skipped: Skipped) -> NDArray[np.uint64]:
    """A key per readable document, drawn from (seed, text): uint64 [documents]; the others are counted.

    Raises:
        DataError: not one is readable.
    """
    keys = bytearray()
    for document in documents:
        if isinstance(document, Broken):
            skipped.add(document)
        else:
            keys += hashlib.blake2b(document.text.encode(), digest_size=8, key=str(seed).encode()).digest()
    if not keys:
        faults = ", ".join(f"{count} {kind}" for kind, count in skipped.counts.items()) or "no document at all"
        first = "".join(f"; first: {b.file}, line {b.line}: {b.kind}" for b in skipped.examples[:1])
        raise DataError(f"the corpus holds no readable document ({faults}{first}); check the sources and text_key")
    return np.frombuffer(bytes(keys), dtype="<u8").astype(np.uint64)


def assign_splits(keys: NDArray[np.uint64], shares: tuple[float, float, float]) -> NDArray[np.uint8]:
    """The split of each document as an index into SPLITS, uint8 [documents].

    By the rank of its key, so that the shares are met and small corpora fill every split; equal texts stay together.

    Raises:
        DataError: a split with a share gets no document.
    """
    count = len(keys)
    held_out = [max(1, round(share * count)) if share else 0 for share in shares[1:]]
    train = count - sum(held_out)
    ranked = np.sort(keys)
    if train < 1:
        raise DataError(f"{count} documents are too few for a split by document; give more, e.g. as JSON lines")
    cuts = [ranked[train], ranked[train + held_out[0]]] if held_out[1] else [ranked[train]]
    assignment = np.searchsorted(np.array(cuts, dtype=np.uint64), keys, side="right").astype(np.uint8)
    for number, share in enumerate(shares):
        if share and not (assignment == number).any():
            distinct = len(np.unique(keys))
            raise DataError(
                f"no document for {SPLITS[number]}: only {distinct} of {count} differ; give more or other documents"
            )
    return assignment
