"""Changes of level on Hugging Face directories, and a run that starts from one and becomes one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from ds_vcycle import cli
from ds_vcycle.checkpoint.recorded import recorded
from ds_vcycle.checkpoint.store import open_checkpoint
from ds_vcycle.cycle.runner import run_training
from ds_vcycle.levels import resolve_levels
from ds_vcycle.model.initial import initial_slice
from ds_vcycle.schema import parameters
from tests.dist.cases_resume import Attempt
from tests.huggingface_models import level_of, logits_of, save_model, tensors_in
from tests.model_level import batch_for
from tests.operator_models import single_process
from tests.resumed import attempts, last_checkpoint
from tests.stored import differing, load_wholes
from tests.tiny import tiny_corpus, tiny_run

_HALF = {
    "gpt2": {"n_layer": 1, "n_embd": 21, "n_head": 3, "n_inner": 33},
    "megatron-bert": {"num_hidden_layers": 1, "hidden_size": 21, "num_attention_heads": 3, "intermediate_size": 33},
    "bert": {"num_hidden_layers": 1, "hidden_size": 21, "num_attention_heads": 3, "intermediate_size": 33},
}
_AUTO = {"gpt2": "AutoModelForCausalLM", "megatron-bert": "AutoModelForPreTraining", "bert": "AutoModelForPreTraining"}

single = pytest.fixture(single_process, scope="module")


def verb(*arguments: object) -> None:
    assert cli.run([str(argument) for argument in arguments]) == 0


@pytest.mark.parametrize("name", _HALF)
def test_coalesce_of_a_directory_is_that_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    """Straight to a directory, and by way of two checkpoints: the same bits; so is refine with what is kept of both."""
    source = save_model(name, tmp_path / "large")
    verb("convert", "--from", source, "--to", tmp_path / "fine")
    policies = ["levels.1.layers=1", "operators.groupings.ffn=stack"]
    verb("coalesce", "--from", tmp_path / "fine", "--to", tmp_path / "coarse", *policies)
    verb("convert", "--from", tmp_path / "coarse", "--to", tmp_path / "by_way")
    verb("coalesce", "--from", source, "--to", tmp_path / "straight", *policies)
    found, wanted = tensors_in(tmp_path / "straight"), tensors_in(tmp_path / "by_way")
    assert found.keys() == wanted.keys() and all(found[key].equal(wanted[key]) for key in found)
    assert len(found) < len(tensors_in(source))
    small = save_model(name, tmp_path / "small", **_HALF[name])
    verb("refine", "--fine", source, "--coarse", small, "--to", tmp_path / "blended", "--alpha", 0.75, "--beta", 0.5,
         "--format", "store", *policies)  # fmt: skip
    verb("convert", "--from", small, "--to", tmp_path / "trained")
    verb("refine", "--fine", tmp_path / "fine", "--coarse", tmp_path / "trained", "--to", tmp_path / "too",
         "--alpha", 0.75, "--beta", 0.5, *policies)  # fmt: skip
    shape = level_of(tmp_path / "fine").shape
    assert differing(load_wholes(tmp_path / "blended", shape), load_wholes(tmp_path / "too", shape)) == []


@pytest.mark.parametrize("name", _HALF)
def test_transformers_computes_the_small_models_logits_with_the_large_one(tmp_path: Path, name: str) -> None:
    """De-coalesced at alpha 1, beta 0, a model of twice the width and three times the depth does what the small did."""
    large, small = save_model(name, tmp_path / "large"), save_model(name, tmp_path / "small", **_HALF[name])
    config = {
        "model": {
            "architecture": "gpt" if name == "gpt2" else "bert", "layers": 3, "hidden": 42, "heads": 6, "ffn": 66,
            "sequence_length": 17, "vocab_size": 101, "activation": "gelu_tanh" if name == "gpt2" else "gelu",
            "norm_eps": 1e-5 if name == "gpt2" else 1e-12, "norm_placement": "post" if name == "bert" else "pre",
            "sentence_order": name != "gpt2",
        },
        "levels": [{}, {"layers": 1}], "operators": {"depth_residual": "first"},
        "training": {"global_batch": 2, "micro_batch": 1}, "data": {"path": "unused"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    verb("refine", "--fine", large, "--coarse", small, "--to", tmp_path / "to", "--config", tmp_path / "run.yaml",
         "--alpha", 1, "--beta", 0)  # fmt: skip
    verb("convert", "--from", small, "--to", tmp_path / "store")
    batch = batch_for(level_of(tmp_path / "store"))
    found, wanted = (logits_of(path, _AUTO[name], batch) for path in (tmp_path / "to", small))
    real = batch.get("padding_mask", torch.ones(batch["tokens"].shape, dtype=torch.bool))
    assert wanted["logits"].std() > 0.5
    torch.testing.assert_close(found["logits"][real], wanted["logits"][real], rtol=0, atol=1e-4)


def test_the_configuration_of_a_run_directory_will_do(single: None, tmp_path: Path) -> None:
    """``--config RUN/config.yaml``: resolved, with every default; its levels and policies are the checkpoint's."""
    source = save_model("gpt2", tmp_path / "hf", vocab_size=301, n_embd=32, n_head=4, n_inner=128, n_layer=4)
    changes = {
        "model.activation": "gelu_tanh", "model.sequence_length": 17, "operators.depth_residual": "first",
        "cycle": {"kind": "flat", "flat": {"steps": 1, "warmup_steps": 0}},
    }  # fmt: skip
    config = tiny_run(tmp_path / "run", "gpt", changes=changes)
    run_training(config)
    verb("convert", "--from", source, "--to", tmp_path / "store", "--config", tmp_path / "run" / "config.yaml")
    with open_checkpoint(tmp_path / "store") as checkpoint:
        held = recorded(checkpoint).config
    assert held == config and held.operators.depth_residual == "first"


def _encoder(tmp_path: Path) -> dict[str, Any]:
    """A checkpoint of an encoder without heads, and the changes of a run of one step that starts from it."""
    sizes = {"vocab_size": 301, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    further = {"intermediate_size": 128, "max_position_embeddings": 32, "layer_norm_eps": 1e-5}
    source = save_model("bert encoder", tmp_path / "hf", **sizes, **further)
    verb("convert", "--from", source, "--to", tmp_path / "start")
    changes = {
        "model.norm_placement": "post", "training.init_from": str(tmp_path / "start"), "lr.peak": 1e-60,
        "lr.warmup_steps": 0, "cycle": {"kind": "flat", "flat": {"steps": 1, "warmup_steps": 0}},
    }  # fmt: skip
    return changes


def test_a_run_from_an_encoder_and_its_export(tmp_path: Path) -> None:
    """The encoder comes from the directory, the head from the run's seed, under TP 2; the export has the tokenizer.

    With a learning rate of next to nothing the run must end with the bits it started from.
    """
    changes = _encoder(tmp_path)
    config = tiny_run(tmp_path / "run", "bert", tp=2, changes=changes)
    (outcome,) = attempts(Attempt(config=config))
    assert outcome.text == "finished"

    (level,) = resolve_levels(config)
    held = load_wholes(last_checkpoint(config.run_dir), level.shape)["master"]
    start = {p.name: p for p in parameters(level.shape) if p.name.startswith(("lm_head", "output_layer", "binary"))}
    with open_checkpoint(tmp_path / "start") as checkpoint:
        assert set(checkpoint.state["missing"]) == start.keys()
        for parameter in parameters(level.shape):
            if parameter.name in start:
                seed = config.training.seed
                wanted = initial_slice(parameter, seed=seed, std=0.02, layers=4, tp_size=1, tp_rank=0)
            else:
                wanted = checkpoint.read(
                    parameter, tp=1, tp_rank=0, start=0, length=parameter.numel, key="master"
                ).view(parameter.shape)
            assert held[parameter.name].equal(wanted), parameter.name

    verb("convert", "--from", f"{config.run_dir}@1", "--to", tmp_path / "to")
    exported = tensors_in(tmp_path / "to")
    assert all(exported[f"bert.{name}"].equal(value) for name, value in tensors_in(tmp_path / "hf").items())
    wanted = logits_of(tmp_path / "to", "AutoModelForPreTraining", batch_for(level))
    assert wanted["logits"].shape == (3, 32, 301)
    text = "the union of the states"
    ids = AutoTokenizer.from_pretrained(tmp_path / "to")(text)["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(tiny_corpus("bert"))(text)["input_ids"] and len(ids) > 3
    shutil.rmtree(tmp_path / "to")


def test_what_an_encoder_lacks_is_said(single: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_training(tiny_run(tmp_path / "run", "bert", changes=_encoder(tmp_path)))
    said = capfd.readouterr().err
    assert "not there, and so from the seed: lm_head.dense.weight" in said
    assert "start, held-out loss " in said
