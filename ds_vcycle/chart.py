"""The picture of a comparison: held-out loss against its costs, one colour per run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ds_vcycle.comparison import Comparison, Row
from ds_vcycle.rundir import Run
from ds_vcycle.seeds import Spread
from ds_vcycle.train.metrics import EvaluationRecord

Quantity: TypeAlias = Literal["flops", "seconds", "tokens"]
# Okabe and Ito's colours, told apart with any colour vision; black is kept for the baseline's loss.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Level 1 is solid; the smaller the level, the more broken its line.
LINE_STYLES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (1, 1.5)))


def draw(comparison: Comparison, path: Path) -> None:
    """Write the PNG: loss against FLOPs, wall time and tokens, and bars of what each run saved.

    Level 1 is solid, coarser levels broken and thinner, transitions are triangles (down, up).
    """
    figure = Figure(figsize=(13, 9), dpi=120, layout="constrained")
    axes = figure.subplots(2, 2).flat
    runs = [row.run for row in comparison.rows]
    for panel, (quantity, label) in zip(axes, _QUANTITIES.items()):
        _draw_panel(panel, comparison, quantity, label)
    figure.suptitle(f"Cost to the baseline's final held-out loss {comparison.loss:.3f}", x=0.01, ha="left")
    bars = figure.axes[3]
    if len(runs) > 1:
        savings = {row.run.name: _of_row(row) for row in comparison.rows if row.run.name != comparison.baseline}
        draw_bars(bars, savings, colours=colours(len(runs))[1:])
    else:
        bars.axis("off")
    _legend(figure.axes[0], comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_bars(axes: Axes, savings: Mapping[str, Mapping[str, Spread]], *, colours: Sequence[str]) -> None:
    """Bars of what was saved, FLOPs full and wall time pale, whiskers of one standard deviation over seeds.

    Args:
        axes: to draw on.
        savings: by name of the run or variant, then ``saved_flops`` and ``saved_seconds``.
        colours: of each.
    """
    for row, (name, colour) in enumerate(zip(savings, colours)):
        for offset, key, alpha in ((-0.2, "saved_flops", 1.0), (0.2, "saved_seconds", 0.45)):
            spread = savings[name][key]
            if spread.mean is None or spread.deviation is None:
                axes.text(0, row + offset, " not reached", va="center", fontsize=8)
                continue
            axes.barh(row + offset, 100 * spread.mean, 0.36, color=colour, alpha=alpha)
            if spread.deviation:
                axes.errorbar(100 * spread.mean, row + offset, xerr=100 * spread.deviation, color="black", capsize=3)
    axes.set_yticks(range(len(savings)), list(savings))
    axes.set_ylim(len(savings) - 0.4, -0.6)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_xlabel("saved, % of the baseline's cost (full: FLOPs; pale: wall time)")
    _plain(axes)


_QUANTITIES: dict[Quantity, str] = {
    "flops": "model FLOPs since the first step, coarse levels included",
    "seconds": "wall time without evaluations, s",
    "tokens": "tokens since the first step",
}


def _of_row(row: Row) -> dict[str, Spread]:
    return {key: Spread(values=(getattr(row, key),)) for key in ("saved_flops", "saved_seconds")}


def _draw_panel(axes: Axes, comparison: Comparison, quantity: Quantity, label: str) -> None:
    runs = [row.run for row in comparison.rows]
    _limit_loss(axes, runs)
    power = 0 if quantity == "seconds" else _power(max(getattr(run.total, quantity) for run in runs))
    for colour, row in zip(colours(len(runs)), comparison.rows):
        _draw_run(axes, row.run, colour, quantity, 10.0**power)
        if row.reached is not None:
            reached = getattr(row.reached, quantity) / 10.0**power
            axes.plot(reached, comparison.loss, "o", color=colour, ms=8, mec="white", zorder=5)
    axes.axhline(comparison.loss, color="black", lw=0.8, ls=":", zorder=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{label} (10$^{{{power}}}$)" if power else label)
    axes.set_ylabel("held-out loss (nats per predicted token)")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(color="0.9", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_run(axes: Axes, run: Run, colour: str, quantity: Quantity, unit: float) -> None:
    stretches = [list(records) for _, records in groupby(run.evaluations, key=lambda record: record.phase)]
    for records in stretches:
        level = records[0].level
        axes.plot(
            [getattr(record, quantity) / unit for record in records],
            [record.loss for record in records],
            color=colour,
            lw=2.2 if level == 1 else 1.4,
            ls=LINE_STYLES[min(level, len(LINE_STYLES)) - 1],
            marker="." if len(records) == 1 else None,
        )
    for before, after in pairwise(stretches):
        _draw_transition(axes, before[-1], after[0], colour, quantity, unit)


def _draw_transition(
    axes: Axes, before: EvaluationRecord, after: EvaluationRecord, colour: str, quantity: Quantity, unit: float
) -> None:
    """A thin line from the last loss of one level to the first of the next, a triangle at its middle."""
    x, y = tuple(getattr(at, quantity) / unit for at in (before, after)), (before.loss, after.loss)
    axes.plot(x, y, color=colour, lw=0.8, alpha=0.5)
    marker = "v" if after.level > before.level else "^"
    middle = min(sum(y) / 2, axes.get_ylim()[1])  # where the loss is off the chart, the triangle stays on its edge
    axes.plot(sum(x) / 2, middle, marker, color=colour, ms=7, mec="white", zorder=4, clip_on=False)


def _limit_loss(axes: Axes, runs: Sequence[Run]) -> None:
    """Leave the first, steep part of the curves out where it would flatten all that matters into one line."""
    losses = sorted(record.loss for run in runs for record in run.evaluations if math.isfinite(record.loss))
    low, start = losses[0], losses[-1]
    middle = losses[len(losses) // 2]
    high = min(start, low + 4 * (middle - low)) if middle > low else start
    margin = 0.04 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _legend(axes: Axes, comparison: Comparison) -> None:
    handles = []
    for colour, row in zip(colours(len(comparison.rows)), comparison.rows):
        saved = "baseline" if row.run.name == comparison.baseline else "not reached"
        if row.saved_flops is not None and row.run.name != comparison.baseline:
            saved = f"{row.saved_flops:+.1%} FLOPs saved"
        handles.append(Line2D([], [], color=colour, lw=2.2, label=f"{row.run.name} ({saved})"))
    levels = max(record.level for row in comparison.rows for record in row.run.evaluations)
    for level in range(1, levels + 1):
        style = LINE_STYLES[min(level, len(LINE_STYLES)) - 1]
        handles.append(Line2D([], [], color="0.3", lw=2.2 if level == 1 else 1.4, ls=style, label=f"level {level}"))
    if levels > 1:
        handles.append(Line2D([], [], color="0.3", marker="v", ls="", ms=7, label="coalesce"))
        handles.append(Line2D([], [], color="0.3", marker="^", ls="", ms=7, label="refine"))
    handles.append(Line2D([], [], color="0.3", marker="o", ls="", ms=7, label="baseline's final loss reached"))
    axes.legend(handles=handles, frameon=False, fontsize=9)


def colours(count: int) -> list[str]:
    """A colour for each of ``count`` runs."""
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _power(flops: float) -> int:
    return math.floor(math.log10(flops)) if flops > 0 else 0
