"""Samples by position: the one door through which training and evaluation read data.

Sample i is a pure function of (corpora, sequence length, ``data.seed``, i). Pass p over a corpus of n samples is a
permutation drawn from (seed, p), so no sample comes a second time before all came once, however long a run
turns out to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds_vcycle.config import DataConfig, ModelConfig
from ds_vcycle.data.bert import BertSequences, open_sequences
from ds_vcycle.data.gpt import GptWindows, open_windows
from ds_vcycle.data.masking import make_masking
from ds_vcycle.data.order import blend_position, blend_ratios, permutation, sample_generator
from ds_vcycle.data.prepared import Split, check_model, open_split, read_manifest

Sample = dict[str, NDArray[Any]]


class Rows(Protocol):
    """The samples of one pass over one corpus: :class:`GptWindows` or :class:`BertSequences`."""

    def __len__(self) -> int: ...

    def read(self, row: int, generator: np.random.Generator) -> Sample:
        """Sample ``row``, its randomness from ``generator``."""
        ...


class Samples:
    """An endless, fixed order of samples over one or several corpora."""

    def __init__(self, corpora: Sequence[Rows], *, weights: Sequence[float], seed: int) -> None:
        assert len(corpora) == len(weights) and all(len(corpus) for corpus in corpora)
        self._corpora = tuple(corpora)
        self._ratios = blend_ratios(weights)
        self._seed = seed
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        """Distinct samples of all corpora together (masks not counted)."""
        return sum(len(corpus) for corpus in self._corpora)

    @property
    def skipped_documents(self) -> int:
        """Documents no sample is made of: those of one sentence, when ``model.sentence_order`` needs two."""
        return sum(c.skipped_documents for c in self._corpora if isinstance(c, BertSequences))

    def source(self, index: int) -> tuple[int, int]:
        """(corpus, row of its pass) of the sample at position ``index`` >= 0."""
        corpus, drawn = blend_position(self._ratios, index)
        epoch, place = divmod(drawn, len(self._corpora[corpus]))
        return corpus, int(self._order(corpus, epoch)[place])

    def sample(self, index: int) -> Sample:
        """The sample at position ``index`` >= 0: the arrays of a batch without their first dim."""
        corpus, row = self.source(index)
        return self._corpora[corpus].read(row, sample_generator(seed=self._seed, index=index))

    def _order(self, corpus: int, epoch: int) -> NDArray[np.int64]:
        """The permutation of a pass; the last one used is kept (8 bytes per sample)."""
        known = self._orders.get(corpus)
        if known is None or known[0] != epoch:
            order = permutation(seed=self._seed, corpus=corpus, epoch=epoch, count=len(self._corpora[corpus]))
            known = self._orders[corpus] = (epoch, order)
        return known[1]


def open_samples(data: DataConfig, model: ModelConfig, split: Split) -> Samples:
    """Open one split of every corpus of ``data``, everything checked.

    Raises:
        DataError: a directory or file is missing, damaged or too short for one sample.
        ConfigError: the corpus was made for another architecture or vocabulary.
    """
    corpora = [_open_corpus(blend.path, data, model, split) for blend in data.blend]
    return Samples(corpora, weights=[blend.weight for blend in data.blend], seed=data.seed)


def _open_corpus(directory: Path, data: DataConfig, model: ModelConfig, split: Split) -> GptWindows | BertSequences:
    manifest = read_manifest(directory)
    check_model(directory, manifest, model)
    file = open_split(directory, manifest, split)
    name = f"{directory} ({split})"
    if model.architecture == "gpt":
        return open_windows(file, sequence_length=model.sequence_length, name=name)
    masking = make_masking(
        probability=data.mask_probability,
        sequence_length=model.sequence_length,
        vocab_size=manifest.vocab_size,
        mask_id=manifest.role_ids["mask"],
        special_ids=manifest.special_ids,
    )
    return open_sequences(
        file,
        sequence_length=model.sequence_length,
        role_ids=manifest.role_ids,
        masking=masking,
        pairs=model.sentence_order,
        name=name,
    )
