"""Samples by position: what is refused, the order over passes and corpora, and what a sample holds."""

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from ds_vcycle.config import DataConfig, UserError
from ds_vcycle.data.order import blend_position, blend_ratios, permutation
from ds_vcycle.data.packing import pack
from ds_vcycle.data.prepare import prepare
from ds_vcycle.data.prepared import read_manifest
from ds_vcycle.data.samples import Samples, open_samples
from tests.data_corpora import data_for, model_for, prepared


def open_train(architecture: str, **model: object) -> Samples:
    directory = prepared(architecture)
    return open_samples(data_for(directory), model_for(directory, **model), "train")


def sentences_corpus(tmp_path: Path, documents: list[str], **changes: object) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    settings = {"architecture": "bert", "tokenizer": prepared("bert"), "split": "0.6,0.2,0.2", "progress": False}
    prepare(sources=[str(path)], out=tmp_path / "out", **{**settings, **changes})
    return tmp_path / "out"


# --- what is refused -----------------------------------------------------------------------------------------


def test_a_truncated_file_is_named_with_its_sizes(tmp_path):
    for suffix in ("bin", "idx"):
        directory = tmp_path / suffix
        shutil.copytree(prepared("gpt"), directory)
        path = directory / f"train.{suffix}"
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(UserError, match=rf"train\.{suffix}: damaged, expected {size} bytes, found {size - 10}"):
            open_samples(data_for(directory), model_for(directory), "train")
        path.unlink()
        with pytest.raises(UserError, match=rf"train\.{suffix}: missing"):
            open_samples(data_for(directory), model_for(directory), "train")


def test_an_index_that_does_not_fit_its_corpus_is_refused(tmp_path):
    directory = tmp_path / "gpt"
    shutil.copytree(prepared("gpt"), directory)
    path = directory / "train.idx"
    content = bytearray(path.read_bytes())
    content[34:38] = (1).to_bytes(4, "little")  # the first document's length
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train\.idx: expected .* tokens, found"):
        open_samples(data_for(directory), model_for(directory), "train")
    path.write_bytes(b"X" * len(content))
    with pytest.raises(UserError, match=r"train\.idx: damaged"):
        open_samples(data_for(directory), model_for(directory), "train")


def test_a_model_that_does_not_fit_the_corpus_is_refused():
    directory = prepared("gpt")
    with pytest.raises(UserError, match=r"model\.vocab_size=999, but .* has 1000 tokens; set model\.vocab_size=1000"):
        open_samples(data_for(directory), model_for(directory, vocab_size=999), "train")
    with pytest.raises(UserError, match=r"prepared for gpt, but model\.architecture=bert"):
        open_samples(data_for(directory), model_for(directory, architecture="bert"), "train")


def test_a_directory_that_is_no_corpus_is_refused(tmp_path):
    model = model_for(prepared("gpt"))
    with pytest.raises(UserError, match=r"data\.path=.*nowhere: no such directory"):
        open_samples(data_for(tmp_path / "nowhere"), model, "train")
    with pytest.raises(UserError, match=r"holds no prepare\.json"):
        open_samples(data_for(tmp_path), model, "train")
    (tmp_path / "prepare.json").write_text("{}")
    with pytest.raises(UserError, match="not a manifest"):
        open_samples(data_for(tmp_path), model, "train")


def test_a_split_shorter_than_one_sample_is_refused():
    directory = prepared("gpt")
    tokens = read_manifest(directory).splits["test"].tokens
    enough = open_samples(data_for(directory), model_for(directory, sequence_length=tokens - 1), "test")
    assert len(enough) == 1
    with pytest.raises(UserError, match=rf"\(test\): {tokens} tokens are fewer than one sample"):
        open_samples(data_for(directory), model_for(directory, sequence_length=tokens), "test")


def test_a_split_that_was_not_written_is_refused(tmp_path):
    out = sentences_corpus(tmp_path, [f"One {i}. Two {i}." for i in range(9)], split="0.7,0.3,0")
    with pytest.raises(UserError, match="without a test split"):
        open_samples(data_for(out), model_for(out), "test")


# --- the order -----------------------------------------------------------------------------------------------


def test_every_row_comes_once_per_pass_in_another_order_however_far_one_reads():
    samples = open_train("gpt")
    n = len(samples)
    passes = [[samples.source(epoch * n + i)[1] for i in range(n)] for epoch in range(3)]
    assert all(sorted(rows) == list(range(n)) for rows in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    fresh = open_train("gpt")
    assert fresh.source(2 * n + 5)[1] == passes[2][5]  # without having read anything before
    assert [fresh.source(i)[1] for i in (n - 1, n, n - 1)] == [passes[0][-1], passes[1][0], passes[0][-1]]


def test_the_seed_decides_the_order():
    directory = prepared("gpt")
    rows = {
        seed: [open_samples(data_for(directory, seed=seed), model_for(directory), "train").source(i) for i in range(50)]
        for seed in (1, 2)
    }
    assert rows[1] != rows[2]


def test_the_permutation_is_unbiased():
    count, passes = 10, 4000
    first = Counter(int(permutation(seed=7, corpus=0, epoch=e, count=count)[0]) for e in range(passes))
    chi_square = sum((first[row] - passes / count) ** 2 / (passes / count) for row in range(count))
    assert chi_square < 27.9  # 99.9 % point for 9 degrees of freedom


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [0.7, 0.2, 0.1], [3.0, 1e-3, 5.0, 1 / 3]])
def test_blending_keeps_the_shares_at_every_position_and_uses_no_index_twice(weights):
    ratios = blend_ratios(weights)
    drawn = [0] * len(weights)
    for index in range(3000):
        corpus, before = blend_position(ratios, index)
        assert before == drawn[corpus]
        drawn[corpus] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - (index + 1) * weight / sum(weights)) <= 1.5


def test_blended_corpora_each_go_through_their_own_passes():
    directory = prepared("gpt")
    blend = DataConfig.model_validate({"path": [{"path": directory, "weight": 3}, {"path": directory, "weight": 1}]})
    samples = open_samples(blend, model_for(directory, sequence_length=256), "train")
    single = open_samples(data_for(directory), model_for(directory, sequence_length=256), "train")
    n = len(single)
    assert len(samples) == 2 * n
    sources = [samples.source(i) for i in range(4 * n)]
    rows = [[row for corpus, row in sources if corpus == c] for c in (0, 1)]
    assert [len(r) for r in rows] == [3 * n, n]
    assert rows[0][:n] == [single.source(i)[1] for i in range(n)]
    assert all(sorted(rows[0][k * n : (k + 1) * n]) == list(range(n)) for k in range(3))
    assert sorted(rows[1]) == list(range(n)) and rows[1] != rows[0][:n]


# --- what a sample holds -------------------------------------------------------------------------------------


def test_gpt_windows_are_the_whole_stream_with_labels_one_ahead():
    samples, length = open_train("gpt", sequence_length=100), 100
    dataset = IndexedDataset(str(prepared("gpt") / "train"))
    stream = np.concatenate([dataset[i] for i in range(len(dataset))])
    assert len(samples) == (len(stream) - 1) // length
    seen = 0
    for i in range(len(samples)):
        sample, row = samples.sample(i), samples.source(i)[1]
        assert (sample["tokens"] == stream[row * length : (row + 1) * length]).all()
        assert (sample["labels"] == stream[row * length + 1 : (row + 1) * length + 1]).all()
        assert (sample["weights"] == 1).all()
        seen += int((sample["labels"] == 0).sum())
    assert 0 < seen <= read_manifest(prepared("gpt")).splits["train"].documents  # ends of documents are predicted


def test_bert_sequences_hold_every_token_once_and_cross_no_document():
    samples = open_train("bert", sequence_length=48)
    dataset = IndexedDataset(str(prepared("bert") / "train"))
    lengths, bounds = dataset.sequence_lengths.astype(int), dataset.document_indices
    documents = [np.concatenate([dataset[i] for i in range(bounds[d], bounds[d + 1])]) for d in range(len(bounds) - 1)]
    assert max(lengths) > 46  # some sentences have to be cut
    pieces = {}
    for i in range(len(samples)):
        sample, row = samples.sample(i), samples.source(i)[1]
        text = sample["tokens"].copy()
        used = sample["weights"] > 0
        text[sample["masked_positions"][used]] = sample["labels"][used]
        real = int(sample["padding_mask"].sum())
        assert sample["padding_mask"][:real].all() and (text[real:] == 0).all()
        assert (text[0], text[real - 1]) == (2, 3) and not sample["token_types"].any()
        assert "sentence_order" not in sample
        pieces[row] = text[1 : real - 1]
    joined = np.concatenate([pieces[row] for row in range(len(samples))])
    assert (joined == np.concatenate(documents)).all()
    ends = set(np.cumsum([len(pieces[row]) for row in range(len(samples))]).tolist())
    assert set(np.cumsum([len(d) for d in documents]).tolist()) <= ends


def test_pairs_are_neighbours_in_either_order_with_the_right_label():
    samples = open_train("bert", sequence_length=64, sentence_order=True)
    dataset = IndexedDataset(str(prepared("bert") / "train"))
    stream = " ".join(str(token) for i in range(len(dataset)) for token in dataset[i])
    orders = []
    for i in range(600):
        sample = samples.sample(i)
        text, used = sample["tokens"].copy(), sample["weights"] > 0
        text[sample["masked_positions"][used]] = sample["labels"][used]
        real = int(sample["padding_mask"].sum())
        first, second = np.flatnonzero(text[:real] == 3)
        assert text[0] == 2 and second == real - 1
        assert (np.flatnonzero(sample["token_types"]) == np.arange(first + 1, real)).all()
        a, b = (" ".join(map(str, part)) for part in (text[1:first], text[first + 1 : second]))
        assert a and b
        order = int(sample["sentence_order"])
        assert f" {b} {a} " in stream if order else f" {a} {b} " in f" {stream} "
        orders.append(order)
    assert 0.44 < np.mean(orders) < 0.56


def test_documents_of_one_sentence_are_left_out_of_pairs_and_counted(tmp_path):
    single = [f"a lone sentence number {i}" for i in range(10)]
    out = sentences_corpus(tmp_path, [*single, *[f"First part {i}. Second part {i}." for i in range(10)]])
    items = IndexedDataset(str(out / "train"))
    lone = int((np.diff(items.document_indices) == 1).sum())
    pairs = open_samples(data_for(out), model_for(out, sentence_order=True), "train")
    plain = open_samples(data_for(out), model_for(out), "train")
    assert 0 < lone < 12
    assert (pairs.skipped_documents, len(pairs)) == (lone, 12 - lone)
    assert (plain.skipped_documents, len(plain)) == (0, 12)


def test_a_corpus_of_single_sentences_is_refused_for_pairs_only(tmp_path):
    out = sentences_corpus(tmp_path, [f"a lone sentence number {i}" for i in range(9)])
    with pytest.raises(UserError, match=r"every document is a single sentence.*sentence_order=false"):
        open_samples(data_for(out), model_for(out, sentence_order=True), "train")
    assert len(open_samples(data_for(out), model_for(out), "train"))


@pytest.mark.parametrize("least", [1, 2])
def test_packing_agrees_with_a_plain_loop(least):
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 60, 500).astype(np.int32)
    documents = np.unique(np.concatenate([[0, 1, 2, 500], generator.integers(0, 500, 40)])).astype(np.int64)
    budget, longest = 50, 50 // least
    expected = []
    for first, last in pairwise(documents):
        if last - first < least:
            continue
        units = []
        for length in lengths[first:last]:
            parts = -(-int(length) // longest)
            units += [length * (k + 1) // parts - length * k // parts for k in range(parts)]
        start, position = 0, int(lengths[:first].sum())
        while start < len(units):
            end = start + 1
            while end < len(units) and sum(units[start : end + 1]) <= budget:
                end += 1
            tokens = sum(units[start:end])
            if end - start >= least:
                expected.append((position, position + tokens))
            start, position = end, position + tokens
    packing = pack(lengths, documents, budget=budget, longest=longest, least=least)
    found = list(zip(packing.unit_starts[packing.first], packing.unit_starts[packing.last], strict=True))
    assert found == expected
