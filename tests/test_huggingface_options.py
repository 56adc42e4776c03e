"""Options of model.megatron in a conversion: those that change what a model computes are refused, the others kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vcycle import cli
from ds_vcycle.checkpoint.huggingface.megatron_options import HARMLESS, WITHOUT_EFFECT, changing
from ds_vcycle.model import options
from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import mesh_for
from tests.huggingface_models import save_model, tensors_in
from tests.model_level import batch_for, tiny
from tests.operator_models import single_process

_TRIED = {  # what can be tried without a GPU, at a value that is not Megatron's default
    "bias_activation_fusion": {"bias_activation_fusion": True},
    "bias_dropout_fusion": {"bias_dropout_fusion": True},
    "deterministic_mode": {"deterministic_mode": True},
    "recompute_modules": {"recompute_modules": ["mlp"]},
}

single = pytest.fixture(single_process, scope="module")


def _logits(**megatron: Any) -> Tensor:
    """Of the weights that a seed gives, whatever the options."""
    level, model = tiny(activation="gelu_tanh", recompute="selective", megatron=megatron)
    assert changing(model).keys() <= {"softmax_scale"}
    module: Any = build_model(level, model, mesh=mesh_for(1), seed=3)
    with torch.no_grad():
        found: Tensor = module.eval().logits(batch_for(level)["tokens"])
    return found


def test_harmless_options_leave_the_logits(single: None) -> None:
    plain = _logits()
    assert plain.std() > 0.01
    assert not torch.allclose(_logits(softmax_scale=3.0), plain, atol=1e-4)
    for key, given in _TRIED.items():
        assert key in HARMLESS
        torch.testing.assert_close(_logits(**given), plain, rtol=0, atol=1e-6, msg=key)


def test_every_option_is_either_harmless_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that a run takes, one by one; one that is new or unknown is refused."""
    known = options._ANYWHERE | options._TRANSFORMER_ENGINE_ONLY
    assert known == HARMLESS.union(WITHOUT_EFFECT)
    source = save_model("gpt2", tmp_path / "hf")
    for key in (*WITHOUT_EFFECT, "layernorm_zero_centered_gamma", "add_qkv_bias", "something_new"):
        _refused(capsys, source, tmp_path / "to", f"model.megatron.{key}=1.5")
    exact = save_model("gpt2 untied, erf", tmp_path / "exact")
    _refused(capsys, exact, tmp_path / "to", "model.megatron.bias_activation_fusion=true")


def _refused(capsys: pytest.CaptureFixture[str], source: Path, to: Path, override: str) -> None:
    assert cli.run(["convert", "--from", str(source), "--to", str(to), override]) == 2
    error = capsys.readouterr().err
    assert f"the overrides: {override} changes, or may change, what the model of {source}" in error
    assert not to.exists()


def test_harmless_options_are_recorded_and_exported(tmp_path: Path) -> None:
    """A fused activation that is the model's own, and defaults spelt out."""
    source = save_model("gpt2", tmp_path / "hf")
    given = ("bias_activation_fusion=true", "recompute_modules=[mlp]", "softmax_scale=null", "softmax_type=vanilla")
    overrides = [f"model.megatron.{option}" for option in given]
    assert cli.run(["convert", "--from", str(source), "--to", str(tmp_path / "store"), *overrides]) == 0
    assert cli.run(["convert", "--from", str(tmp_path / "store"), "--to", str(tmp_path / "back")]) == 0
    held, wanted = tensors_in(tmp_path / "back"), tensors_in(source)
    assert held.keys() == wanted.keys() and all(held[name].equal(wanted[name]) for name in held)
