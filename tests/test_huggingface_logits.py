"""What transformers computes from a directory and our models from the checkpoint, both ways, under TP 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_vcycle import cli
from tests.dist.ranks import values
from tests.huggingface_models import MODELS, level_of, logits_of, real_encoder, save_model
from tests.model_level import batch_for

_REAL = "all-MiniLM-L6-v2"


def _auto(name: str) -> str:
    """The class of transformers' that a directory is loaded by."""
    if name.startswith("gpt2"):
        return "AutoModelForCausalLM"
    kind = MODELS[name][0] if name in MODELS else "BertModel"
    return "AutoModelForMaskedLM" if kind.endswith("MaskedLM") else "AutoModel" if kind.endswith("Model") else (
        "AutoModelForPreTraining"
    )  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model as transformers saved it (``hf``), as a checkpoint (``store``), and exported again (``back``)."""
    root = tmp_path_factory.mktemp("logits")
    found = {}
    for number, name in enumerate([*MODELS, _REAL]):
        directory = found[name] = root / str(number)
        directory.mkdir()
        source = real_encoder() if name == _REAL else save_model(name, directory / "hf")
        for arguments in (["--from", source, "--to", directory / "store"],
                          ["--from", directory / "store", "--to", directory / "back"]):  # fmt: skip
            assert cli.run(["convert", *map(str, arguments)]) == 0
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_those_of_transformers(stores: dict[str, Path], tp: int) -> None:
    names = [name for name in stores if tp == 2 or name != _REAL]
    arguments = [[str(stores[name] / "store") for name in names], tp]
    ours = values(tp, "tests.dist.cases_huggingface:outputs", arguments)[0]
    for name, found in zip(names, ours, strict=True):
        level = level_of(stores[name] / "store")
        batch = batch_for(level)
        wanted = logits_of(stores[name] / "back", _auto(name), batch)
        compared = [key for key in wanted if key in found]
        expected = ["logits", "order"] if _auto(name) == "AutoModelForPreTraining" else ["logits"]
        assert compared == (["hidden"] if _auto(name) == "AutoModel" else expected)
        for key in compared:
            assert wanted[key].std() > 0.1, f"{name}: {key} hardly varies"
            assert _difference(found[key], wanted[key], batch, key) < 1e-4, f"{name}: {key}"


def test_what_is_exported_computes_what_was_imported(stores: dict[str, Path]) -> None:
    """transformers against itself, on the directory it saved and on the one we wrote: the very same bits."""
    for name, path in ((name, stores[name]) for name in MODELS):
        batch = batch_for(level_of(path / "store"))
        first = logits_of(path / "hf", _auto(name), batch)
        again = logits_of(path / "back", _auto(name), batch)
        assert first.keys() == again.keys() and all(first[key].equal(again[key]) for key in first), name


def _difference(found: Tensor, wanted: Tensor, batch: dict[str, Tensor], key: str) -> float:
    """The largest difference at real tokens."""
    difference = (found - wanted).abs()
    if key != "order" and "padding_mask" in batch:
        difference = difference[batch["padding_mask"]]
    return float(torch.max(difference))
