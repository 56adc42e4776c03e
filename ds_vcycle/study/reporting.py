"""The report in a study's directory: results.json, report.html, report.md, runs.csv, pictures. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from ds_vcycle.chart import colours, draw, draw_bars
from ds_vcycle.report import console_table, saving_text
from ds_vcycle.seeds import SeedComparison, Spread
from ds_vcycle.study.rendering import markdown, savings_table, to_csv, to_html, verdict, write_text
from ds_vcycle.study.summary import GroupSummary, Summary, to_json


def write_report(summary: Summary, comparisons: Mapping[str, SeedComparison], out: Path) -> list[Path]:
    """Write everything; the paths written, the page to open first.

    Raises:
        ReportError: a file cannot be written.
    """
    results = write_text(out / "results.json", to_json(summary))
    pictures = {group.name: _pictures(group, comparisons[group.name], out) for group in summary.groups}
    return [
        write_text(out / "report.html", to_html(summary, pictures)),
        write_text(out / "report.md", markdown(summary)),
        write_text(out / "runs.csv", to_csv(summary)),
        results,
    ]


def print_report(summary: Summary, console: Console) -> None:
    """The savings of each group as a table, with a sentence about each."""
    for group in summary.groups:
        console.print(console_table(f"{group.name} ({group.base})", savings_table(group)))
        for name in group.variants:
            if name != group.baseline and group.of(name):
                console.print(f"- {name}: {verdict(group.saving(name, 'saved_flops'))}.", highlight=False)
        for note in group.notes:
            console.print(f"- {note}", highlight=False)
        console.print()
    for line in summary.missing:
        console.print(f"- {line}", highlight=False)


def agreement(summary: Summary, documented: Summary) -> list[str]:
    """How savings found now stand to documented ones: a line for each variant and seed that both have.

    Within the stated spread: no further from the documented mean than two of its standard deviations, or half a percent
    point where these are less (a cost counted at evaluations can be the same for every seed).
    """
    lines = []
    known = {group.name: group for group in documented.groups}
    for group in summary.groups:
        for run in group.runs:
            if run.variant == group.baseline or group.name not in known:
                continue
            stated = known[group.name].saving(run.variant, "saved_flops")
            lines.append(f"{group.name}/{run.variant} seed {run.seed}: {_stands(run.saved_flops, stated)}")
    return lines


def _stands(found: float | None, stated: Spread) -> str:
    if not stated.values:
        return "not documented"
    if stated.mean is None or stated.deviation is None or found is None:
        return f"documented {stated}, now {saving_text(found)}"
    if len(stated.values) == 1:
        return f"documented {stated.mean:+.1%} by one seed, which has no spread, now {found:+.1%}"
    within = abs(found - stated.mean) <= max(2 * stated.deviation, _LEAST_SPREAD)
    return f"documented {stated}, now {found:+.1%}: {'within' if within else 'NOT within'} two standard deviations"


_LEAST_SPREAD = 0.005


def _pictures(group: GroupSummary, comparison: SeedComparison, out: Path) -> list[Path]:
    """The curves of the first seed, and bars over all seeds."""
    first = comparison.seeds[0]
    curves = out / f"{group.name}-curves-seed-{first}.png"
    draw(comparison.comparisons[first], curves)
    names = [variant.name for variant in comparison.variants]
    if not names:
        return [curves]
    savings: dict[str, dict[str, Spread]] = {
        name: {key: group.saving(name, key) for key in ("saved_flops", "saved_seconds")} for name in names
    }
    figure = Figure(figsize=(9, 1.2 + 0.6 * len(names)), dpi=120, layout="constrained")
    draw_bars(figure.subplots(), savings, colours=colours(len(names) + 1)[1:])
    bars = out / f"{group.name}-savings.png"
    figure.savefig(bars)
    return [bars, curves]
