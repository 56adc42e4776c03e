"""The masked-token objective, measured on real text, and a vocabulary whose pad id is not 0."""

import json
import math

import numpy as np
import pytest
from tokenizers import Tokenizer

from ds_vcycle.data.masking import make_masking, mask
from ds_vcycle.data.order import sample_generator
from ds_vcycle.data.prepare import prepare
from ds_vcycle.data.prepared import read_manifest
from ds_vcycle.data.samples import open_samples
from tests.data_corpora import SPEECHES, data_for, model_for, prepared


@pytest.mark.parametrize("sentence_order", [False, True])
def test_fifteen_percent_are_predicted_80_10_10_and_never_a_special_token(sentence_order):
    directory = prepared("bert")
    samples = open_samples(
        data_for(directory), model_for(directory, sequence_length=128, sentence_order=sentence_order), "train"
    )
    ordinary = predicted = masked = random = kept = 0
    replacements = []
    for i in range(4000):
        sample = samples.sample(i)
        used = sample["weights"] > 0
        positions, labels = sample["masked_positions"][used], sample["labels"][used]
        assert (np.diff(positions) > 0).all() and sample["padding_mask"][positions].all()
        assert (labels > 4).all()  # the five special tokens are 0 to 4
        assert len(sample["weights"]) == 20 and not sample["masked_positions"][~used].any()
        shown = sample["tokens"][positions]
        others = np.delete(sample["tokens"], positions)
        assert 4 not in others  # a mask token stands only where something is predicted
        ordinary += int((others > 4).sum()) + len(positions)
        predicted += len(positions)
        masked += int((shown == 4).sum())
        kept += int((shown == labels).sum())
        changed = shown[(shown != 4) & (shown != labels)]
        random += len(changed)
        replacements.append(changed)
    assert predicted / ordinary == pytest.approx(0.15, abs=0.003)
    assert masked / predicted == pytest.approx(0.8, abs=0.01)
    assert random / predicted == pytest.approx(0.1, abs=0.01)
    assert kept / predicted == pytest.approx(0.1, abs=0.01)
    drawn = np.concatenate(replacements)
    assert drawn.min() > 4 and len(np.unique(drawn)) > 950  # all over the vocabulary of 1,000
    assert np.bincount(drawn, minlength=1000)[5:].max() < 6 * len(drawn) / 995


def test_masks_are_fixed_by_the_position_and_differ_between_passes():
    directory = prepared("bert")
    model = model_for(directory)
    first, again = (open_samples(data_for(directory), model, "validation") for _ in range(2))
    n = len(first)
    for i in (0, 3, n - 1):
        one, other = first.sample(i), again.sample(i)
        assert all((one[key] == other[key]).all() for key in one)
    row = first.source(0)[1]
    later = next(i for i in range(n, 2 * n) if first.source(i)[1] == row)
    assert (first.sample(0)["masked_positions"] != first.sample(later)["masked_positions"]).any()


def test_the_probability_sets_the_number_of_slots():
    directory = prepared("bert")
    model = model_for(directory, sequence_length=50)
    for probability in (0.15, 0.4):
        samples = open_samples(data_for(directory, mask_probability=probability), model, "train")
        weights = [samples.sample(i)["weights"] for i in range(300)]
        assert {len(w) for w in weights} == {math.ceil(probability * 50)}
        assert np.mean([w.sum() for w in weights]) > 0.6 * probability * 50


def test_a_sample_without_ordinary_tokens_predicts_nothing_and_a_short_one_predicts_one():
    masking = make_masking(probability=0.15, sequence_length=8, vocab_size=20, mask_id=4, special_ids=[0, 1, 2, 3, 4])
    nothing = mask(np.array([2, 1, 3, 0, 0, 0, 0, 0]), masking, sample_generator(seed=1, index=0))
    assert not nothing["weights"].any() and (nothing["tokens"] == [2, 1, 3, 0, 0, 0, 0, 0]).all()
    one = mask(np.array([2, 9, 3, 0, 0, 0, 0, 0]), masking, sample_generator(seed=1, index=1))
    assert (one["weights"].sum(), one["labels"][0], one["masked_positions"][0]) == (1, 9, 1)


def test_a_pad_id_other_than_zero_pads_and_nothing_else(tmp_path):
    source = json.loads((prepared("bert") / "tokenizer.json").read_text())
    vocab = source["model"]["vocab"]
    zero, moved = "[PAD]", next(token for token, i in vocab.items() if i == 700)
    vocab[zero], vocab[moved] = 700, 0
    for token in source["added_tokens"]:
        token["id"] = vocab[token["content"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("[PAD]") == 700
    out = tmp_path / "out"
    prepare(sources=[str(SPEECHES / "196[0-3]*.txt")], out=out, architecture="bert", tokenizer=tmp_path, progress=False)
    assert read_manifest(out).role_ids["pad"] == 700
    samples = open_samples(data_for(out), model_for(out), "train")
    padded = 0
    for i in range(300):
        sample = samples.sample(i)
        real = int(sample["padding_mask"].sum())
        assert sample["padding_mask"][:real].all()
        assert (sample["tokens"][real:] == 700).all() and not (sample["tokens"][:real] == 700).any()
        assert not sample["token_types"].any()
        assert (sample["masked_positions"] < real).all() and not (sample["labels"] == 700).any()
        padded += 64 - real
    assert padded > 300
