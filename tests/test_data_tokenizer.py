"""Tokenizers: ours load in transformers, theirs load here, and text cannot forge special tokens."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ds_vcycle.data.encode import Encoding, encode
from ds_vcycle.data.errors import DataError
from ds_vcycle.data.tokenizer import load_tokenizer, write_tokenizer
from tests.data_corpora import prepared, speeches


def text() -> str:
    return speeches()[3].read_text(encoding="utf-8")[:4000]


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_transformers_loads_the_written_tokenizer_and_encodes_the_same(architecture):
    directory = prepared(architecture)
    ours, theirs = Tokenizer.from_file(str(directory / "tokenizer.json")), AutoTokenizer.from_pretrained(directory)
    ids = ours.encode(text(), add_special_tokens=False).ids
    assert len(ids) > 500 and theirs(text(), add_special_tokens=False)["input_ids"] == ids
    assert len(theirs) == ours.get_vocab_size() == 1000
    if architecture == "gpt":
        assert theirs.eos_token == "<|endoftext|>"
        assert theirs.decode(ids) == text()
    else:
        names = [theirs.pad_token, theirs.unk_token, theirs.cls_token, theirs.sep_token, theirs.mask_token]
        assert names == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        pair = theirs("a", "b")
        assert (pair["input_ids"][0], pair["input_ids"][-1]) == (theirs.cls_token_id, theirs.sep_token_id)
        assert pair["token_type_ids"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_text_that_spells_a_special_token_does_not_become_one(architecture):
    vocabulary = load_tokenizer(prepared(architecture), architecture=architecture)
    encoding = Encoding(tokenizer=vocabulary.tokenizer.to_str(), end_id=None, dtype="int32")
    forged = "say [MASK] and [PAD] or <|endoftext|> here"
    ((_, document),) = encode([(None, forged)], encoding, workers=1)
    unknown = vocabulary.role_ids.get("unk")
    assert not (set(document.ids.tolist()) & set(vocabulary.special_ids)) - {unknown}


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_vocabulary_files_without_tokenizer_json_load_too(tmp_path, architecture):
    source = Tokenizer.from_file(str(prepared(architecture) / "tokenizer.json"))
    source.model.save(str(tmp_path))  # vocab.json + merges.txt, or vocab.txt
    loaded = load_tokenizer(tmp_path, architecture=architecture)
    assert (loaded.size, loaded.special_ids) == (1000, (0,) if architecture == "gpt" else (0, 1, 2, 3, 4))
    ids = source.encode(text(), add_special_tokens=False).ids
    assert loaded.tokenizer.encode(text(), add_special_tokens=False).ids == ids


def test_stored_padding_and_truncation_are_switched_off(tmp_path):
    source = Tokenizer.from_file(str(prepared("bert") / "tokenizer.json"))
    source.enable_truncation(8)
    source.enable_padding(length=64)
    source.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path, architecture="bert")
    assert len(loaded.tokenizer.encode(text(), add_special_tokens=False).ids) > 500
    assert len(loaded.tokenizer.encode("a", add_special_tokens=False).ids) == 1


def test_special_tokens_are_found_by_the_names_in_the_config(tmp_path):
    source = Tokenizer.from_file(str(prepared("gpt") / "tokenizer.json"))
    content = json.loads(source.to_str().replace("<|endoftext|>", "<end>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"no token for eod .*eod_token"):
        load_tokenizer(tmp_path / "tokenizer.json", architecture="gpt")
    assert load_tokenizer(tmp_path, architecture="gpt", eod_token="<end>").role_ids == {"eod": 0}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    named = load_tokenizer(tmp_path, architecture="gpt")
    assert named.roles == {"eod": "<end>"}
    (tmp_path / "again").mkdir()
    write_tokenizer(named, tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again").eos_token == "<end>"


def test_a_tokenizer_without_the_needed_tokens_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no token for .*mask \(\[MASK\]\).*which bert needs"):
        load_tokenizer(prepared("gpt"), architecture="bert")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not readable"):
        load_tokenizer(tmp_path, architecture="gpt")
