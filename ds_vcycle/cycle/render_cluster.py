"""A run on a cluster as tables and sentences for the terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ds_vcycle.cycle.cluster import ClusterOverview, LevelOnCluster
from ds_vcycle.cycle.gpu import RESERVE
from ds_vcycle.cycle.render import bytes_text, count_text, flops_text


def render_cluster(found: ClusterOverview, console: Console) -> None:
    """Print memory, what does not fit, time and traffic."""
    console.print()
    console.print(_heading(found), highlight=False)
    console.print()
    console.print(_memory_table(found.levels), highlight=False)
    _render_verdict(found, console)
    console.print()
    console.print(_time_table(found.levels), highlight=False)
    _render_hours(found, console)
    _render_traffic(found, console)
    _render_warnings(found, console)


def render_sizes(rows: Sequence[tuple[int, ClusterOverview | str]], console: Console) -> None:
    """Print one row for each size of the cluster: (GPUs, the overview or why there is none)."""
    first = next((found for _, found in rows if isinstance(found, ClusterOverview)), None)
    if first is not None:
        console.print(_gpu_text(first), highlight=False)
    table = _table("")
    layout, sent = ("level 1\nDP x micro", "peak GB,\nlevel 1"), ("a node sends\nGB a step", "GB/s")
    for heading in ("GPUs", *layout, "fits", "hours", "saved\nhours", *sent):
        table.add_column(heading, justify="right", no_wrap=True)
    for gpus, found in rows:
        table.add_row(f"{gpus:,}", *(_size_row(found) if isinstance(found, ClusterOverview) else ["-"] * 7))
    console.print(table, highlight=False)
    for gpus, found in rows:
        if isinstance(found, str):
            console.print(f"{gpus:,} GPUs: {found}", highlight=False)
            continue
        for level in found.levels:
            if not level.fits:
                console.print(f"{gpus:,} GPUs, level {level.index} does not fit: {level.changes[0]}", highlight=False)


def _size_row(found: ClusterOverview) -> list[str]:
    level = found.levels[0]
    saved = "-" if found.flat_hours is None else _hours_text(found.flat_hours - found.hours)
    sent = [f"{level.sent_bytes / 1e9:.3g}", f"{level.sent_rate / 1e9:.3g}"] if level.sent_bytes else ["-", "-"]
    layout = f"{level.data_parallel:,} x {level.micro_batch}"
    peak = f"{level.memory.peak / 1e9:.1f}"
    return [layout, peak, "yes" if found.fits else "no", _hours_text(found.hours), saved, *sent]


def _heading(found: ClusterOverview) -> str:
    nodes = f"{found.nodes} node{'s' if found.nodes > 1 else ''} of {found.gpus_per_node} GPUs"
    return f"[bold]On {nodes}[/], planned, not measured. {_gpu_text(found)}"


def _gpu_text(found: ClusterOverview) -> str:
    gpu = found.gpu
    shares = sorted(set(found.mfu))
    reached = " to ".join(f"{share:.0%}" for share in (shares[0], shares[-1])[: len(shares)])
    speed = f"{flops_text(gpu.bf16_flops)} FLOPs a second, {reached} of it reached"
    return f"{gpu.name}: {bytes_text(gpu.memory_bytes)}, {speed}."


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def _memory_table(levels: Sequence[LevelOnCluster]) -> Table:
    table = _table("Memory of a GPU in GB")
    for heading in ("#", "weights", "masters", "moments", "gradients", "activations", "logits", "peak", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in levels:
        held = level.memory
        parts = (held.weights, held.masters, held.moments, held.gradients, held.activations, held.logits, held.peak)
        fits = "[green]yes[/]" if level.fits else "[red]no[/]"
        table.add_row(str(level.index), *(f"{part / 1e9:.2f}" for part in parts), fits)
    return table


def _render_verdict(found: ClusterOverview, console: Console) -> None:
    console.print(
        "Gradients with DeepSpeed's buckets and fp32 copies. Not all is at its most at once: the peak is the largest "
        f"moment of a step. It fits if {RESERVE:.0%} of the memory stay free for CUDA, NCCL and gaps.",
        highlight=False,
    )
    for level in found.levels:
        if level.teacher_bytes:
            more = f"{level.teacher_bytes / 1e9:.2f} GB more, while it is there"
            console.print(f"Level {level.index}'s teacher takes at most {more}.", highlight=False)
        if level.fits:
            continue
        console.print(f"[red]Level {level.index} does not fit.[/] With one of:", highlight=False)
        for change in level.changes:
            console.print(f"  {change}", highlight=False)


def _time_table(levels: Sequence[LevelOnCluster]) -> Table:
    table = _table("Time and traffic")
    headings = (
        "#",
        "steps",
        "tokens",
        "ms a\nstep",
        "hours",
        "host GB a node\nfor parked",
        "a node sends\na step",
        "GB/s",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for level in levels:
        table.add_row(
            str(level.index),
            f"{level.steps:,}",
            count_text(level.tokens),
            _milliseconds(level),
            _hours_text(level.hours),
            f"{level.parked_bytes / 1e9:.2f}" if level.parked_bytes else "-",
            bytes_text(level.sent_bytes),
            f"{level.sent_rate / 1e9:.3g}" if level.sent_bytes else "-",
        )
    return table


def _render_hours(found: ClusterOverview, console: Console) -> None:
    hours, flat = f"The cycle takes {_hours_text(found.hours)} hours of computing", found.flat_hours
    plain = f", plain training of level 1 {_hours_text(flat)}: {1 - found.hours / flat:.1%} saved" if flat else ""
    console.print(f"{hours}{plain}.", highlight=False)
    console.print(
        "Saves, evaluations and changes of level come on top, and what the network cannot hide: GB/s is what a node "
        "must send while it computes.",
        highlight=False,
    )


def _render_warnings(found: ClusterOverview, console: Console) -> None:
    for level in found.levels:
        if level.launch_bound:
            console.print(
                f"[yellow]warning:[/] level {level.index}: {_milliseconds(level)} ms a step is less than launching its "
                "kernels takes, so it will last longer; fewer nodes or a larger training.global_batch serve it better",
                highlight=False,
            )
        if not level.within_node:
            console.print(
                f"[yellow]warning:[/] level {level.index}: tensor_parallel={level.tensor_parallel} does not divide a "
                f"node's {found.gpus_per_node} GPUs, so every layer's sums cross the network; lower it",
                highlight=False,
            )


def _render_traffic(found: ClusterOverview, console: Console) -> None:
    for level in found.levels:
        if level.summed_bytes:
            rate = f"{level.summed_bytes / level.step_seconds / 1e9:.3g} GB/s"
            console.print(
                f"Level {level.index}: tensor parallelism takes {bytes_text(level.summed_bytes)} a step out of each "
                f"GPU ({rate}){', within its node' if level.within_node else ''}.",
                highlight=False,
            )
    for change in found.transitions:
        between = f"Levels {change.fine} and {change.coarse} (coarse weights {bytes_text(change.coarse_bytes)}): "
        if found.nodes == 1:
            console.print(f"{between}nothing leaves the node.", highlight=False)
            continue
        down, up = bytes_text(change.bytes.coalesce), bytes_text(change.bytes.refine)
        console.print(
            f"{between}between nodes at most {down} to coalesce, {up} to refine, all nodes together.", highlight=False
        )
    size = bytes_text(max(level.checkpoint_bytes for level in found.levels))
    console.print(f"A checkpoint is at most {size}, all ranks together.", highlight=False)


def _milliseconds(level: LevelOnCluster) -> str:
    value = 1e3 * level.step_seconds
    return f"{value:.3g}" if value < 1e3 else f"{value:,.0f}"


def _hours_text(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
