"""Sequences of consecutive sentences for BERT: ``[CLS] a [SEP]``, or ``[CLS] a [SEP] b [SEP]`` in either order.

Own code over Megatron's indexed dataset: its BERT dataset fills the padding mask and the token types with
the pad id, gives nothing for documents of one sentence, and orders samples by how many are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_vcycle.data.errors import DataError
from ds_vcycle.data.masking import Masking, mask
from ds_vcycle.data.packing import Packing, pack
from ds_vcycle.data.prepared import TokenFile


@dataclass(frozen=True, kw_only=True, slots=True)
class BertSequences:
    """The samples of one pass over one split.

    Attributes:
        skipped_documents: documents of one sentence, which cannot be cut into a pair (0 without pairs).
    """

    file: TokenFile
    packing: Packing
    masking: Masking
    sequence_length: int
    pad_id: int
    cls_id: int
    sep_id: int
    pairs: bool
    skipped_documents: int

    def __len__(self) -> int:
        """Sequences."""
        return len(self.packing.first)

    def read(self, row: int, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Sequence ``row``, masked and padded to s.

        Returns:
            tokens, token_types int64 [s], padding_mask bool [s] (True: a real token), masked_positions and labels
            int64 [P], weights float32 [P]; with pairs sentence_order int64 [], 1 if the two parts are exchanged.
        """
        parts, order = self._parts(row, generator)
        real = np.concatenate([[self.cls_id], *(np.append(part, self.sep_id) for part in parts)])
        tokens = np.full(self.sequence_length, self.pad_id, dtype=np.int64)
        tokens[: len(real)] = real
        token_types = np.zeros(self.sequence_length, dtype=np.int64)
        if self.pairs:
            token_types[len(parts[0]) + 2 : len(real)] = 1
        sample = mask(tokens, self.masking, generator)
        sample |= {"token_types": token_types, "padding_mask": np.arange(self.sequence_length) < len(real)}
        if self.pairs:
            sample["sentence_order"] = np.array(order, dtype=np.int64)
        return sample

    def _parts(self, row: int, generator: np.random.Generator) -> tuple[list[NDArray[np.int64]], int]:
        first, last = int(self.packing.first[row]), int(self.packing.last[row])
        starts = self.packing.unit_starts[first : last + 1]
        text = self.file.read(int(starts[0]), int(starts[-1] - starts[0]))
        if not self.pairs:
            return [text], 0
        where, exchange = generator.random(2)
        cut = starts[1 + int(where * (last - first - 1))] - starts[0]
        order = int(exchange < 0.5)
        return ([text[cut:], text[:cut]] if order else [text[:cut], text[cut:]]), order


def open_sequences(
    file: TokenFile, *, sequence_length: int, role_ids: dict[str, int], masking: Masking, pairs: bool, name: str
) -> BertSequences:
    """The sequences of a split (raises :class:`DataError` if there is none)."""
    budget = sequence_length - (3 if pairs else 2)
    if budget < 2:
        raise DataError(f"model.sequence_length={sequence_length} leaves no room beside [CLS] and [SEP]; raise it")
    least = 2 if pairs else 1
    packing = pack(
        file.item_lengths, file.document_items, budget=budget, longest=budget // 2 if pairs else budget, least=least
    )
    if not len(packing.first):
        raise DataError(
            f"{name}: every document is a single sentence, and model.sentence_order=true needs two; give longer "
            "documents or set model.sentence_order=false"
        )
    return BertSequences(
        file=file,
        packing=packing,
        masking=masking,
        sequence_length=sequence_length,
        pad_id=role_ids["pad"],
        cls_id=role_ids["cls"],
        sep_id=role_ids["sep"],
        pairs=pairs,
        skipped_documents=int((np.diff(file.document_items) < least).sum()),
    )
