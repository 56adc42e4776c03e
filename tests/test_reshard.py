"""A checkpoint rewritten for another layout is, file by file and bit by bit, what that layout's ranks would save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ds_vcycle import cli
from ds_vcycle.checkpoint.offline.processes import Processes
from ds_vcycle.checkpoint.offline.relayout import TargetLayout, lowered_micro_batches, relaid
from ds_vcycle.checkpoint.offline.reshard import reshard
from ds_vcycle.checkpoint.store import CheckpointError, find_latest, open_checkpoint
from ds_vcycle.config import UserError, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.sharding.placement import Layout
from tests.dist.cases_store import on_threads
from tests.resumed import contents
from tests.stored import store_wholes
from tests.stored_runs import PARKED, STEP, StoredRun, stored_run

Steps = list[tuple[int, int, int]]  # (tensor-parallel degree, data-parallel ranks, ZeRO stage)
CHAINS: dict[str, Steps] = {
    "TP": [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 1, 1)],
    "ZeRO": [(1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 2, 3), (1, 2, 0)],
    "DP": [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 1, 1)],
    "all at once": [(2, 1, 3), (1, 3, 0), (4, 2, 2), (2, 3, 1), (2, 1, 3)],
}


def _layout(step: tuple[int, int, int]) -> Layout:
    tp, dp, zero_stage = step
    return Layout(world_size=tp * dp, tp=tp, zero_stage=zero_stage)


def _same_files(found: Path, wanted: Path) -> None:
    mine, right = contents(found), contents(wanted)
    assert mine.keys() == right.keys()
    assert [name for name in right if not torch.equal(mine[name], right[name])] == []


@pytest.mark.parametrize("chain", CHAINS)
def test_each_step_of_a_chain_is_what_that_layout_saves(tmp_path: Path, chain: str) -> None:
    """In the midst of a cycle, the parked level with it; TP 4 changes the padded vocabulary."""
    steps = CHAINS[chain]
    model = "llama_tied" if chain == "all at once" else "bert_order"
    at = stored_run(tmp_path / "0", _layout(steps[0]), model=model).run_dir
    for number, step in enumerate(steps[1:], 1):
        tp, dp, zero_stage = step
        reshard(at, tmp_path / str(number), TargetLayout(tp=tp, dp=dp, zero_stage=zero_stage))
        at = tmp_path / str(number)
        native = stored_run(tmp_path / f"native-{number}", _layout(step), model=model)
        for name in (STEP, PARKED):
            _same_files(at / "checkpoints" / name, native.checkpoints / name)
        assert find_latest(at / "checkpoints") == at / "checkpoints" / STEP
        assert _state(at) == _state(native.run_dir)
    assert _state(at)["config"] == _state(tmp_path / "0")["config"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def _state(run_dir: Path) -> dict[str, Any]:
    with open_checkpoint(run_dir / "checkpoints" / STEP) as checkpoint:
        state = dict(checkpoint.state)
        state.pop("origin", None)
        state["config"] = {**state["config"], "run_dir": "", "levels": _without_layout(state["config"]["levels"])}
        state["written by"] = checkpoint.world_size, checkpoint.tensor_parallel
        return state


def _without_layout(levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in level.items() if value is not None} for level in levels]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    run = stored_run(tmp_path_factory.mktemp("runs") / "mine", _layout((2, 1, 1)))
    (run.run_dir / "metrics.jsonl").write_text('{"event": "save"}\n')
    return run


def test_the_command_line_writes_a_run_that_can_go_on(
    run: StoredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "moved"
    arguments = ["convert", "--from", f"{run.run_dir}@120", "--to", str(to), "--tp", "1", "--dp", "3", "--zero", "3"]
    assert cli.run(arguments) == 0
    text = capsys.readouterr().out
    assert f"{to / 'checkpoints' / STEP}, for 3 ranks (TP 1 x DP 3, ZeRO 3), parked: {PARKED}" in text
    start = f"deepspeed --num_gpus 3 --module ds_vcycle train --config {to / 'config.yaml'} --resume"
    assert f"random generators seeded anew: {start}" in text
    assert sorted(path.name for path in to.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]
    config = yaml.safe_load((to / "config.yaml").read_text())
    assert (config["run_dir"], config["model"]["tensor_parallel"], config["training"]["zero_stage"]) == (str(to), 1, 3)
    assert cli.run(["inspect", str(to)]) == 0
    assert "3 ranks: tensor parallel 1 x data parallel 3, ZeRO 3" in capsys.readouterr().out
    assert cli.run(arguments) == 2
    assert "exists; give another directory, or replace it with --overwrite" in capsys.readouterr().err
    assert cli.run([*arguments, "--overwrite"]) == 0


def test_several_processes_share_the_files(run: StoredRun, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def work(rank: int, gather: Any, barrier: Any) -> None:
        who = Processes(rank=rank, world_size=3, gather=gather, barrier=barrier)
        reshard(
            run.run_dir, tmp_path / "to", TargetLayout(tp=4, dp=2, zero_stage=2), processes=who,
            advance=lambda done, total: told.append((done, total)),
        )  # fmt: skip

    assert on_threads(3, work) == [None] * 3
    native = stored_run(tmp_path / "native", _layout((4, 2, 2)))
    for name in (STEP, PARKED):
        _same_files(tmp_path / "to" / "checkpoints" / name, native.checkpoints / name)
    assert sum(done == total for done, total in told) == 3
    assert max(told)[0] <= sum(tensor.numel() for tensor in contents(native.checkpoints / STEP).values()) * 2


def test_what_is_left_open_stays_and_random_states_with_it(run: StoredRun, tmp_path: Path) -> None:
    written = reshard(run.run_dir, tmp_path / "to", TargetLayout(zero_stage=0))
    assert written.layout == _layout((2, 1, 0))
    with open_checkpoint(written.checkpoint) as checkpoint:
        assert checkpoint.extras(1) == {}  # the stored run has none


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not dividing the ranks": ({"tp": 4}, r"--tp 4 does not divide the 2 ranks the checkpoint was saved by; give --dp"),
    "not dividing the global batch": ({"tp": 1, "dp": 7}, r"training.global_batch=12 does not divide over 7 data-par"),
    "not dividing the heads": ({"tp": 8, "dp": 1}, r"level 2.*heads|level 2.*kv_groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_left(run: StoredRun, tmp_path: Path, case: str) -> None:
    target, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        reshard(run.run_dir, tmp_path / "to", TargetLayout(**target))
    assert list(tmp_path.iterdir()) == []


def test_a_micro_batch_is_lowered_to_what_divides_the_share(tmp_path: Path) -> None:
    """A global batch of 12 on 2 ranks leaves 6 to each, of which 4 is no divisor; 3 is the largest below it."""
    config = stored_run(tmp_path / "run", _layout((1, 1, 1))).config
    tree = config.model_dump(mode="json")
    tree["training"]["micro_batch"], tree["levels"] = 4, [{}, {**tree["levels"][1], "micro_batch": 6}]
    before = parse_config(tree)
    after = relaid(before, _layout((1, 2, 1)), run_dir=tmp_path, where=tmp_path)
    assert [level.micro_batch for level in resolve_levels(after)] == [3, 6]
    assert lowered_micro_batches(before, after) == ("level 1: micro_batch 4 -> 3",)
    assert after.training.global_batch == 12


def test_groups_that_would_change_under_way_are_refused(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", _layout((2, 1, 1)), groupings={"ffn": "local_stack"})
    with pytest.raises(UserError, match=r"groupings.ffn=local_stack of level 2 .* keep --tp 2"):
        reshard(run.run_dir, tmp_path / "to", TargetLayout(tp=1, dp=2))
    assert reshard(run.run_dir, tmp_path / "to", TargetLayout(dp=2)).layout.dp == 2


@pytest.mark.parametrize("where", [STEP, PARKED])
def test_damage_is_found_before_anything_is_published(run: StoredRun, tmp_path: Path, where: str) -> None:
    shutil.copytree(run.run_dir, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / where / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged: the checksum of"):
        reshard(tmp_path / "run", tmp_path / "to", TargetLayout(tp=1))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (".", "holds the checkpoint that is read"),
        (f"checkpoints/{STEP}", "lies among a run's checkpoints"),
        ("checkpoints/other", "lies among a run's checkpoints"),
        ("metrics.jsonl", "is no run, so --overwrite leaves it alone"),
    ],
)
def test_where_something_must_stay_nothing_is_written(run: StoredRun, to: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reshard(run.run_dir, run.run_dir / to, TargetLayout(tp=1), overwrite=True)


def test_a_checkpoint_of_no_run_becomes_a_checkpoint(run: StoredRun, tmp_path: Path) -> None:
    """As ``ds-vcycle coalesce`` writes them: a level and its configuration, no position."""
    _, coarse = resolve_levels(run.config)
    state = {"level": 2, "config": run.config.model_dump(mode="json"), "adam_step": 120, "origin": {"verb": "coalesce"}}
    store_wholes(tmp_path / "small", run.coarse, coarse.shape, _layout((1, 1, 0)), state)
    written = reshard(tmp_path / "small", tmp_path / "to", TargetLayout(tp=2, dp=2, zero_stage=3))
    assert written.checkpoint == tmp_path / "to" and "training.init_from=" in str(written)
    store_wholes(tmp_path / "native", run.coarse, coarse.shape, _layout((2, 2, 3)))
    _same_files(tmp_path / "to", tmp_path / "native")
    with open_checkpoint(tmp_path / "to") as checkpoint:
        assert (checkpoint.state["level"], checkpoint.state["adam_step"], checkpoint.world_size) == (2, 120, 4)


def test_a_parked_level_alone_is_refused(run: StoredRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not say which level .*parked level"):
        reshard(run.checkpoints / PARKED, tmp_path / "to", TargetLayout(tp=1))


def test_memory_holds_one_fragment(run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is written before the next one is read."""
    from ds_vcycle.checkpoint import shards
    from ds_vcycle.checkpoint.reader import Checkpoint

    events: list[str] = []
    read, write = Checkpoint.read, shards._write_tensor
    monkeypatch.setattr(Checkpoint, "read", lambda *args, **kwargs: (events.append("read"), read(*args, **kwargs))[1])
    monkeypatch.setattr(shards, "_write_tensor", lambda *args: (events.append("write"), write(*args))[1])
    reshard(run.run_dir, tmp_path / "to", TargetLayout(tp=1, dp=2))
    assert events == ["read", "write"] * (len(events) // 2) and len(events) > 100
    stored = sorted((tmp_path / "to" / "checkpoints" / STEP).glob("*.safetensors"))
    assert sum(len(load_file(path)) for path in stored) < len(events) // 2
