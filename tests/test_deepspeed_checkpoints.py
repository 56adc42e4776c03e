"""Checkpoints that DeepSpeed saved come in bit for bit, and engines that load ours go on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ds_vcycle import cli
from ds_vcycle.checkpoint.manifest import read_manifest
from tests.deepspeed_case import Case
from tests.dist.ranks import values
from tests.stored import differing, load_wholes

_MODERN = {
    "activation": "swiglu", "kv_groups": 2, "position": "rope", "normalization": "rmsnorm", "tied_embeddings": False,
    "bias": False, "qk_norm": True,
}  # fmt: skip
_BERT = {"architecture": "bert", "sentence_order": True, "layers": 1}
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_DEALT = {"zero_optimization": {"round_robin_gradients": True}}
_ALIGNED = {"zero_optimization": {"parameter_alignment": True, "round_robin_gradients": True}}
SAVED = [
    Case(name="one", model={"layers": 1}),
    Case(name="dealt", stage=2, extras=_DEALT),
    Case(name="aligned", stage=1, precision="bf16", extras=_ALIGNED, model={"layers": 1, "hidden": 20, "ffn": 27}),
    Case(name="split", stage=3, model={"layers": 1, "hidden": 20, "ffn": 27}),
    Case(name="tensor", tp=2, model=_MODERN),
    Case(name="tensor_split", tp=2, stage=3, model=_BERT),
    Case(name="separate", precision="bf16", extras=_FP32_SUMS, model={"layers": 1}),
    Case(name="fresh", tp=2, model={"layers": 1}, steps=0),
]
LOADED = [
    ("one", Case(name="", tp=2, stage=2, model={"layers": 1})),
    ("tensor", Case(name="", stage=1, model=_MODERN)),
    ("tensor", Case(name="", tp=2, stage=2, model=_MODERN)),
    ("tensor_split", Case(name="", tp=2, stage=1, model=_BERT)),
    ("separate", Case(name="", stage=1, precision="bf16", extras=_FP32_SUMS, model={"layers": 1})),
    ("fresh", Case(name="", stage=2, model={"layers": 1})),
]
MISLOADED = ("one", Case(name="", stage=2, extras=_DEALT, model={"layers": 1}))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``losses``: of the two steps after the save, by case; ``loaded``: what each loading engine found, by rank."""

    root: Path
    losses: dict[str, list[float]]
    loaded: list[list[tuple[list[str], int, list[float]]]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("deepspeed")
    losses = values(2, "tests.dist.cases_deepspeed:train_and_save", [str(root), SAVED])[0]
    for case in SAVED:
        directory = root / case.name
        (directory / "run.yaml").write_text(yaml.safe_dump(case.config.model_dump(mode="json")))
        _convert(directory / "native", directory / "store", "--config", directory / "run.yaml")
    for name, overrides in {name: _loader_overrides(name) for name, _ in LOADED}.items():
        form = ["--format", "deepspeed-universal", *overrides]
        _convert(root / name / "ours", root / name / "universal", *form)
    arguments = [str(root), [*LOADED, MISLOADED], ["tensor", "dealt"]]
    loaded = values(2, "tests.dist.cases_deepspeed:load_and_train", arguments)
    return Outcome(root=root, losses={case.name: found for case, found in zip(SAVED, losses)}, loaded=loaded)


def _loader_overrides(name: str) -> list[str]:
    return ["training.zero_stage=2"] if name == "tensor_split" else []


def _convert(source: Path, to: Path, *arguments: Any) -> None:
    assert cli.run(["convert", "--from", str(source), "--to", str(to), *map(str, arguments)]) == 0


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_native_checkpoints_are_read_bit_for_bit(outcome: Outcome, case: Case) -> None:
    """Against what the engine's own fragments held when DeepSpeed saved."""
    wanted, found = (outcome.root / case.name / name for name in ("ours", "store"))
    assert differing(load_wholes(found, case.level.shape), load_wholes(wanted, case.level.shape)) == []
    state = read_manifest(found).state
    assert state["adam_step"] == read_manifest(wanted).state["adam_step"] == case.steps
    assert state["origin"]["counters"] == {"global_steps": case.steps, "global_samples": 4 * case.steps}
    assert state["origin"]["trained_padding"] == []


@pytest.mark.parametrize("index", range(len(LOADED)), ids=lambda i: f"{LOADED[i][0]}-tp{LOADED[i][1].tp}")
def test_engines_load_what_was_written_and_go_on(outcome: Outcome, index: int) -> None:
    """Masters and moments by bits on each rank; the losses are those of the engine that was saved."""
    name, case = LOADED[index]
    steps = next(saved.steps for saved in SAVED if saved.name == name)
    for rank in outcome.loaded:
        differing_tensors, adam_step, losses = rank[index]
        assert differing_tensors == []
        assert adam_step == steps
        assert losses == pytest.approx(outcome.losses[name], rel=1e-6 if case.precision == "fp32" else 1e-4)
    assert len(set(outcome.losses[name])) == 2


@pytest.mark.parametrize("name", list(dict(LOADED)))
def test_universal_checkpoints_are_read_back(outcome: Outcome, tmp_path: Path, name: str) -> None:
    case = next(case for case in SAVED if case.name == name)
    _convert(outcome.root / name / "universal", tmp_path / "back", "--config", outcome.root / name / "run.yaml")
    wanted = load_wholes(outcome.root / name / "ours", case.level.shape)
    assert differing(load_wholes(tmp_path / "back", case.level.shape), wanted) == []
    assert read_manifest(tmp_path / "back").state["adam_step"] == case.steps


def test_what_deepspeed_converted_is_read(outcome: Outcome, tmp_path: Path) -> None:
    """ds_to_universal, told the names and sizes that we say it needs, merges tensor-parallel slices as we do."""
    case = next(case for case in SAVED if case.name == "tensor")
    directory = outcome.root / "tensor"
    _convert(directory / "theirs", tmp_path / "store", "--config", directory / "run.yaml")
    wanted = load_wholes(directory / "ours", case.level.shape)
    assert differing(load_wholes(tmp_path / "store", case.level.shape), wanted) == []
    theirs, ours = ({p.name for p in (directory / d).glob("*/zero/*")} for d in ("theirs", "universal"))
    assert theirs == ours


def test_what_deepspeed_mixed_up_is_refused(
    outcome: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under round_robin_gradients ds_to_universal succeeds, as load_universal does, and the weights are wrong."""
    assert any(rank[-1][0] for rank in outcome.loaded)
    directory = outcome.root / "dealt"
    fp32 = torch.load(directory / "theirs/last/zero/decoder.layers.0.mlp.linear_fc1.weight/fp32.pt")["param"]
    case = next(case for case in SAVED if case.name == "dealt")
    wanted = load_wholes(directory / "ours", case.level.shape)["master"]["decoder.layers.0.mlp.linear_fc1.weight"]
    assert fp32.shape == wanted.shape and not fp32.equal(wanted)
    arguments = ["--from", directory / "theirs", "--to", tmp_path / "store", "--config", directory / "run.yaml"]
    assert cli.run(["convert", *map(str, arguments)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "round_robin_gradients=true" in said and "native checkpoint" in said and not (tmp_path / "store").exists()


@pytest.mark.full
def test_four_ranks(tmp_path: Path) -> None:
    """TP 2 with two data-parallel ranks, native under ZeRO 2 and 3, loaded under TP 2 and TP 4."""
    saved = [Case(name=f"stage{stage}", tp=2, stage=stage, model=_MODERN | {"kv_groups": 4}) for stage in (2, 3)]
    losses = values(4, "tests.dist.cases_deepspeed:train_and_save", [str(tmp_path), saved])[0]
    loaded = [(case.name, replace(case, tp=tp, stage=stage)) for case in saved for tp, stage in ((2, 1), (4, 2))]
    for case in saved:
        directory = tmp_path / case.name
        (directory / "run.yaml").write_text(yaml.safe_dump(case.config.model_dump(mode="json")))
        _convert(directory / "native", directory / "store", "--config", directory / "run.yaml")
        wanted = load_wholes(directory / "ours", case.level.shape)
        assert differing(load_wholes(directory / "store", case.level.shape), wanted) == []
        form = ["--format", "deepspeed-universal", "training.zero_stage=1"]
        _convert(directory / "ours", directory / "universal", *form)
    for rank in values(4, "tests.dist.cases_deepspeed:load_and_train", [str(tmp_path), loaded, []]):
        for index, (differing_tensors, adam_step, found) in enumerate(rank):
            assert (differing_tensors, adam_step) == ([], 2)
            assert found == pytest.approx(losses[index // 2], rel=1e-6)
