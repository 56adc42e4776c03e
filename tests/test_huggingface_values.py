"""What stands in a Hugging Face directory: weights that are no numbers, settings of a wrong kind, special tokens.

Each is refused by name, or comes back.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, GPT2Config, GPT2LMHeadModel

from ds_vcycle import cli
from ds_vcycle.checkpoint.huggingface.settings import read_settings
from ds_vcycle.checkpoint.store import open_checkpoint
from ds_vcycle.config import UserError
from ds_vcycle.sharding.placement import Layout
from tests.huggingface_models import change_config, change_tensors, level_of, logits_of, save_model, tensors_in
from tests.model_level import batch_for
from tests.stored import load_wholes, store_wholes

_QKV = "transformer.h.1.attn.c_attn.weight"
_QUERY = "bert.encoder.layer.2.attention.self.query.bias"
_SIZES: tuple[Any, ...] = ("12", 12.0, True, None, [12], {})
_SWITCHES: tuple[Any, ...] = (1, 0, "true", None, [True])
_NUMBERS: tuple[Any, ...] = ("0.1", True, None, [0.1])
_GPT2 = {
    "n_layer": _SIZES, "n_embd": _SIZES, "n_head": _SIZES, "n_positions": _SIZES, "vocab_size": _SIZES,
    "n_inner": tuple(value for value in _SIZES if value is not None), "layer_norm_epsilon": _NUMBERS,
    "initializer_range": _NUMBERS, "resid_pdrop": _NUMBERS, "embd_pdrop": _NUMBERS, "attn_pdrop": _NUMBERS,
    "activation_function": (1, True, None, ["gelu"]), "tie_word_embeddings": _SWITCHES, "scale_attn_weights": _SWITCHES,
    "scale_attn_by_inverse_layer_idx": _SWITCHES, "reorder_and_upcast_attn": _SWITCHES,
    "add_cross_attention": _SWITCHES, "bos_token_id": ("0", 0.0, True), "eos_token_id": ("0", 0.0, True, ["0"], [0.0]),
    "pad_token_id": ("0", 0.0, True),
}  # fmt: skip
_BERT = {
    "num_hidden_layers": _SIZES, "hidden_size": _SIZES, "num_attention_heads": _SIZES, "intermediate_size": _SIZES,
    "max_position_embeddings": _SIZES, "vocab_size": _SIZES, "type_vocab_size": _SIZES, "layer_norm_eps": _NUMBERS,
    "initializer_range": _NUMBERS, "hidden_dropout_prob": _NUMBERS, "attention_probs_dropout_prob": _NUMBERS,
    "hidden_act": (1, True, None, ["gelu"]), "tie_word_embeddings": _SWITCHES, "is_decoder": _SWITCHES,
    "add_cross_attention": _SWITCHES,
}  # fmt: skip
_OUT_OF_RANGE = {  # transformers does not look at these
    "n_layer": (0, -1), "n_inner": (0,), "hidden_size": (0, -3), "n_head": (0,), "layer_norm_epsilon": (0.0, -1e-5),
    "resid_pdrop": (-0.1, 1.0, float("nan")), "layer_norm_eps": (float("inf"),), "position_embedding_type": (1, True),
    "n_embd": (), "max_position_embeddings": (0,),
}  # fmt: skip


def verb(*arguments: object) -> None:
    assert cli.run([str(argument) for argument in arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said, after the bar if there was work before."""
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ds-vcycle: error: ")
    return error


def export_of(source: Path, root: Path, *overrides: str) -> Path:
    """A directory, converted to a checkpoint and back."""
    verb("convert", "--from", source, "--to", root / "store", *overrides)
    verb("convert", "--from", root / "store", "--to", root / "back")
    return root / "back"


def read(path: Path, name: str = "config.json") -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((path / name).read_text())
    return tree


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("model", "name"), [("gpt2", _QKV), ("bert", _QUERY)])
def test_weights_that_are_no_numbers_are_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, name: str, value: float
) -> None:
    """One value of one tensor, in half precision too; by convert and by coalesce."""
    source = save_model(model, tmp_path / "hf")
    spoilt = tensors_in(source)[name].half()
    spoilt.view(-1)[-1] = value
    change_tensors(source, **{name: spoilt})
    for arguments in (["convert"], ["coalesce", "levels.1.layers=1"]):
        said = refused(capsys, *arguments, "--from", source, "--to", tmp_path / "to")
        assert f"model.safetensors: {name} has a value that is {value}" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_copy_that_is_no_number_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tied tensors of NaN are not said to differ; what is left out may be anything."""
    source = save_model("gpt2", tmp_path / "hf")
    held = tensors_in(source)["transformer.wte.weight"]
    held[100, 3] = float("nan")
    change_tensors(source, **{"transformer.wte.weight": held, "lm_head.weight": held.clone()})
    said = refused(capsys, "convert", "--from", source, "--to", tmp_path / "to")
    assert "transformer.wte.weight has a value that is nan" in said and "differ" not in said
    change_tensors(source, drop="lm_head.weight")
    back = export_of(source, tmp_path, "model.vocab_size=100")
    assert tensors_in(back)["transformer.wte.weight"].equal(held[:100])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_of_no_numbers_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    """The parameter is named, and the model that was to be replaced is still there."""
    source = save_model("gpt2", tmp_path / "hf")
    verb("convert", "--from", source, "--to", tmp_path / "store")
    shape = level_of(tmp_path / "store").shape
    with open_checkpoint(tmp_path / "store") as checkpoint:
        state = dict(checkpoint.state)
    wholes = load_wholes(tmp_path / "store", shape)
    wholes["master"]["decoder.layers.2.mlp.linear_fc2.bias"][41] = value
    store_wholes(tmp_path / "spoilt", wholes, shape, Layout(world_size=2, tp=2), state)
    said = refused(capsys, "convert", "--from", tmp_path / "spoilt", "--to", source, "--overwrite")
    assert f"decoder.layers.2.mlp.linear_fc2.bias has a value that is {value}" in said and "RUN@STEP" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "spoilt", "store"]
    assert tensors_in(source).keys() == GPT2LMHeadModel.from_pretrained(source).state_dict().keys() - {"lm_head.weight"}


@pytest.mark.parametrize("kinds", [_GPT2, _BERT], ids=["gpt2", "bert"])
def test_settings_of_a_wrong_kind_are_those_that_transformers_refuses(tmp_path: Path, kinds: dict[str, Any]) -> None:
    """Every key that is read. The error names file, key and the value as JSON has it."""
    kind, theirs = ("gpt2", GPT2Config) if kinds is _GPT2 else ("bert", BertConfig)
    tree = theirs().to_dict() | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert read_settings(tmp_path).section["layers"] == 12
    for key, values in kinds.items():
        for value in values:
            with pytest.raises(Exception, match=key):
                theirs(**{key: value})
            _wrong(tmp_path, tree | {key: value}, key, value)


def test_settings_out_of_range(tmp_path: Path) -> None:
    for key, values in _OUT_OF_RANGE.items():
        theirs = GPT2Config if key in _GPT2 else BertConfig
        tree = theirs().to_dict() | {"model_type": "gpt2" if key in _GPT2 else "bert"}
        for value in values:
            _wrong(tmp_path, tree | {key: value}, key, value)


def _wrong(directory: Path, tree: dict[str, Any], key: str, value: Any) -> None:
    (directory / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_settings(directory)
    assert f"{directory / 'config.json'}: {key}={json.dumps(value)}; expected " in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ({"eos_token_id": 100}, "leaves out 100, eos_token_id in .*; keep at least model.vocab_size=101, or"),
        ({"eos_token_id": [5, 95, 97]}, "leaves out 95, 97, eos_token_id in .*; keep at least model.vocab_size=98, or"),
        ({"pad_token_id": 90}, "leaves out 90, pad_token_id in "),
    ],
)  # fmt: skip
def test_a_vocabulary_is_not_cut_before_its_special_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: dict[str, Any], said: str
) -> None:
    source = save_model("gpt2", tmp_path / "hf", **ids)
    error = refused(capsys, "convert", "--from", source, "--to", tmp_path / "to", "model.vocab_size=90")
    assert re.search(f"model.vocab_size=90 {said}", error), error
    assert not (tmp_path / "to").exists()


def test_ids_that_no_token_has_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """50256 of a small vocabulary's default configuration, -1 of older files: named, and null in the export."""
    ids = {"bos_token_id": 50256, "eos_token_id": [50256, 7], "pad_token_id": -1}
    source = save_model("gpt2", tmp_path / "hf", **ids)
    change_config(source, **ids)
    (source / "generation_config.json").unlink()
    back = export_of(source, tmp_path, "model.vocab_size=90")
    said = capsys.readouterr().out
    wanted = "the vocabulary has only 90 tokens: bos_token_id=50256, eos_token_id=50256, pad_token_id=-1\n"
    assert wanted in said and said.count("50256") == 2
    config = read(back)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, [7], None)
    assert read(back, "generation_config.json")["eos_token_id"] == [7]


def test_several_ends_come_back(tmp_path: Path) -> None:
    source = save_model("gpt2", tmp_path / "hf", eos_token_id=[3, 99], bos_token_id=4, pad_token_id=2)
    back = export_of(source, tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert read(back, name)["eos_token_id"] == [3, 99] and read(back, name)["bos_token_id"] == 4
    model = GPT2LMHeadModel.from_pretrained(back)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [3, 99]
    assert model.config.pad_token_id == 2


def test_ids_of_generation_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that name other ends for generation than config.json does; and one that cannot be read."""
    source = save_model("gpt2", tmp_path / "hf", eos_token_id=3)
    generation = source / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [3, 8, 200], "pad_token_id": 8}))
    back = export_of(source, tmp_path)
    assert read(back, "generation_config.json") == {"eos_token_id": [3, 8], "pad_token_id": 8}
    assert read(back)["eos_token_id"] == 3
    assert "101 tokens: eos_token_id=200\n" in capsys.readouterr().out
    loaded = GPT2LMHeadModel.from_pretrained(back).generation_config
    assert loaded.eos_token_id == [3, 8] and loaded.pad_token_id == 8
    for text, said in (("{", "is damaged"), ('{"eos_token_id": "3"}', 'eos_token_id="3"; expected a token id, a list')):
        generation.write_text(text)
        error = refused(capsys, "convert", "--from", tmp_path / "store", "--to", tmp_path / "again")
        assert f"{generation}" in error and said in error
        assert not (tmp_path / "again").exists()


def test_ids_that_transformers_takes_by_default(tmp_path: Path) -> None:
    """config.json does not name them: what transformers reads from the directory it reads from the export."""
    for model, wanted in (("bert", {"pad_token_id": 0}), ("gpt2", {"eos_token_id": None})):
        source = save_model(model, tmp_path / model / "hf")
        change_config(source, bos_token_id=..., eos_token_id=..., pad_token_id=...)
        back = read(export_of(source, tmp_path / model))
        assert wanted.items() <= back.items()


def test_an_untied_bert_reads_the_decoders_bias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers keeps two biases, trains and reads one: the export computes what it does, and the other is named."""
    source = save_model("bert untied", tmp_path / "hf")
    other = torch.full((101,), 7.0)
    change_tensors(source, **{"cls.predictions.bias": other})
    back = export_of(source, tmp_path)
    assert "not read: cls.predictions.bias differs from cls.predictions.decoder.bias" in capsys.readouterr().out
    batch = batch_for(level_of(tmp_path / "store"))
    wanted, found = (logits_of(path, "AutoModelForMaskedLM", batch)["logits"] for path in (source, back))
    assert found.equal(wanted)
    held = tensors_in(back)
    assert held["cls.predictions.bias"].equal(held["cls.predictions.decoder.bias"])
    assert not held["cls.predictions.bias"].equal(other)
    assert AutoModelForMaskedLM.from_pretrained(back).config.tie_word_embeddings is False


def test_tokenizer_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None: that is said. A damaged one: refused before anything is written."""
    source = save_model("gpt2", tmp_path / "hf")
    export_of(source, tmp_path)
    assert f"no tokenizer files: there are none in {source}\n" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (source / name).write_text('{"model_max_length": ')
        error = refused(capsys, "convert", "--from", tmp_path / "store", "--to", tmp_path / "to")
        assert f"{source / name} is damaged" in error and not (tmp_path / "to").exists()
        (source / name).unlink()
