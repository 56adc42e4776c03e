"""The overview of a run as tables and sentences for the terminal. Imports no torch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ds_vcycle.cycle.overview import Overview, TransitionOverview


def render(plan: Overview, console: Console) -> None:
    """Print the overview as tables and sentences."""
    vocabulary = f"vocabulary {plan.vocab_size:,} padded to {plan.padded_vocab:,}"
    console.print(
        f"[bold]{plan.architecture.upper()}[/], sequences of {plan.sequence_length} tokens "
        f"({plan.predicted_positions} predicted), {vocabulary}, {plan.global_batch} samples a step"
    )
    console.print()
    console.print(_level_table(plan))
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
        sizes = ", ".join(f"{count:,} groups of {size}" for size, count in row.group_sizes.items())
        console.print(f"  {row.axis}: {row.fine:,} -> {row.coarse:,}, {row.grouping}: {sizes}", highlight=False)


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
