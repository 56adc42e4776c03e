"""What DeepSpeed's native files can look like, and what is told of them."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vcycle import cli
from ds_vcycle.checkpoint.deepspeed.files import is_deepspeed
from ds_vcycle.checkpoint.deepspeed.loading import load_value
from ds_vcycle.checkpoint.manifest import CheckpointError, read_manifest
from ds_vcycle.checkpoint.offline.convert_deepspeed import from_deepspeed, to_universal
from ds_vcycle.config import UserError
from tests.deepspeed_files import GATED, PLAIN, SPLIT, Written, config_file, edit, stored, wholes, write_native
from tests.stored import differing, load_wholes

_WORDS = "embedding.word_embeddings.weight"

VARIANTS = {
    "three ranks": Written(case=PLAIN, dp=3),
    "seven ranks": Written(case=PLAIN, dp=7),
    "three ranks, stage 3": Written(case=SPLIT, dp=3),
    "more ranks than elements of a norm": Written(case=SPLIT, dp=23),
    "two by two": Written(case=replace(PLAIN, tp=2)),
    "gate and up rows": Written(case=GATED),
    "bf16 partitions with padding": Written(case=PLAIN, dp=3, padded=True, file_prefix="bf16_"),
    "the step of fused Adam": Written(case=PLAIN, step_in_groups=True),
    "elastic": Written(case=PLAIN, elastic=True),
    "wrapped modules": Written(case=PLAIN, prefix="module.module."),
    "empty parameters": Written(case=PLAIN, empty=True, dp=3),
    "empty parameters, stage 3": Written(case=SPLIT, empty=True),
}


@pytest.mark.parametrize("written", VARIANTS.values(), ids=list(VARIANTS))
def test_every_variant_is_read_bit_for_bit(tmp_path: Path, written: Written) -> None:
    values = wholes(written.case)
    root = write_native(tmp_path / "native", written, values)
    from_deepspeed(root / "global_step7", tmp_path / "store", config=config_file(written.case, tmp_path / "run.yaml"))
    assert differing(load_wholes(tmp_path / "store", written.case.level.shape), values) == []
    assert read_manifest(tmp_path / "store").state["adam_step"] == written.step


def test_padding_of_another_size_is_stripped_and_trained_padding_is_told(tmp_path: Path) -> None:
    """Files of TP 2 (256 rows) for a run of TP 1 (128 rows); a universal checkpoint would lose what was trained."""
    case = replace(PLAIN, tp=2)
    values = wholes(case, trained_padding=True)
    root = write_native(tmp_path / "native", Written(case=case), values)
    said = from_deepspeed(root, tmp_path / "store", config=config_file(PLAIN, tmp_path / "run.yaml"))
    assert f"rows 101 to 256 of {_WORDS}" in said and f"pad rows of {_WORDS} were not zero" in said
    found = load_wholes(tmp_path / "store", PLAIN.level.shape)
    for key, tensors in found.items():
        assert tensors[_WORDS][:101].equal(values[key][_WORDS][:101]) and not tensors[_WORDS][101:].any()
    with pytest.raises(UserError, match=rf"whose padding of {re.escape(_WORDS)} was trained"):
        to_universal(tmp_path / "store", tmp_path / "universal")


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    class Payload:
        def __init__(self, function: Any, *arguments: Any) -> None:
            self.made_of = function, arguments

        def __reduce__(self) -> Any:
            return self.made_of

    marker = tmp_path / "ran"
    root = write_native(tmp_path / "native", Written(case=PLAIN), wholes(PLAIN))
    model = root / "global_step7/mp_rank_00_model_states.pt"
    config = config_file(PLAIN, tmp_path / "run.yaml")
    edit(model, lambda tree: tree.update(args=Payload(shutil.copy, str(config), str(marker))))
    torch.load(model, weights_only=False)
    assert marker.exists()  # torch itself runs it
    marker.unlink()
    from_deepspeed(root, tmp_path / "store", config=config)
    edit(model, lambda tree: tree.update(args=Payload(os.system, f"touch {marker}")))
    marker.unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"without running what they name \(.*posix"):
        from_deepspeed(root, tmp_path / "other", config=config)
    assert not marker.exists()


def test_the_command_line_tells_whose_a_checkpoint_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: Any) -> str:
        assert cli.run(["convert", *map(str, arguments)]) == 2
        return " ".join(capsys.readouterr().err.split())

    native = write_native(tmp_path / "native", Written(case=PLAIN), wholes(PLAIN))
    store, universal = stored(tmp_path / "store", PLAIN), tmp_path / "universal"
    to_universal(store, universal)
    config = config_file(PLAIN, tmp_path / "run.yaml")
    assert all(map(is_deepspeed, (native, native / "global_step7", universal, universal / "global_step7")))
    assert not any(is_deepspeed(p) for p in (store, tmp_path, tmp_path / "nothing", config))
    to = tmp_path / "to"
    assert "give --config" in refused("--from", native, "--to", to)
    assert "convert it to a checkpoint first" in refused("--from", native, "--to", to, "--format", "huggingface")
    form = ("--format", "deepspeed-universal")
    assert "convert it to a checkpoint first" in refused("--from", native, "--to", to, *form)
    assert "records its own configuration" in refused("--from", store, "--to", to, "--config", config, *form)
    assert "exists" in refused("--from", store, "--to", universal, *form)
    assert "is no universal DeepSpeed checkpoint" in refused("--from", store, "--to", native, "--overwrite", *form)
    shutil.copytree(universal, native, dirs_exist_ok=True, ignore=shutil.ignore_patterns("mp_rank*"))
    (native / "latest").write_text("global_step9")
    assert "names 'global_step9', which is not there" in refused("--from", native, "--to", to, "--config", config)
    assert cli.run(["convert", "--from", str(native / "global_step7"), "--to", str(to), "--config", str(config)]) == 0
    assert "Adam's moments of step 7" in capsys.readouterr().out


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    torch.save({"weight": torch.full((1000,), 0.5)}, path)
    assert load_value(path)["weight"].sum() == 500
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((8,), 0.5).numpy().tobytes()) + 2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"states\.pt is damaged.*checksum of .*data/0 does not match"):
        load_value(path)
