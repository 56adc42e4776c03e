"""``plan --nodes``: time, traffic, what does not fit and what to change, against sums done by hand and exact pieces."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ds_vcycle import cli
from ds_vcycle.config import ConfigError, RunConfig, UserError, load_config
from ds_vcycle.cycle.cluster import ClusterOverview, divided, on_cluster
from ds_vcycle.cycle.gpu import RESERVE, gpu_of, memory_of, shares_of
from ds_vcycle.cycle.network import Nodes, step_bytes, transition_bytes
from ds_vcycle.cycle.render_cluster import render_cluster, render_sizes
from ds_vcycle.levels import resolve_levels
from ds_vcycle.operators.plan import plan_transition
from ds_vcycle.sharding.geometry import Geometry
from ds_vcycle.sharding.placement import layout_of

CONFIGS = Path(__file__).parents[1] / "configs"
BERT_LARGE = 334_852_992  # weights with the padded vocabulary
A100 = gpu_of("A100", None)


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / name, list(overrides))


def planned(
    name: str, nodes: int, *overrides: str, gpu: Any = A100, mfu: tuple[float, ...] = (0.4,)
) -> ClusterOverview:
    return on_cluster(config_of(name, *overrides), Nodes(count=nodes, gpus=8), gpu, mfu)


def printed(found: ClusterOverview) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        render_cluster(found, console)
    return capture.get()


def test_hours_are_flops_over_what_the_gpus_reach() -> None:
    found = planned("bert_large_2level.yaml", 4, "training.micro_batch=16", mfu=(0.5, 0.25))
    fine, coarse = found.levels
    tokens, hidden, layers, vocab = 512 * 128, 1024, 24, 30592
    products = layers * (12 * hidden**2 + 2 * 128 * hidden) * tokens  # multiply-adds of the blocks, forward
    head = 512 * 20 * (hidden * vocab + hidden**2)
    assert fine.step_flops == 6 * (products + head)
    assert fine.step_seconds == pytest.approx(6 * (products + head) / (32 * 312e12 * 0.5))
    assert fine.hours == pytest.approx((11_000 + 157_000) * fine.step_seconds / 3600)
    assert coarse.step_seconds == pytest.approx(coarse.step_flops / (32 * 312e12 * 0.25))
    assert found.hours == fine.hours + coarse.hours
    assert found.flat_hours == pytest.approx(300_000 * fine.step_seconds / 3600)
    assert (fine.tokens, coarse.tokens) == (168_000 * tokens, 150_000 * tokens)


def test_a_teacher_takes_time_and_memory() -> None:
    growth = "{method: knowledge_inheritance, distill_steps: 60000}"
    small = "training.micro_batch=16"
    kind = (small, "cycle.kind=growth", "cycle.initial={}", f"cycle.growth={growth}")
    found, plain = planned("bert_large_2level.yaml", 4, *kind), planned("bert_large_2level.yaml", 4, small)
    fine, coarse = found.levels
    assert coarse.hours == pytest.approx(150_000 * coarse.step_seconds / 3600)
    assert fine.hours == pytest.approx((157_000 * fine.step_seconds + 60_000 * coarse.step_seconds / 3) / 3600)
    hidden, ffn, vocab = 512, 2048, 30592
    layer = 4 * hidden**2 + 4 * hidden + 2 * hidden * ffn + hidden + ffn + 4 * hidden
    teacher = 12 * layer + (vocab + 128 + 2) * hidden + 2 * hidden + hidden**2 + 3 * hidden + vocab
    logits = 4 * fine.micro_batch * 20 * vocab
    assert (fine.teacher_bytes, coarse.teacher_bytes) == (2 * teacher + 5 * logits, 0)
    assert fine.memory == plain.levels[0].memory and plain.levels[0].teacher_bytes == 0
    assert f"Level 1's teacher takes at most {fine.teacher_bytes / 1e9:.2f} GB more" in printed(found)
    room = (fine.memory.peak + fine.teacher_bytes / 2) / 1e9 / (1 - RESERVE)
    assert not planned("bert_large_2level.yaml", 4, *kind, gpu=gpu_of("A100", f"{room}GB")).levels[0].fits


def test_recompute_and_precision_cost_time() -> None:
    plain, again, exact = (
        planned("bert_large_2level.yaml", 1, *overrides).levels[0]
        for overrides in ((), ("model.recompute=full",), ("training.precision=fp32",))
    )
    assert 1.3 < again.step_seconds / plain.step_seconds < 4 / 3
    assert again.memory.activations < plain.memory.activations / 10
    assert exact.step_seconds / plain.step_seconds == pytest.approx(312 / 19.5)


def test_states_of_a_split_level_are_counted_by_hand() -> None:
    memory = planned("bert_large_2level.yaml", 1, "model.tensor_parallel=2").levels[0].memory
    layers = 24 * (12 * 1024**2 + 7 * 1024)  # matrices, the biases of qkv and fc1
    whole = BERT_LARGE - layers - 30592 * 1025  # not words and their biases; two ranks pad them to 30,720
    local = (layers + 30720 * 1025) // 2 + whole
    assert memory.weights == 2 * local
    assert (memory.masters, memory.moments) == (local, 2 * local)  # over four data-parallel ranks


def test_parked_levels_lie_on_the_host_of_each_node() -> None:
    levels = planned("bert_large_3level.yaml", 4, "training.micro_batch=16").levels
    middle = 53_853_568
    assert [level.parked_bytes for level in levels] == [0, BERT_LARGE, BERT_LARGE + middle]  # 4 bytes, over 4 nodes
    whole = planned("bert_large_3level.yaml", 4, "training.micro_batch=16", "training.zero_stage=0").levels
    assert whole[1].parked_bytes == 8 * 4 * BERT_LARGE
    disk = planned("bert_large_3level.yaml", 4, "training.micro_batch=16", "cycle.park=disk").levels
    assert [level.parked_bytes for level in disk] == [0, 0, 0]


@pytest.mark.parametrize(("stage", "rounds"), [(0, 2), (1, 3), (2, 2 * 4 + 1), (3, 3 * 4)])
def test_a_step_sends_the_rings_volume(stage: int, rounds: int) -> None:
    config = config_of("bert_large_2level.yaml", f"training.zero_stage={stage}")
    level = resolve_levels(config)[0]
    sent = step_bytes(level, config, Nodes(count=2, gpus=8), micro_batches=4)
    assert sent == rounds * (2 * BERT_LARGE * 15 // 16)
    assert step_bytes(level, config, Nodes(count=1, gpus=8), micro_batches=4) == 0


def test_tensor_parallelism_beyond_a_node_is_counted_and_said() -> None:
    inside = planned("bert_large_2level.yaml", 2, "model.tensor_parallel=8", "training.micro_batch=64")
    across = planned(
        "bert_large_2level.yaml", 4, "levels=[{tensor_parallel: 16, micro_batch: 64},{}]", "training.micro_batch=16"
    )
    stream = 64 * 128 * 1024 * 2
    sums = across.levels[0].micro_batches * (24 * 4 + 2) * 2 * stream * 15 // 16
    assert across.levels[0].summed_bytes == sums
    assert across.levels[0].sent_bytes > sums > 5 * inside.levels[0].sent_bytes
    said = " ".join(printed(across).split())
    assert "level 1: tensor_parallel=16 does not divide a node's 8 GPUs" in said
    assert "cross the network" not in printed(inside)


LAYOUTS: list[list[str]] = [
    [],
    ["training.zero_stage=3"],
    ["training.zero_stage=2", "model.tensor_parallel=2"],
    ["training.zero_stage=0"],
    ["training.zero_stage=0", "levels=[{},{zero_stage: 1}]"],
    ["levels=[{},{zero_stage: 0}]"],
    ["model.tensor_parallel=2", "levels=[{},{tensor_parallel: 1}]"],
    ["levels=[{},{tensor_parallel: 2}]"],
    ["model.tensor_parallel=2", "operators.groupings.ffn=local_stack"],
    [f"operators.groupings.{axis}=stack" for axis in ("hidden", "head", "ffn", "layer")],
    ["operators.groupings.head=stack", "model.tensor_parallel=2", "training.zero_stage=3"],
]


def between_nodes(config: RunConfig, nodes: Nodes) -> tuple[int, int]:
    """Coarse elements that the transfer really sends from node to node, down and up."""
    fine, coarse = resolve_levels(config)[:2]
    layouts = {"fine": layout_of(fine, config, nodes.ranks), "coarse": layout_of(coarse, config, nodes.ranks)}
    geometry = Geometry(plan=plan_transition(fine, coarse, config.operators), **layouts)
    down = up = 0
    for item in geometry.plan.maps:
        parameter = geometry.parameter(item)
        for one, other in product(range(nodes.ranks), repeat=2):
            if one // nodes.gpus != other // nodes.gpus:
                pair = {"fine_rank": one, "coarse_rank": other}
                elements = sum(piece.numel for piece in parameter.pieces(**pair))
                down += elements * parameter.goes_down(**pair)
                up += elements * parameter.goes_up(**pair)
    return down, up


@pytest.mark.parametrize("name", ["demo_gpt.yaml", "demo_bert.yaml"])
@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_a_transition_sends_no_more_between_nodes_than_is_said(name: str, overrides: list[str]) -> None:
    reset = ["operators.moments=reset", "evaluation.transitions=false"]
    config = config_of(name, *overrides, *reset, "training.global_batch=64")
    fine, coarse = resolve_levels(config)[:2]
    nodes = Nodes(count=4, gpus=2)
    down, up = between_nodes(config, nodes)
    said = transition_bytes(fine, coarse, config, nodes, cx_again=False)
    assert 8 * down <= said.coalesce and 4 * up <= said.refine
    if "training.zero_stage=3" not in overrides:  # equal shares of halved matrices lie on the same ranks there
        assert said.coalesce <= 4 * 8 * down and said.refine <= 4 * 4 * up
    mapped = config.model_copy(update={"operators": config.operators.model_copy(update={"moments": "map"})})
    assert transition_bytes(fine, coarse, mapped, nodes, cx_again=True).coalesce == 3 * said.coalesce
    assert transition_bytes(fine, coarse, config, Nodes(count=1, gpus=8), cx_again=True).refine == 0


TOO_SMALL = [
    ("bert_large_2level.yaml", 1, "8GB"),
    ("gpt_1p3b.yaml", 1, "24GB"),
    ("gpt_13b.yaml", 2, "40GB"),
    ("gpt_1p3b.yaml", 1, "10GB"),  # no single change is enough
]


@pytest.mark.parametrize(("name", "nodes", "memory"), TOO_SMALL)
def test_every_change_that_is_named_makes_the_level_fit(name: str, nodes: int, memory: str) -> None:
    gpu = gpu_of("A100", memory)
    tight = planned(name, nodes, gpu=gpu)
    assert not tight.levels[0].fits and tight.levels[0].changes
    for change in tight.levels[0].changes:
        keys, _, peak = change.rpartition(": ")
        level = planned(name, nodes, *keys.split(), gpu=gpu).levels[0]
        assert level.fits, change
        assert f"{level.memory.peak / 1e9:.1f} GB" == peak
    said = " ".join(printed(tight).split())
    assert "Level 1 does not fit." in said and tight.levels[0].changes[0].split()[0] in said


def test_where_no_change_helps_more_nodes_are_named() -> None:
    level = planned("gpt_70b.yaml", 1).levels[0]
    (change,) = level.changes
    nodes = int(re.fullmatch(r"--nodes (\d+): .*", change)[1])  # type: ignore[index]
    assert planned("gpt_70b.yaml", nodes).levels[0].fits
    assert not planned("gpt_70b.yaml", nodes // 2).levels[0].fits


def test_micro_batches_are_lowered_to_divide_the_batch() -> None:
    config = config_of("bert_large_2level.yaml")
    lowered = divided(config, Nodes(count=16, gpus=8))
    assert [level.micro_batch for level in resolve_levels(lowered)] == [4, 4]
    kept = divided(config, Nodes(count=1, gpus=8))
    assert [level.micro_batch for level in resolve_levels(kept)] == [64, 64]
    with pytest.raises(ConfigError, match="global_batch=512 is not a multiple of 1024 data-parallel ranks"):
        divided(config, Nodes(count=128, gpus=8))


def test_a_step_shorter_than_its_launches_is_warned_of() -> None:
    assert "is less than launching its kernels takes" in " ".join(
        printed(planned("bert_large_3level_16nodes.yaml", 16)).split()
    )
    assert "launching" not in printed(planned("bert_large_2level.yaml", 1))


def test_memory_speed_and_shares_are_read() -> None:
    sizes = {"80GB": 80e9, "80GiB": 80 * 2**30, "40 gb": 40e9, "8e10": 8e10, "1.5TB": 1.5e12, "80G": 80e9}
    assert {text: memory_of(text) for text in sizes} == sizes
    assert gpu_of("h200", None).memory_bytes == 141e9 and gpu_of("H100", "60GB").memory_bytes == 60e9
    assert gpu_of("1e15", None).peak("fp32") == 1e15
    assert shares_of("0.4") == (0.4,) and shares_of("0.45,0.3") == (0.45, 0.3)


WRONG = [
    (["--gpu-memory", "40GB"], "--gpu-memory 40GB is for --nodes; give --nodes too"),
    (["--mfu", "0.4"], "--mfu 0.4 is for --nodes"),
    (["--nodes", "two"], "--nodes two: expected a number of nodes"),
    (["--nodes", "0"], "--nodes 0: expected a number of nodes"),
    (["--nodes", "1", "--gpu-memory", "much"], "--gpu-memory much: no size of memory"),
    (["--nodes", "1", "--peak-flops", "B52"], "--peak-flops B52: neither FLOPs a second"),
    (["--nodes", "1", "--mfu", "40"], "--mfu 40: expected a share"),
    (["--nodes", "1", "--mfu", "0.4,0.3,0.2"], "--mfu has 3 values for 2 levels"),
    (["--nodes", "2", "--ranks", "8"], "--ranks 8 is not --nodes 2 times --gpus-per-node 8"),
    (["--nodes", "3"], "global_batch=512 is not a multiple of micro_batch=64 x 24 data-parallel ranks"),
]


@pytest.mark.parametrize(("options", "problem"), WRONG)
def test_wrong_options_are_refused_by_name(options: list[str], problem: str, capsys: Any) -> None:
    code = cli.run(["plan", "--config", str(CONFIGS / "bert_large_2level.yaml"), *options])
    assert code == 2 and problem in capsys.readouterr().err


def test_json_says_what_the_tables_say(capsys: Any) -> None:
    arguments = ["plan", "--config", str(CONFIGS / "bert_large_2level.yaml"), "--json", "--nodes"]
    assert cli.run([*arguments, "1"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["ranks"] == 8 and one["levels"][0]["data_parallel"] == 8
    assert one["cluster"]["levels"][0]["memory"]["weights"] == 2 * BERT_LARGE
    assert cli.run([*arguments, "1,128"]) == 0
    several = json.loads(capsys.readouterr().out)["clusters"]
    assert several[0]["hours"] == one["cluster"]["hours"] and "global_batch=512" in several[1]["error"]


def test_sizes_are_one_row_each() -> None:
    console = Console(width=80, no_color=True)
    rows: list[tuple[int, ClusterOverview | str]] = [
        (8, planned("gpt_70b.yaml", 1)),
        (32, planned("gpt_70b.yaml", 4)),
        (4096, "too many"),
    ]
    with console.capture() as capture:
        render_sizes(rows, console)
    lines = capture.get().splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    found = {line.split()[0]: line.split() for line in lines if re.match(r" *[\d,]+ +[\d-]", line)}
    assert "no" in found["8"] and "yes" in found["32"] and found["4,096"][1:] == ["-"] * 7
    assert "8 GPUs, level 1 does not fit: --nodes 4" in capture.get() and "4,096 GPUs: too many" in capture.get()


def test_refused_errors_are_the_users() -> None:
    with pytest.raises(UserError):
        planned("demo_gpt.yaml", 1, "training.global_batch=7")
