"""What ``plan --ranks`` says of the bytes a transition sends."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ds_vcycle.config import load_config
from ds_vcycle.cycle.overview import overview
from ds_vcycle.cycle.render import render

CONFIGS = Path(__file__).parent.parent / "configs"


def plan_of(name, *overrides, ranks):
    return overview(load_config(CONFIGS / name, list(overrides)), ranks=ranks)


def printed(plan):
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        render(plan, console)
    return " ".join(capture.get().split())


def test_adjacent_groups_under_one_tensor_parallel_degree_are_local():
    plan = plan_of("demo_gpt.yaml", "model.tensor_parallel=2", ranks=2)
    assert all(row.local for row in plan.transitions[0].traffic)
    assert "traffic: none, all 28 coarse parameters stay within a rank" in printed(plan)


def test_stacked_heads_send_half_of_what_they_are():
    """Heads 0, 1 of rank 0 and 2, 3 of rank 1 form the groups (0, 2), (1, 3): each rank sums one head of either."""
    plan = plan_of(
        "demo_gpt.yaml", "model.tensor_parallel=2", "operators.groupings.head=stack", "training.zero_stage=0", ranks=2
    )
    rows = {row.name: row for row in plan.transitions[0].traffic}
    crossing = {row.template.split("layers.{}.")[-1] for row in rows.values() if not row.local}
    assert crossing == {f"self_attention.linear_{name}" for name in ("proj.weight", "qkv.weight", "qkv.bias")}
    projection = rows["decoder.layers.0.self_attention.linear_proj.weight"]  # 64 x 64 at the coarse level
    assert projection.coalesce == (8 * 64 * 32, 8 * 64 * 32)  # float64 sums of the other rank's head
    assert projection.refine == (4 * 64 * 32, 4 * 64 * 32)
    assert "linear_proj.weight 2 65.5 kB 32.8 kB 32.8 kB 16.4 kB" in printed(plan)


def test_sums_of_a_flat_partition_go_to_their_owners():
    """ZeRO 1 on BERT-Large: all but what an owner sums itself is sent once, so never more than the coarse model."""
    plan = plan_of("bert_large_2level.yaml", ranks=8)
    rows = plan.transitions[0].traffic
    elements = sum(row.coarse_elements for row in rows)
    assert 0 < sum(map(sum, (row.coalesce for row in rows))) <= 8 * elements
    assert any(row.local for row in rows) and not all(row.local for row in rows)


def test_without_ranks_nothing_is_said_of_traffic():
    plan = overview(load_config(CONFIGS / "demo_gpt.yaml"))
    assert plan.transitions[0].traffic is None and "traffic" not in printed(plan)
