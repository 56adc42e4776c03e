"""Hugging Face directories that are damaged, of another model or have no counterpart: each refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from ds_vcycle import cli
from ds_vcycle.checkpoint.offline.change_of_level import coalesce_checkpoint
from ds_vcycle.checkpoint.offline.processes import Processes
from ds_vcycle.config import UserError, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.sharding.placement import Layout
from tests.huggingface_models import change_config, change_tensors, save_model, tensors_in
from tests.operator_cases import config_for, random_weights
from tests.stored import store_wholes

_QKV = "transformer.h.1.attn.c_attn.weight"
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
_TIED = "bert.embeddings.word_embeddings.weight and cls.predictions.decoder.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per kind of model, and one in several files."""
    root = tmp_path_factory.mktemp("originals")
    for name in ("gpt2", "megatron-bert", "bert", "bert encoder"):
        save_model(name, root / name)
    save_model("gpt2", root / "files", shard="20KB")
    return root


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda path: change_config(path, **changes)


def _tensors(drop: str = "", **changes: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: change_tensors(path, drop=drop, **changes)


def _named(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: change_tensors(path, **{name: value})


def _truncated(path: Path) -> None:
    with (path / "model.safetensors").open("rb+") as file:
        file.truncate(5000)


def _as_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _other_file(path: Path) -> None:
    _listed(path, "transformer.ln_f.bias", "model-00099.safetensors")


def _not_there(path: Path) -> None:
    _listed(path, "transformer.ln_f.scale", "model-00002-of-00010.safetensors")


def _listed(path: Path, name: str, file: str) -> None:
    index = path / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    assert file == "model-00099.safetensors" or file in tree["weight_map"].values()
    tree["weight_map"][name] = file
    index.write_text(json.dumps(tree))


def _listing_nothing(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def _elsewhere(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../model.safetensors"}}')


def _bottomless(path: Path) -> None:
    (path / "config.json").write_text("[" * 100_000)


def _index_beside(path: Path) -> None:
    """The weights as a shard with an index, and as a whole."""
    shutil.copyfile(path / "model.safetensors", path / "model-1.safetensors")
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        listed = dict.fromkeys(opened.keys(), "model-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def _without_file(path: Path) -> None:
    next(path.glob("model-00002-*")).unlink()


# what is wrong -> (model, how it is made so, further arguments, what is said)
DIRECTORIES: dict[str, tuple[str, Callable[[Path], None], list[str], str]] = {
    "a tensor is missing": ("gpt2", _tensors(_QKV), [], rf"lacks tensors .* config.json describes: {_QKV};"),
    "a third of the attention": (
        "bert", _tensors("bert.encoder.layer.0.attention.self.key.bias"), [], "lacks .*layer.0.attention.self.key.bias;"
    ),
    "half a head": (
        "bert", _tensors("cls.predictions.transform.dense.bias"), [], "lacks .*cls.predictions.transform.dense.bias;"
    ),
    "a tensor is left over": ("gpt2", _named("score.weight", torch.ones(2)), [], "no place for: score.weight"),
    "fewer layers than there are": ("gpt2", _config(n_layer=2), [], "no place for: transformer.h.2.attn.c_attn.bias"),
    "more layers than there are": ("bert", _config(num_hidden_layers=4), [], "lacks .*bert.encoder.layer.3.attention"),
    "another shape": (
        "gpt2", _config(n_inner=60), [], r"transformer.h.0.mlp.c_fc.weight has shape \[42, 66\], .* says \[42, 60\]"
    ),
    "other positions": (
        "bert", _config(max_position_embeddings=18), [], r"position_embeddings.weight has shape \[17, 42\].*\[18, 42\]"
    ),
    "tied, and not equal": (
        "bert", _named("cls.predictions.decoder.weight", torch.ones(101, 42)), [], f"{_TIED} differ.*tie_word_emb"
    ),
    "quantised": ("gpt2", _named(_QKV, torch.ones(42, 126, dtype=torch.int8)), [], f"{_QKV} is I8; only F32"),
    "a tied bias that differs": (
        "bert", _named("cls.predictions.decoder.bias", torch.ones(101)), [],
        "cls.predictions.bias and cls.predictions.decoder.bias differ.*remove the one",
    ),
    "a tied bias of one number": (
        "bert", _tensors(**{name: torch.tensor(1.0) for name in _BIASES}), [], r"predictions.bias has shape \[\]"
    ),
    "a quantised copy": (
        "bert", _named("cls.predictions.decoder.bias", torch.ones(101, dtype=torch.int8)), [], "decoder.bias is I8;"
    ),
    "truncated": ("gpt2", _truncated, [], "model.safetensors is damaged: no safetensors file"),
    "a pickle": ("gpt2", _as_pickle, [], "neither model.safetensors nor .*it has pytorch_model.bin: load it with"),
    "a file is missing": ("files", _without_file, [], "model-00002-of-.*, which .*index.json lists, is missing"),
    "the index names a file that is none": ("files", _other_file, [], "00099.safetensors, which .* lists, is missing"),
    "the index lists nothing": ("files", _listing_nothing, [], "n_layer=3, but .* has only 0 tensors"),
    "the index leads elsewhere": ("files", _elsewhere, [], "'../model.safetensors' leads out of the directory"),
    "the index is of other files": ("files", _not_there, [], "index.json is damaged: transformer.ln_f.scale is listed"),
    "no config.json": ("gpt2", lambda path: (path / "config.json").unlink(), [], "config.json cannot be read"),
    "no JSON": ("gpt2", lambda path: (path / "config.json").write_text("{"), [], "config.json is damaged"),
    "another model": ("gpt2", _config(model_type="llama"), [], "model_type=llama cannot be converted; possible: gpt2"),
    "a size is missing": ("bert", _config(num_attention_heads=...), [], "config.json lacks num_attention_heads"),
    "more layers than tensors": ("gpt2", _config(n_layer=10**12), [], r"n_layer=1000000000000, but .* only 40 tensors"),
    "layers that differ": (
        "gpt2", _config(per_layer_config={"1": {"n_inner": 8}}), [], "per_layer_config=.*n_inner.* has no counterpart"
    ),
    "heads that do not divide": ("gpt2", _config(n_head=5), [], "hidden=42 is not a multiple of heads=5"),
    "scores by layer": (
        "gpt2", _config(scale_attn_by_inverse_layer_idx=True), [], "scale_attn_by_inverse_layer_idx=true has no"
    ),
    "another activation": ("bert", _config(hidden_act="relu"), [], "hidden_act=relu has no counterpart"),
    "relative positions": (
        "bert", _config(position_embedding_type="relative_key"), [], "position_embedding_type=relative_key has no"
    ),
    "three token types": ("megatron-bert", _config(type_vocab_size=3), [], "type_vocab_size=3 has no counterpart"),
    "two dropouts": ("gpt2", _config(embd_pdrop=0.0), [], "embd_pdrop=0.0 and resid_pdrop=0.1 are one dropout here"),
    "a decoder": ("bert", _config(is_decoder=True), [], "is_decoder=true has no counterpart"),
    "an override of a size": (
        "gpt2", _config(), ["model.hidden=48"], r"model.hidden=48, but .*config.json is of a model with 42 \(n_embd\)"
    ),
    "a larger vocabulary": ("gpt2", _config(), ["model.vocab_size=128"], "model.vocab_size=128, but .* with 101"),
    "other heads": ("gpt2", _config(), ["model.kv_groups=2"], "model.kv_groups=2, but .* with 6; remove it"),
    "another scale": (
        "gpt2", _config(), ["model.megatron.softmax_scale=1.0"], "model.megatron.softmax_scale=1.0 changes"
    ),
    "no such key": ("gpt2", _config(), ["model.hiden=42"], "model.hiden"),
    "two names of a size": ("gpt2", _config(hidden_size=99), [], "hidden_size=99 and n_embd=42 are the same setting"),
    "a list for a model": ("gpt2", _config(model_type=["gpt2"]), [], "model_type=.*cannot be converted"),
    "a list for an activation": ("bert", _config(hidden_act=["gelu"]), [], "hidden_act=.*expected a name in quotes"),
    "a bottomless config": ("gpt2", _bottomless, [], "config.json is damaged"),
    "an old and a new name": (
        "bert", _named("bert.encoder.layer.0.output.LayerNorm.gamma", torch.zeros(42)), [], "has one tensor twice"
    ),
    "an index and a whole": ("gpt2", _index_beside, [], "has both model.safetensors and model.safetensors.index.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIRECTORIES)
def test_directories(originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    model, spoil, further, said = DIRECTORIES[case]
    shutil.copytree(originals / model, tmp_path / "hf")
    spoil(tmp_path / "hf")
    _refused(capsys, said, "convert", "--from", tmp_path / "hf", "--to", tmp_path / "to", *further)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def _refused(capsys: pytest.CaptureFixture[str], said: str, *arguments: object) -> None:
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds-vcycle: error: ") and re.search(said, error), error


def test_a_run_file_of_another_model(originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {
        "model": {
            "architecture": "bert", "layers": 3, "hidden": 42, "heads": 6, "ffn": 66, "sequence_length": 17,
            "vocab_size": 101, "norm_placement": "post", "sentence_order": True,
        },
        "training": {"global_batch": 2, "micro_batch": 1}, "data": {"path": "unused"}, "cycle": {"kind": "flat"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    arguments = ["convert", "--from", originals / "bert", "--to", tmp_path / "to", "--config", tmp_path / "run.yaml"]
    _refused(capsys, r"run.yaml: model.norm_eps=1e-05, but .* with 1e-12 \(layer_norm_eps\); set", *arguments)
    assert cli.run([str(argument) for argument in [*arguments, "model.norm_eps=1e-12"]]) == 0


def test_ranks_of_a_launch_would_write_the_same_directory(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["convert", "--from", str(originals / "gpt2"), "--to", str(tmp_path / "to")]) == 2
    assert "the work of one process" in capsys.readouterr().err
    two = Processes(rank=0, world_size=2, gather=lambda value: [value, value], barrier=lambda: None)
    with pytest.raises(UserError, match=r"directory is written by one process; .* --format store"):
        coalesce_checkpoint(originals / "gpt2", tmp_path / "to", overrides=["levels.1.layers=1"], processes=two)
    assert not list(tmp_path.iterdir())


def test_targets(originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = tmp_path / "hf", tmp_path / "other"
    shutil.copytree(originals / "gpt2", source)
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    convert = ["convert", "--from", source, "--to"]
    _refused(capsys, "--to .*other exists", *convert, other)
    _refused(capsys, "--to .*other is no checkpoint, so --overwrite", *convert, other, "--overwrite")
    _refused(capsys, "is no Hugging Face directory", *convert, other, "--format", "huggingface", "--overwrite")
    _refused(capsys, "holds the checkpoint that is read", *convert, source, "--format", "huggingface", "--overwrite")
    assert cli.run([str(argument) for argument in [*convert, tmp_path / "store"]]) == 0
    back = ["convert", "--from", tmp_path / "store", "--to", tmp_path / "back"]
    _refused(capsys, "--max-shard-size 5 apples: give a size like 5GB", *back, "--max-shard-size", "5 apples")
    _refused(capsys, "model.hidden=3: .*store records its own configuration", *back, "model.hidden=3")
    _refused(capsys, "--format store: .*--tp, --dp or --zero", *back, "--format", "store")
    _refused(capsys, "--config .*records its own configuration", *back, "--config", "run.yaml")
    _refused(capsys, "nothing does not exist", "convert", "--from", tmp_path / "nothing", "--to", tmp_path / "back")
    _refused(capsys, "hf is a Hugging Face directory; make a checkpoint of it with ds-vcycle conv", "inspect", source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "other", "store"]
    assert tensors_in(source).keys() == tensors_in(originals / "gpt2").keys()


def test_a_model_without_a_head_cannot_change_its_level(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, small = originals / "bert encoder", ["--to", tmp_path / "small", "levels.1.layers=3"]
    _refused(capsys, "encoder lacks lm_head.dense.weight.*training.init_from", "coalesce", "--from", source, *small)
    assert cli.run(["convert", "--from", str(source), "--to", str(tmp_path / "store")]) == 0
    _refused(capsys, "store lacks lm_head.dense.weight", "coalesce", "--from", tmp_path / "store", *small)


def test_half_of_a_head_pair_is_no_class_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A masked-token model recorded with a sentence-order head it does not have: for a run, not for an export."""
    source = save_model("megatron-bert, tanh", tmp_path / "hf")
    arguments = ["convert", "--from", source, "--to", tmp_path / "store", "model.sentence_order=true"]
    assert cli.run([str(argument) for argument in arguments]) == 0
    assert "missing there, and so not in it: binary_head.weight, binary_head.bias, pool" in capsys.readouterr().out
    _refused(capsys, "binary_head.weight, .* are missing, and transformers has no class of MegatronBert that lacks",
             "convert", "--from", tmp_path / "store", "--to", tmp_path / "to")  # fmt: skip


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        ("llama", {}, "model.position=rope has no counterpart in transformers' GPT-2 and BERT"),
        ("gpt_no_bias", {"hidden": 48}, "model.bias=false has no counterpart"),
        ("gpt", {}, "hidden=24 with heads=12 of head_dim=4 has no counterpart.*heads x head_dim"),
        ("gpt", {"hidden": 48, "kv_groups": 6}, "kv_groups=6 with heads=12"),
        ("gpt", {"hidden": 48, "megatron": {"softmax_scale": 0.5}}, "model.megatron.softmax_scale=0.5 has no"),
    ],
)
def test_models_of_ours_that_transformers_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, sizes: dict[str, Any], said: str
) -> None:
    config = config_for(model, coarse={}, sizes={"layers": 2, **sizes})
    config = parse_config(config.model_dump(mode="json") | {"cycle": {"kind": "flat"}, "levels": []})
    (level,) = resolve_levels(config)
    state = {"level": 1, "config": config.model_dump(mode="json"), "adam_step": 0}
    weights = {"master": random_weights(level.shape, seed=1)}
    store_wholes(tmp_path / "store", weights, level.shape, Layout(world_size=1), state)
    _refused(capsys, said, "convert", "--from", tmp_path / "store", "--to", tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
