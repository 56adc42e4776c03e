"""Hugging Face directories in and out: every bit comes back, under every name, by one file or several."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from ds_vcycle import cli
from ds_vcycle.checkpoint.recorded import recorded
from ds_vcycle.checkpoint.store import StoredFragment, open_checkpoint, save
from ds_vcycle.schema import parameters
from ds_vcycle.sharding.placement import Layout
from tests.huggingface_models import (
    HEADS,
    MODELS,
    VOCABULARY,
    change_config,
    change_tensors,
    level_of,
    random_model,
    real_encoder,
    save_model,
    tensors_in,
)
from tests.memory import peak_bytes
from tests.sharded import local_slice
from tests.stored import load_wholes, store_wholes
from tests.tiny import tiny_corpus

_LAYOUTS = {
    "TP 1": Layout(world_size=1),
    "TP 2, ZeRO 3": Layout(world_size=4, tp=2, zero_stage=3),
    "TP 3": Layout(world_size=3, tp=3, zero_stage=0),
}
# Every model under TP 2, every layout with each kind of model
_CASES = [(name, "TP 2, ZeRO 3") for name in MODELS if name != "bert encoder"]
_CASES += [("gpt2", "TP 1"), ("bert", "TP 1"), ("megatron-bert", "TP 3")]


def convert(source: Path, to: Path, *further: str) -> None:
    assert cli.run(["convert", "--from", str(source), "--to", str(to), *further]) == 0


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


def stored_under(store: Path, to: Path, layout: Layout) -> Path:
    """The same weights as the ranks of another layout would save them."""
    shape = replace(level_of(store).shape, padded_vocab=128 * layout.tp)
    with open_checkpoint(store) as checkpoint:
        state = dict(checkpoint.state)
    store_wholes(to, load_wholes(store, shape), shape, layout, state)
    return to


def split_over_two(store: Path, to: Path) -> Path:
    """The same weights as two tensor-parallel ranks hold them; heads may be missing."""
    with open_checkpoint(store) as checkpoint:
        shape = recorded(checkpoint).level.shape
        shape = replace(shape, padded_vocab=-(-shape.vocab_size // 256) * 256)
        fragments = []
        for parameter in (p for p in parameters(shape) if p.name in checkpoint.manifest.parameters):
            whole = checkpoint.read(parameter, tp=1, tp_rank=0, start=0, length=parameter.numel, key="master")
            for rank in range(1 if parameter.tp_dim is None else 2):
                mine = local_slice(parameter, whole.view(parameter.shape), 2, rank).reshape(-1)
                fragments.append(
                    StoredFragment(
                        parameter=parameter, tp=2, tp_rank=rank, start=0, length=mine.numel(), tensors={"master": mine}
                    )
                )  # fmt: skip
        state = checkpoint.state
        save(to, fragments=fragments, extras={}, state=state, rank=0, world_size=1, gather=lambda value: [value],
             barrier=lambda: None)  # fmt: skip
    return to


@pytest.mark.parametrize(("name", "layout"), _CASES)
def test_there_and_back_under_any_layout(tmp_path: Path, name: str, layout: str) -> None:
    source = save_model(name, tmp_path / "hf")
    convert(source, tmp_path / "store")
    convert(stored_under(tmp_path / "store", tmp_path / "ranks", _LAYOUTS[layout]), tmp_path / "back")
    assert same(tensors_in(tmp_path / "back"), tensors_in(source))
    theirs, ours = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    assert ours["architectures"] == theirs["architectures"] == [MODELS[name][0]]
    assert {key: value for key, value in ours.items() if theirs.get(key) != value} == {}


def test_our_rows_are_per_head(tmp_path: Path) -> None:
    """The order of rows of the fused attention weight, from transformers' model itself."""
    convert(save_model("gpt2", tmp_path / "hf"), tmp_path / "store")
    held = load_wholes(tmp_path / "store", level_of(tmp_path / "store").shape)["master"]
    attention = random_model("gpt2").transformer.h[1].attn
    query, key, value = attention.c_attn.weight.detach().split(42, dim=1)  # [in, out] each
    ours = held["decoder.layers.1.self_attention.linear_qkv.weight"].view(HEADS, 3, 7, 42)
    for head in range(HEADS):
        for part, theirs in enumerate((query, key, value)):
            assert ours[head, part].equal(theirs[:, 7 * head : 7 * head + 7].t())
    assert not held["embedding.word_embeddings.weight"][VOCABULARY:].any()


def test_several_files_with_an_index(tmp_path: Path) -> None:
    """Read as transformers splits them; written with no file above the limit; transformers reads that."""
    source = save_model("gpt2", tmp_path / "hf", shard="20KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    convert(source, tmp_path / "store")
    convert(tmp_path / "store", tmp_path / "back", "--max-shard-size", "30KB")
    files = sorted((tmp_path / "back").glob("model-*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files]
    assert max(sizes) <= 30_000
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert same(tensors_in(tmp_path / "back"), tensors_in(source))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "back").state_dict()
    assert same(loaded, random_model("gpt2").state_dict())


def test_older_files(tmp_path: Path) -> None:
    """No prefix, masks and position numbers among the weights, gamma and beta, tied tensors twice, half precision."""
    for name, base in (("gpt2", "transformer."), ("bert", "bert.")):
        source = save_model(name, tmp_path / name)
        held = {key.removeprefix(base): value for key, value in tensors_in(source).items()}
        if name == "gpt2":
            held |= {"lm_head.weight": held["wte.weight"].clone(), "h.0.attn.bias": torch.ones(1, 1, 17, 17)}
            held["h.2.attn.masked_bias"] = torch.tensor(-1e4)
        else:
            held = {
                key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
                for key, value in held.items()
            }
            held["embeddings.position_ids"] = torch.arange(17)[None]
            held["cls.predictions.decoder.bias"] = held.pop("cls.predictions.bias")
        for path in source.glob("*.safetensors"):
            path.unlink()
        change_tensors(source, **{key: v.half() if v.is_floating_point() else v for key, v in held.items()})
        convert(source, tmp_path / f"{name}-store")
        convert(tmp_path / f"{name}-store", tmp_path / f"{name}-back")
        wanted = {key: value.half().float() for key, value in tensors_in(save_model(name, tmp_path / "again")).items()}
        assert same(tensors_in(tmp_path / f"{name}-back"), wanted)


def test_what_the_overrides_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No pooler and sentence-order head, no padded vocabulary, shorter sequences: each is named."""
    source = save_model("megatron-bert", tmp_path / "hf")
    sizes = ["model.sentence_order=false", "model.vocab_size=99", "model.sequence_length=12"]
    convert(source, tmp_path / "store", *sizes)
    said = capsys.readouterr().out
    for part in (
        "rows 99 to 101 of bert.embeddings.word_embeddings.weight",
        "rows 12 to 17 of bert.embeddings.position_embeddings.weight",
        "bert.pooler.dense.bias",
        "cls.seq_relationship.weight",
    ):
        assert part in said
    convert(tmp_path / "store", tmp_path / "back")
    wanted = {
        key: value[:99] if len(value) == VOCABULARY else value[:12] if "position" in key else value
        for key, value in tensors_in(source).items()
        if "pooler" not in key and "seq_relationship" not in key
    }
    assert same(tensors_in(tmp_path / "back"), wanted)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["MegatronBertForMaskedLM"]


@pytest.mark.parametrize("real", [False, True], ids=["odd sizes", "all-MiniLM-L6-v2"])
def test_an_encoder_without_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str], real: bool) -> None:
    """What is missing is reported and stays missing: nothing is made up for it."""
    source = real_encoder() if real else save_model("bert encoder", tmp_path / "hf")
    convert(source, tmp_path / "store")
    said = capsys.readouterr().out
    shape = level_of(tmp_path / "store").shape
    heads = [p.name for p in parameters(shape) if p.name.startswith(("lm_head", "output_layer", "binary_head"))]
    assert f"missing there, and so not in it: {', '.join(heads)};" in said and len(heads) == 7
    with open_checkpoint(tmp_path / "store") as checkpoint:
        assert checkpoint.state["missing"] == heads
        assert not checkpoint.manifest.parameters.keys() & set(heads)
    convert(split_over_two(tmp_path / "store", tmp_path / "ranks"), tmp_path / "back")
    held = {name: value for name, value in tensors_in(source).items() if not name.endswith("position_ids")}
    assert same(tensors_in(tmp_path / "back"), held)
    assert len(held) == (103 if real else 55)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["BertModel"]
    tokenizer = [name for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json") if real]
    assert all((tmp_path / "back" / name).read_bytes() == (source / name).read_bytes() for name in tokenizer)


def test_the_tokenizer_of_the_corpus_comes_along(tmp_path: Path) -> None:
    """A checkpoint of a run on a prepared corpus; the ids of the special tokens are the corpus's."""
    corpus = tiny_corpus("gpt")
    sizes = {"vocab_size": 301, "bos_token_id": None, "eos_token_id": None}
    source = save_model("gpt2", tmp_path / "hf", **sizes)
    convert(source, tmp_path / "store", f"data.path={corpus}")
    convert(tmp_path / "store", tmp_path / "back")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    text = "Fellow-Citizens of the Senate and House of Representatives"
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(corpus)(text)["input_ids"]
    end = json.loads((corpus / "prepare.json").read_text())["role_ids"]["eod"]
    assert tokenizer.eos_token_id == end
    config, generation = (
        json.loads((tmp_path / "back" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == (end, end, None)
    assert generation["eos_token_id"] == end
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "back").generation_config.eos_token_id == end


def test_a_new_directory_takes_the_place_of_an_old_one_whole(tmp_path: Path) -> None:
    convert(save_model("gpt2", tmp_path / "hf", shard="20KB"), tmp_path / "store")
    change_config(save_model("gpt2", tmp_path / "to", shard="20KB"), n_layer=7)
    convert(tmp_path / "store", tmp_path / "to", "--overwrite")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "store", "to"]


def test_memory_is_a_few_copies_of_a_parameter_however_many_there_are(tmp_path: Path) -> None:
    source = save_model("gpt2", tmp_path / "hf", n_layer=24)
    largest = max(value.nbytes for value in tensors_in(source).values())
    total = sum(value.nbytes for value in tensors_in(source).values())
    mapped = {path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    assert total > 50 * largest
    into = peak_bytes(lambda: convert(source, tmp_path / "store"), mapped)
    mapped |= {path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    out = peak_bytes(lambda: convert(tmp_path / "store", tmp_path / "back"), mapped)
    assert largest < into < 4 * largest and largest < out < 4 * largest


def test_the_list_of_verbs_names_all_that_convert_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    line = said.partition(" convert ")[2].partition(" inspect ")[0]
    assert all(form in line for form in ("Hugging Face", "DeepSpeed's universal", "native", "another layout")), line
