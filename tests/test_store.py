"""The checkpoint store: what is written is what is read, under any cut; and what is in the files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ds_vcycle.checkpoint.store import (
    CheckpointError,
    FlatRange,
    StoredFragment,
    is_writer,
    open_checkpoint,
    save,
)
from ds_vcycle.schema import Dim, Parameter
from tests.dist.cases_store import (
    KEYS,
    PARAMETERS,
    REAL_NUMEL,
    local_shards,
    on_threads,
    read_all,
    same,
    save_simulated,
)
from tests.dist.ranks import values

NAME = "step-00000001"


@pytest.mark.parametrize(
    ("tp", "dp", "zero_stage", "read_dp"),
    [(1, 1, 0, 1), (1, 2, 1, 3), (1, 3, 3, 1), (2, 1, 1, 2), (2, 2, 2, 3), (2, 2, 0, 1)],
)
def test_read_equals_written(tmp_path: Path, tp: int, dp: int, zero_stage: int, read_dp: int) -> None:
    shards = local_shards(tp)
    assert save_simulated(tmp_path / NAME, shards, tp=tp, dp=dp, zero_stage=zero_stage) == [None] * (tp * dp)
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        checkpoint.expect(PARAMETERS)
        checkpoint.verify()
        assert same(read_all(checkpoint, tp, read_dp), shards)
        assert checkpoint.world_size == tp * dp
        assert [checkpoint.extras(r)["rng"].tolist() for r in range(tp * dp)] == [[r, 255] for r in range(tp * dp)]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(("tp", "dp", "zero_stage"), [(2, 2, 1), (2, 2, 0), (1, 3, 1)])
def test_every_real_element_is_stored_once(tmp_path: Path, tp: int, dp: int, zero_stage: int) -> None:
    """Another reader of safetensors finds each parameter's real elements once: no pad rows, no second replica."""
    save_simulated(tmp_path / NAME, local_shards(tp), tp=tp, dp=dp, zero_stage=zero_stage)
    counts = {(name, key): 0 for name in REAL_NUMEL for key in KEYS}
    for path in (tmp_path / NAME).glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if not name.startswith("extra/"):
                parameter, _, _, key = name.split("/")
                counts[parameter, key] += tensor.numel()
                assert tensor.dtype == torch.float32
    assert counts == {(name, key): count for name, count in REAL_NUMEL.items() for key in KEYS}


def test_values_in_the_file_are_the_shards(tmp_path: Path) -> None:
    shards = local_shards(2)
    save_simulated(tmp_path / NAME, shards, tp=2)
    stored = load_file(tmp_path / NAME / "rank-00001.safetensors")
    assert torch.equal(stored["fc2.weight/1/0/exp_avg"], shards["fc2.weight", 1, "exp_avg"])
    assert torch.equal(stored["word.weight/1/0/master"], shards["word.weight", 1, "master"][: 5 * 5])
    assert not any(name.startswith(("norm.weight", "word.bias")) for name in stored)


def test_pad_rows_read_as_zero_and_any_range_can_be_asked_for(tmp_path: Path) -> None:
    shards = local_shards(2)
    save_simulated(tmp_path / NAME, shards, tp=2, dp=3)
    word, _, _, _, bias = PARAMETERS
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        assert checkpoint.read(bias, tp=2, tp_rank=1, start=3, length=9, key="master").tolist() == [0.0] * 9
        for start in range(0, 40, 3):
            for length in range(40 - start):
                read = checkpoint.read(word, tp=2, tp_rank=1, start=start, length=length, key="exp_avg_sq")
                assert torch.equal(read, shards["word.weight", 1, "exp_avg_sq"][start : start + length])


def test_state_and_layout_are_in_the_manifest(tmp_path: Path) -> None:
    state = {"phase": 2, "samples": 12345678901, "lr": 0.1 + 0.2, "phases": [[1, "train"]], "parked": None}
    save_simulated(tmp_path / NAME, local_shards(2), tp=2, state=state)
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        assert checkpoint.state == state
    manifest = json.loads((tmp_path / NAME / "manifest.json").read_text())
    assert manifest["parameters"]["word.weight"] == {
        "shape": [13, 5], "padded_shape": [16, 5], "tp_dim": 0, "tp_stride": 1, "tp": 2,
    }  # fmt: skip
    assert manifest["parameters"]["fc1.weight"]["tp_stride"] == 2
    assert manifest["parameters"]["norm.weight"]["tp"] == 1


def test_masters_alone_are_a_checkpoint_and_moments_are_not_invented(tmp_path: Path) -> None:
    shards = local_shards(1, keys=("master",))
    save_simulated(tmp_path / NAME, shards)
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        assert same(read_all(checkpoint, 1), shards)
        assert checkpoint.keys(PARAMETERS[0]) == {"master"}
        with pytest.raises(CheckpointError, match=r"0 to 5 of norm\.weight \(exp_avg, .* not stored; it has master"):
            checkpoint.read(PARAMETERS[1], tp=1, tp_rank=0, start=0, length=5, key="exp_avg")


def test_one_replica_has_a_writer() -> None:
    sharded, replicated = PARAMETERS[0], PARAMETERS[1]
    ranks = [(tp_rank, dp_rank) for tp_rank in range(2) for dp_rank in range(2)]

    def writers(parameter: Parameter, zero_stage: int) -> list[tuple[int, int]]:
        return [(t, d) for t, d in ranks if is_writer(parameter, tp_rank=t, dp_rank=d, zero_stage=zero_stage)]

    assert writers(sharded, 0) == [(0, 0), (1, 0)]
    assert writers(replicated, 0) == [(0, 0)]
    assert writers(sharded, 2) == ranks
    assert writers(replicated, 2) == [(0, 0), (0, 1)]


def test_other_models_are_refused(tmp_path: Path) -> None:
    save_simulated(tmp_path / NAME, local_shards(2), tp=2)
    extra = Parameter(template="more.bias", layer=None, dims=(Dim(axis="hidden", role="produces", length=5),))
    wider = Parameter(template="norm.weight", layer=None, dims=(Dim(axis="hidden", role="produces", length=6),))
    word, _, fc1, *rest = PARAMETERS
    other_words = replace(word, dims=(Dim(axis="vocab", role="produces", length=12, pad=4), word.dims[1]))
    ungated = replace(fc1, dims=(Dim(axis="ffn", role="produces", length=12), fc1.dims[1]))
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        with pytest.raises(CheckpointError, match=r"lacks parameters of the model: more\.bias"):
            checkpoint.expect([*PARAMETERS, extra])
        with pytest.raises(CheckpointError, match=r"the model does not have: norm\.weight, word\.weight"):
            checkpoint.expect(PARAMETERS[2:])
        with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[5\].*the model's is \[6\]"):
            checkpoint.expect([wider, PARAMETERS[0], *PARAMETERS[2:]])
        with pytest.raises(CheckpointError, match=r"word\.weight has shape \[13, 5\] padded to \[16, 5\].* \[12, 5\]"):
            checkpoint.expect([other_words, *PARAMETERS[1:]])
        with pytest.raises(CheckpointError, match=r"fc1\.weight has shape .*stride 2\), the model's is .*stride 1\)"):
            checkpoint.expect([*PARAMETERS[:2], ungated, *rest])
        with pytest.raises(CheckpointError, match="saved by 2 ranks: it has nothing of rank 2"):
            checkpoint.extras(2)


def test_verify_of_ranges_touches_only_their_files(tmp_path: Path) -> None:
    save_simulated(tmp_path / NAME, local_shards(2), tp=2)
    with (tmp_path / NAME / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        mine = [FlatRange(parameter=p, tp=2, tp_rank=0, start=0, length=5) for p in PARAMETERS]
        checkpoint.verify(mine)
        with pytest.raises(CheckpointError, match="rank-00001"):
            checkpoint.verify()


def _save_norm(directory: Path, ranges: list[tuple[int, int]], state: dict[str, Any]) -> Any:
    """Save only the norm, in these (start, length) pieces, on one rank; the error if there is one."""
    fragments = [
        StoredFragment(
            parameter=PARAMETERS[1], tp=1, tp_rank=0, start=start, length=length, tensors={"master": torch.ones(length)}
        )
        for start, length in ranges
    ]

    def work(rank: int, gather: Any, barrier: Any) -> None:
        save(
            directory, fragments=fragments, extras={}, state=state,
            rank=rank, world_size=1, gather=gather, barrier=barrier,
        )  # fmt: skip

    return on_threads(1, work)[0]


@pytest.mark.parametrize(
    ("ranges", "state", "message"),
    [
        ([(0, 2)], {}, "elements 2 to 5 of norm.weight .* are in no rank's file"),
        ([(0, 3), (2, 3)], {}, "elements 2 to 3 of norm.weight .* again in rank-00000.safetensors"),
        ([(0, 5)], {"seen": {1, 2}}, "must be JSON"),
    ],
)
def test_what_could_not_be_loaded_is_not_committed(
    tmp_path: Path, ranges: list[tuple[int, int]], state: dict[str, Any], message: str
) -> None:
    error = _save_norm(tmp_path / NAME, ranges, state)
    assert isinstance(error, CheckpointError)
    assert re.search(message, str(error))
    assert list(tmp_path.iterdir()) == []
    assert _save_norm(tmp_path / NAME, [(2, 3), (0, 2)], {}) is None


def test_two_real_ranks_save_together(tmp_path: Path) -> None:
    assert values(2, "tests.dist.cases_store:save_distributed", (str(tmp_path),)) == [[True, True]] * 2
