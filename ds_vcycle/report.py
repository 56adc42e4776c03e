"""What ``ds-vcycle compare RUN...`` prints and writes: a table, its notes, a chart; over seeds. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_vcycle.chart import draw
from ds_vcycle.comparison import Comparison, ReportError, Row
from ds_vcycle.comparison import compare as compare
from ds_vcycle.cycle.render import count_text, flops_text
from ds_vcycle.seeds import QUANTITIES, SeedComparison

Cells = list[list[str]]
"""A table, its header first; the first column has the rows' names."""


def markdown_table(cells: Cells) -> list[str]:
    """The table as lines of markdown."""
    header, *body = cells
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in body]


def console_table(title: str, cells: Cells, *, wrap_names: bool = True) -> Table:
    """The table for a terminal; ``wrap_names``: whether the rows' names may be broken."""
    header, *body = cells
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(header[0], overflow="fold", no_wrap=not wrap_names)
    for name in header[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in body:
        table.add_row(*row)
    return table


def saving_text(value: float | None) -> str:
    """A saving in words; None where the loss was not reached."""
    return "not reached" if value is None else f"{value:+.1%}"


def write(comparison: Comparison, out: Path) -> tuple[Path, Path, Path]:
    """Write the chart to ``out``.png, the table to ``out``.md and its values to ``out``.csv; the paths written.

    Raises:
        ReportError: ``out`` names no file, or cannot be written.
    """
    _require_name(out)
    chart, table, values = (out.with_name(out.name + ending) for ending in (".png", ".md", ".csv"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(comparison, chart)
        table.write_text(
            f"{markdown(comparison)}\n![held-out loss against its costs]({chart.name})\n", encoding="utf-8"
        )
        values.write_text(to_csv(comparison), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"--out {out}: cannot be written ({error.strerror}); give another path") from error
    return chart, table, values


def _require_name(out: Path) -> None:
    if not out.name or out.name == "..":
        raise ReportError(f"--out {out}: names no file; give a path without an ending, e.g. runs/compare")


def markdown(comparison: Comparison) -> str:
    """The comparison as a markdown table with its notes."""
    return "\n".join([*markdown_table(_cells(comparison)), "", *(f"- {note}" for note in comparison.notes)]) + "\n"


def render(comparison: Comparison, console: Console) -> None:
    """Print the comparison as a table with its notes."""
    title = f"Held-out loss and cost; the baseline is {comparison.baseline}"
    console.print(console_table(title, _cells(comparison), wrap_names=False))
    for note in comparison.notes:
        console.print(f"- {note}", highlight=False)


def render_seeds(found: SeedComparison, console: Console) -> None:
    """Print the savings over the seeds as a table."""
    title = f"Saved against {found.baseline}, {_SEEDS_NOTE.format(seeds=', '.join(map(str, found.seeds)))}"
    console.print(console_table(title, _seed_cells(found)))


def write_seeds(found: SeedComparison, out: Path) -> tuple[Path, ...]:
    """Write the table over the seeds to ``out``.md, and chart and table of each seed to ``out``-seed-N; the paths.

    Raises:
        ReportError: ``out`` names no file, or cannot be written.
    """
    _require_name(out)
    written = [
        path for seed, one in found.comparisons.items() for path in write(one, out.with_name(f"{out.name}-seed-{seed}"))
    ]
    note = f"Saved against {found.baseline}, {_SEEDS_NOTE.format(seeds=', '.join(map(str, found.seeds)))}."
    table = out.with_name(out.name + ".md")
    table.write_text("\n".join([note, "", *markdown_table(_seed_cells(found)), ""]), encoding="utf-8")
    return (table, *written)


def seeds_to_json(found: SeedComparison) -> dict[str, Any]:
    """The savings over the seeds as plain values, with each seed's comparison."""
    variants = []
    for variant in found.variants:
        spreads = {
            key: {"values": list(spread.values), "mean": spread.mean, "deviation": spread.deviation}
            for key, spread in variant.savings.items()
        }
        variants.append({"variant": variant.name, "seeds": list(variant.seeds), **spreads})
    seeds = {str(seed): to_json(one) for seed, one in found.comparisons.items()}
    return {"baseline": found.baseline, "variants": variants, "seeds": seeds}


_SEEDS_NOTE = "each run with the baseline of its seed (training.seed {seeds}): mean ± standard deviation"


def _seed_cells(found: SeedComparison) -> Cells:
    header = ["", "seeds", *(label.removeprefix("saved ") for label in _SAVINGS)]
    return [
        header,
        *([v.name, str(len(v.seeds)), *(str(v.savings[key]) for key in QUANTITIES)] for v in found.variants),
    ]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain values for ``--json``."""
    rows = []
    for row in comparison.rows:
        values = {key: getattr(row, key) for key in ("final_loss", "best_loss", *QUANTITIES)}
        reached = None if row.reached is None else asdict(row.reached)
        rows.append(
            {
                "run": row.run.name,
                "run_dir": str(row.run.directory),
                **values,
                "total": asdict(row.run.total),
                "reached": reached,
            }
        )
    return {"baseline": comparison.baseline, "loss": comparison.loss, "runs": rows, "notes": list(comparison.notes)}


def to_csv(comparison: Comparison) -> str:
    """A row for each run: its losses, its costs in all and to the baseline's loss, its savings; empty: not reached."""
    out = StringIO()
    found = to_json(comparison)["runs"]
    costs = list(found[0]["total"])
    plain = ["run", "run_dir", "final_loss", "best_loss", *QUANTITIES]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*plain, *(f"{place}_{cost}" for place in ("total", "reached") for cost in costs)])
    for run in found:
        spent = [(run[place] or {}).get(cost) for place in ("total", "reached") for cost in costs]
        writer.writerow([*(run[key] for key in plain), *spent])
    return out.getvalue()


def _cells(comparison: Comparison) -> Cells:
    """Rows are quantities and columns are runs: a few runs then fit into 80 columns with their units spelt out."""
    table = [["", *(row.run.name for row in comparison.rows)]]
    for label, cell in _quantities(comparison.loss).items():
        table.append([label, *(cell(row) for row in comparison.rows)])
    for label, saving in _SAVINGS.items():
        table.append([label, "baseline", *(saving_text(saving(row)) for row in comparison.rows[1:])])
    return table


_SAVINGS: dict[str, Callable[[Row], float | None]] = {
    "saved FLOPs": lambda row: row.saved_flops,
    "saved FLOPs, blocks only": lambda row: row.saved_flops_blocks,
    "saved tokens": lambda row: row.saved_tokens,
    "saved wall time": lambda row: row.saved_seconds,
}


def _quantities(loss: float) -> dict[str, Callable[[Row], str]]:
    return {
        "final held-out loss": lambda row: f"{row.final_loss:.4f}",
        "best held-out loss": lambda row: f"{row.best_loss:.4f}",
        "whole run: tokens": lambda row: count_text(row.run.total.tokens),
        "whole run: FLOPs": lambda row: flops_text(row.run.total.flops),
        "whole run: wall time, s": lambda row: f"{row.run.total.seconds:,.1f}",
        f"to loss {loss:.4f}: tokens": lambda row: count_text(row.reached.tokens) if row.reached else "not reached",
        f"to loss {loss:.4f}: FLOPs": lambda row: flops_text(row.reached.flops) if row.reached else "not reached",
        f"to loss {loss:.4f}: wall time, s": lambda row: (
            f"{row.reached.seconds:,.1f}" if row.reached else "not reached"
        ),
    }
