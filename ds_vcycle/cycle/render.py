"""The overview of a run as tables and sentences for the terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ds_vcycle.cycle.overview import Overview, TransitionOverview

if TYPE_CHECKING:
    from ds_vcycle.sharding.traffic import ParameterTraffic


def render(plan: Overview, console: Console) -> None:
    """Print the overview as tables and sentences."""
    vocabulary = f"vocabulary {plan.vocab_size:,} padded to {plan.padded_vocab:,}"
    console.print(
        f"[bold]{plan.architecture.upper()}[/], sequences of {plan.sequence_length} tokens "
        f"({plan.predicted_positions} predicted), {vocabulary}, {plan.global_batch} samples a step"
    )
    console.print()
    console.print(_level_table(plan))
    if len({level.precision for level in plan.levels}) > 1:
        own = ", ".join(f"level {level.index} {level.precision}" for level in plan.levels)
        console.print(f"precision: {own}", highlight=False)
    console.print()
    for transition in plan.transitions:
        _render_transition(transition, console)
    console.print()
    console.print(_phase_table(plan))
    console.print()
    _render_comparison(plan, console)
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)


def count_text(value: float) -> str:
    """A count with three digits and a suffix: 335.2 M. No suffix below 10,000."""
    for suffix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= unit:
            scale = 1e3 if suffix == "k" else unit
            return f"{value / scale:.4g} {suffix}"
    return f"{value:,.0f}"


def bytes_text(value: int) -> str:
    """Bytes with three digits and a decimal unit: 335 MB; 0 as a dash."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} B" if value else "-"


def flops_text(value: float) -> str:
    """FLOPs as 4.96e13."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _table(title: str, *, show_footer: bool = False) -> Table:
    """A table without frames, so that a usual plan fits into 80 columns."""
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), show_footer=show_footer)


def _level_table(plan: Overview) -> Table:
    table = _table("Levels" if plan.ranks is None else f"Levels on {plan.ranks} rank{'s' if plan.ranks > 1 else ''}")
    headings = ["#", "layers", "hidden", "heads", "ffn", "parameters", "TP", "ZeRO"]
    headings += ["micro\nbatch"] if plan.ranks is None else ["micro\nbatch", "DP"]
    for heading in [*headings, "FLOPs\nper step"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for level in plan.levels:
        grouped = f" ({level.kv_groups} KV)" if level.kv_groups != level.heads else ""
        layout = [str(level.micro_batch)]
        if level.data_parallel is not None:
            layout = [f"{level.micro_batch} x {level.micro_batches}", str(level.data_parallel)]
        table.add_row(
            str(level.index),
            str(level.layers),
            str(level.hidden),
            f"{level.heads} x {level.head_dim}{grouped}",
            str(level.ffn),
            f"{level.parameters:,}",
            str(level.tensor_parallel),
            str(level.zero_stage),
            *layout,
            flops_text(level.step_flops),
        )
    return table


def _render_transition(transition: TransitionOverview, console: Console) -> None:
    verdict = "[green]lossless[/]" if transition.lossless else "[yellow]not lossless[/]"
    reason = "de-coalescing keeps the coarse model's function" if transition.lossless else "; ".join(transition.notes)
    console.print(f"Levels {transition.fine} and {transition.coarse}: {verdict}: {reason}", highlight=False)
    for row in transition.groupings:
        if row.fine == row.coarse:
            console.print(f"  {row.axis}: {row.fine:,}, not grouped", highlight=False)
            continue
        sizes = ", ".join(f"{n:,} group{'s' if n > 1 else ''} of {size}" for size, n in row.group_sizes.items())
        console.print(f"  {row.axis}: {row.fine:,} -> {row.coarse:,}, {row.grouping}: {sizes}", highlight=False)
    if transition.traffic is not None:
        _render_traffic(transition, transition.traffic, console)


def _render_traffic(transition: TransitionOverview, rows: Sequence[ParameterTraffic], console: Console) -> None:
    """Bytes sent for the weights; the layers of a template are added up, and so are all vectors."""
    crossing: dict[str, list[ParameterTraffic]] = {}
    for row in rows:
        if not row.local:
            crossing.setdefault(row.template if row.matrix else "biases, norms", []).append(row)
    if not crossing:
        console.print(f"  traffic: none, all {len(rows)} coarse parameters stay within a rank", highlight=False)
        return
    size = bytes_text(4 * sum(row.coarse_elements for row in rows))
    moments = "; Adam's moments, mapped, send as much twice more" if transition.moments == "map" else ""
    local = sum(row.local for row in rows)
    console.print(
        f"  traffic of the weights (the coarse model is {size}{moments}): {local} of {len(rows)} coarse parameters "
        "stay within a rank",
        highlight=False,
    )
    table = _table("")
    for heading in ("  crosses ranks", "parameters", "coalesce", "at most\na rank", "refine", "at most\na rank"):
        table.add_column(heading, justify="left" if "crosses" in heading else "right", overflow="fold")
    for name, members in [*crossing.items(), ("all", list(rows))]:
        sent = [row.coalesce for row in members], [row.refine for row in members]
        cells = [text(way) for way in sent for text in (_total_text, _most_text)]
        table.add_row(f"  {'.'.join(name.split('.')[-2:])}", str(len(members)), *cells)
    console.print(table, highlight=False)


def _total_text(rows: Sequence[Sequence[int]]) -> str:
    return bytes_text(sum(map(sum, rows)))


def _most_text(rows: Sequence[Sequence[int]]) -> str:
    return bytes_text(max(map(sum, zip(*rows, strict=True)), default=0))


def _phase_table(plan: Overview) -> Table:
    table = _table("Phases", show_footer=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("phase", footer="total")
    steps = sum(row.steps for row in plan.phases)
    footers = {
        "steps": f"{steps:,}",
        "tokens": count_text(plan.tokens),
        "FLOPs": flops_text(plan.flops),
        "blocks": flops_text(plan.flops_blocks),
        "share": "",
    }
    for heading, footer in footers.items():
        table.add_column(heading, justify="right", no_wrap=True, footer=footer)
    for row in plan.phases:
        cells = (
            f"{row.steps:,}",
            count_text(row.tokens),
            flops_text(row.flops),
            flops_text(row.flops_blocks),
            f"{row.share:.1%}",
        )
        table.add_row(str(row.index), f"[bold]{row.phase}[/]\n{row.detail}", *(cells if row.steps else ()))
    return table


def _render_comparison(plan: Overview, console: Console) -> None:
    console.print(
        "FLOPs count forward and backward (= 2 x forward), attention in full, the head at the "
        f"{plan.predicted_positions} predicted positions of a sample; 'blocks' leaves the head out.",
        highlight=False,
    )
    recomputed = sum(level.step_recompute_flops for level in plan.levels)
    if recomputed:
        extra = ", ".join(f"level {level.index} {flops_text(level.step_recompute_flops)}" for level in plan.levels)
        console.print(f"Activation recompute adds, not counted above, per step: {extra}.", highlight=False)
    if len(plan.phases) == 1:
        return
    console.print(
        f"For the same FLOPs plain training of level 1 gets {plan.flat_steps_at_equal_flops:,.0f} steps.",
        highlight=False,
    )
    if plan.flat_steps is not None and plan.flat_flops and plan.flat_flops_blocks:
        console.print(
            f"Flat run of cycle.flat.steps={plan.flat_steps:,}: {flops_text(plan.flat_flops)} FLOPs; this cycle to its "
            f"end costs {plan.flops / plan.flat_flops:.1%} of it ({plan.flops_blocks / plan.flat_flops_blocks:.1%} by "
            "blocks).",
            highlight=False,
        )
