"""What of DeepSpeed's checkpoints is refused, and what it would load wrongly: each by the name of what is wrong."""

from __future__ import annotations

import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vcycle.checkpoint.offline.convert_deepspeed import from_deepspeed, to_universal
from ds_vcycle.config import UserError
from tests.deepspeed_case import Case
from tests.deepspeed_files import GATED, ODD, PLAIN, Written, config_file, edit, stored, wholes, write_native

_FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
_NORM = "decoder.final_layernorm.weight"
_WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A native checkpoint, what is done to it, and what is said."""

    change: Callable[[Path], object]
    said: str
    case: Case = PLAIN
    model: dict[str, Any] | None = None


def _optimizer(change: Callable[[dict[str, Any]], object], file: str = "zero_pp_rank_1_mp_rank_00") -> Any:
    return lambda folder: edit(folder / f"{file}_optim_states.pt", lambda tree: change(tree["optimizer_state_dict"]))


def _model(change: Callable[[dict[str, Any]], object], file: str = "mp_rank_00_model_states.pt") -> Any:
    return lambda folder: edit(folder / file, change)


def _truncated(folder: Path) -> None:
    with (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").open("rb+") as file:
        file.truncate(3000)


def _pickled(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps({"param_shapes": []}))


def _replica(tree: dict[str, Any]) -> None:
    for flat in tree["single_partition_of_fp32_groups"][1:]:
        flat[-1] += 1  # the last vector is the final norm's bias


def _drop(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _copy(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / name, folder / to)


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    def change(tree: dict[str, Any]) -> None:
        tree["param_shapes"] = [
            OrderedDict((new if name == old else name, size) for name, size in group.items())
            for group in tree["param_shapes"]
        ]

    return change


_FILE = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
NATIVE = {
    "a rank's file is missing": Refused(
        change=_drop("zero_pp_rank_0_mp_rank_00_optim_states.pt"), said="lacks zero_pp_rank_0"
    ),
    "the last rank's file is missing": Refused(change=_drop(_FILE), said=r"files of 1 ranks, .* says dp_world_size=2"),
    "no model file": Refused(change=_drop("mp_rank_00_model_states.pt"), said="model files of 0 of 1 mp_ranks"),
    "another rank's model file, as of ZeRO 3, without its own": Refused(
        change=_copy("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        said="lacks zero_pp_rank_1_mp_rank_00_model_states.pt, and other ranks have theirs",
    ),
    "two files of a rank": Refused(change=_copy(_FILE, f"bf16_{_FILE}"), said="are of the same rank"),
    "without ZeRO": Refused(
        change=lambda folder: [path.unlink() for path in folder.glob("*_optim_states.pt")], said="saved without ZeRO"
    ),
    "no shapes": Refused(change=_model(lambda tree: tree.update(param_shapes=None)), said="saved without ZeRO"),
    "shapes of another kind": Refused(
        change=_model(lambda tree: tree.update(param_shapes=[5])), said="global_step7 is malformed"
    ),
    "groups of another kind": Refused(
        change=_optimizer(lambda state: state["base_optimizer_state"].update(param_groups=[{}])), said="is malformed"
    ),
    "an older release": Refused(change=_model(lambda tree: tree.pop("param_shapes")), said="has no param_shapes"),
    "pipeline": Refused(change=_copy(_FILE, "layer_01-model_00-model_states.pt"), said="split over pipeline stages"),
    "experts": Refused(change=_copy(_FILE, "expp_rank_0_mp_rank_00_optim_states.pt"), said="split over experts"),
    "truncated": Refused(change=_truncated, said=f"{_FILE} is damaged"),
    "a plain pickle": Refused(
        change=_pickled, said=r"mp_rank_00_model_states\.pt is damaged, or no file of torch\.save"
    ),
    "frozen": Refused(
        change=_model(lambda tree: tree.update(frozen_param_shapes={_NORM: torch.Size([20])})),
        said=f"{_NORM} is frozen",
    ),
    "left over": Refused(
        change=lambda folder: None,
        said=r"has embedding\.position_embeddings\.weight, which the model has not",
        model={"position": "rope", "heads": 2},
    ),
    "missing": Refused(change=lambda folder: None, said=r"lacks decoder\.layers\.1\.", model={"layers": 2}),
    "Transformer Engine": Refused(
        change=_model(
            _renamed(
                "decoder.layers.0.input_layernorm.weight",
                "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            )
        ),
        said="Transformer Engine's layers, which name their norms otherwise",
    ),
    "another width": Refused(
        change=lambda folder: None, said=r"linear_fc1.* has shape \[26, 20\], .* \[28, 20\]", model={"ffn": 28}
    ),
    "a smaller vocabulary": Refused(
        change=lambda folder: None,
        said=r"has 128 rows, and model\.vocab_size=200 .* set model\.vocab_size",
        model={"vocab_size": 200},
    ),
    "a vocabulary that would be cut": Refused(
        change=_model(lambda tree: tree["param_shapes"][0].update({_WORDS: torch.Size([256, 20])})),
        said=r"has 256 rows, and model\.vocab_size=101",
    ),
    "another order": Refused(
        change=_model(lambda tree: tree["param_shapes"].reverse()),
        said=r"has partitions of .* elements, param_shapes of .* make",
    ),
    "a group too few": Refused(
        change=_optimizer(lambda state: state["single_partition_of_fp32_groups"].pop()), said="master has partitions of"
    ),
    "a part missing": Refused(
        change=_optimizer(lambda state: state.pop("base_optimizer_state")), said=r"has no base_optimizer_state"
    ),
    "a moment missing": Refused(
        change=_optimizer(lambda state: state["base_optimizer_state"]["state"][1].pop("exp_avg_sq")),
        said="has no exp_avg_sq",
    ),
    "a rank without moments": Refused(
        change=_optimizer(lambda state: state["base_optimizer_state"]["state"].clear()),
        said="they are of different saves",
    ),
    "steps of a rank differ": Refused(
        change=_optimizer(lambda state: state["base_optimizer_state"]["state"][1]["step"].fill_(6)),
        said=r"of steps \[6, 7\]",
    ),
    "no step": Refused(
        change=_optimizer(lambda state: [s.pop("step") for s in state["base_optimizer_state"]["state"].values()]),
        said="Adam's moments are of no step",
    ),
    "ranks of different steps": Refused(
        change=_optimizer(lambda state: [s["step"].fill_(9) for s in state["base_optimizer_state"]["state"].values()]),
        said="is of Adam's step 9, zero_pp_rank_0_mp_rank_00_optim_states.pt of 7",
    ),
    "replicas differ": Refused(
        change=_optimizer(_replica, "zero_pp_rank_1_mp_rank_01"),
        case=replace(PLAIN, tp=2),
        said=r"master of decoder\.final_layernorm\.bias differs between mp_rank_00 and mp_rank_01",
    ),
    "another job's ranks": Refused(
        change=_model(lambda tree: tree.update(mp_world_size=4)), said=r"files of 1 ranks, .* says mp_world_size=4"
    ),
}


@pytest.mark.parametrize("refused", NATIVE.values(), ids=list(NATIVE))
def test_native_checkpoints_are_refused_by_name(tmp_path: Path, refused: Refused) -> None:
    root = write_native(tmp_path / "native", Written(case=refused.case), wholes(refused.case))
    refused.change(root / "global_step7")
    config = config_file(refused.case, tmp_path / "run.yaml", **(refused.model or {}))
    with pytest.raises(UserError, match=refused.said):
        from_deepspeed(root, tmp_path / "store", config=config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "run.yaml"]


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A universal checkpoint of two tensor-parallel ranks' model."""
    root = tmp_path_factory.mktemp("universal")
    to_universal(stored(root / "store", GATED), root / "universal")
    return root / "universal"


def _weight(name: str, change: Callable[[dict[str, Any]], object], file: str = "fp32.pt") -> Callable[[Path], object]:
    return lambda folder: edit(folder / "zero" / name / file, change)


def _bare(folder: Path) -> None:
    path = folder / "zero" / _FC1 / "fp32.pt"
    torch.save(torch.load(path)["param"], path)


def _settings(**zero: Any) -> Callable[[Path], object]:
    return _model(lambda tree: tree.update(ds_config={"zero_optimization": zero}, dp_world_size=2))


UNIVERSAL = {
    "round robin": Refused(
        change=_settings(round_robin_gradients=True), said=r"round_robin_gradients=true, .*native checkpoint"
    ),
    "of ZeRO 3": Refused(change=_bare, said=r"fp32\.pt is a bare tensor, as ds_to_universal writes for ZeRO 3"),
    "gate and up rows interleaved": Refused(
        change=_weight(_FC1, lambda tree: tree.pop("param_n_sub_params")),
        said="gate and up rows are 2, which are now interleaved",
    ),
    "rows for columns": Refused(
        change=_weight("decoder.layers.0.mlp.linear_fc2.weight", lambda tree: tree.update(param=torch.zeros(40, 13))),
        said=r"linear_fc2\.weight: exp_avg\.pt has shape \[20, 26\], fp32\.pt \[40, 13\]",
    ),
    "another vocabulary": Refused(
        change=_model(lambda tree: tree["universal_checkpoint_info"].update(original_vocab_size=100)),
        said="original_vocab_size=100, the configuration has model.vocab_size=101; set model.vocab_size=100",
    ),
    "no tensor": Refused(change=_weight(_FC1, lambda tree: tree.pop("param")), said="has no tensor 'param'"),
    "a moment missing": Refused(change=_drop(f"zero/{_FC1}/exp_avg.pt"), said=r"exp_avg\.pt is missing, and other"),
    "a parameter missing": Refused(
        change=lambda folder: shutil.rmtree(folder / "zero" / _NORM), said=rf"lacks {re.escape(_NORM)}"
    ),
    "a parameter left over": Refused(
        change=lambda folder: shutil.copytree(folder / "zero" / _NORM, folder / "zero/decoder.other.weight"),
        said=r"has decoder\.other\.weight, which the model has not",
    ),
    "steps differ": Refused(
        change=lambda folder: torch.save(torch.tensor(3.0), folder / "zero" / _NORM / "step.pt"),
        said=r"step is 3 .* and 7|7 .* and 3",
    ),
    "one step is missing": Refused(
        change=_drop(f"zero/{_NORM}/step.pt"), said=rf"{re.escape(_NORM)}/step.pt is missing"
    ),
    "no step": Refused(
        change=lambda folder: [path.unlink() for path in folder.glob("zero/*/step.pt")], said="Adam's step is none"
    ),
    "nothing": Refused(
        change=lambda folder: [path.unlink() for path in folder.glob("zero/*/fp32.pt")], said="holds no parameter"
    ),
}


@pytest.mark.parametrize("refused", UNIVERSAL.values(), ids=list(UNIVERSAL))
def test_universal_checkpoints_are_refused_by_name(tmp_path: Path, universal: Path, refused: Refused) -> None:
    shutil.copytree(universal, tmp_path / "universal")
    refused.change(tmp_path / "universal/global_step7")
    config = config_file(GATED, tmp_path / "run.yaml")
    with pytest.raises(UserError, match=refused.said):
        from_deepspeed(tmp_path / "universal", tmp_path / "store", config=config)
    assert not (tmp_path / "store").exists()


def test_what_deepspeed_would_load_wrongly_is_not_written(tmp_path: Path) -> None:
    """Each with the override that says under what it will be loaded instead."""
    tree = PLAIN.config.model_dump(mode="json")
    stage_3 = stored(tmp_path / "3", PLAIN, training=tree["training"] | {"zero_stage": 3})
    with pytest.raises(UserError, match=r"training\.zero_stage=3: .* say so with training\.zero_stage=1"):
        to_universal(stage_3, tmp_path / "to")
    with pytest.raises(UserError, match=r"training\.zero_stage=0: .*leaves the weights as they are without ZeRO"):
        to_universal(stage_3, tmp_path / "to", overrides=["training.zero_stage=0"])
    own = stored(tmp_path / "own", PLAIN, levels=[{"zero_stage": 3}])
    with pytest.raises(UserError, match=r"levels\.0\.zero_stage=3: .* say so with levels\.0\.zero_stage=1"):
        to_universal(own, tmp_path / "to")
    dealt = stored(tmp_path / "dealt", PLAIN, deepspeed={"zero_optimization": {"round_robin_gradients": True}})
    with pytest.raises(UserError, match=r"round_robin_gradients=true: .*round_robin_gradients=false"):
        to_universal(dealt, tmp_path / "to")
    words = Case(name="words", tp=2, model=ODD | {"vocab_size": 128})
    with pytest.raises(UserError, match=r"model\.vocab_size=128 is padded to 256, .* TP 2 .*model\.tensor_parallel=1"):
        to_universal(stored(tmp_path / "words", words), tmp_path / "to")
    with pytest.raises(UserError, match="hidden=20"):
        to_universal(stage_3, tmp_path / "to", overrides=["training.zero_stage=1", "model.hidden=24"])
    assert not (tmp_path / "to").exists()
    to_universal(stage_3, tmp_path / "a", overrides=["training.zero_stage=2"])
    to_universal(dealt, tmp_path / "b", overrides=["deepspeed.zero_optimization.round_robin_gradients=false"])
    to_universal(tmp_path / "words", tmp_path / "c", overrides=["model.tensor_parallel=1"])
