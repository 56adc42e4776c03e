"""The picture of a comparison: held-out loss against model FLOPs, one colour per run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ds_vcycle.comparison import Comparison
from ds_vcycle.rundir import Run
from ds_vcycle.train.metrics import EvaluationRecord

# Okabe and Ito's colours, told apart with any colour vision; black is kept for the baseline's loss.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Level 1 is solid; the smaller the level, the more broken its line.
LINE_STYLES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (1, 1.5)))


def draw(comparison: Comparison, path: Path) -> None:
    """Write the PNG: level 1 solid, coarser levels broken and thinner, transitions as triangles (down, up)."""
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    runs = [row.run for row in comparison.rows]
    _limit_loss(axes, runs)
    power = _power(max(run.total.flops for run in runs))
    for colour, row in zip(_colours(len(runs)), comparison.rows):
        _draw_run(axes, row.run, colour, 10.0**power)
        if row.reached is not None:
            axes.plot(row.reached.flops / 10.0**power, comparison.loss, "o", color=colour, ms=8, mec="white", zorder=5)
    axes.axhline(comparison.loss, color="black", lw=0.8, ls=":", zorder=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"model FLOPs since the first step, coarse levels included (10$^{{{power}}}$ FLOPs)")
    axes.set_ylabel("held-out loss (nats per predicted token)")
    axes.set_title(f"Cost to the baseline's final held-out loss {comparison.loss:.3f}", loc="left")
    axes.grid(color="0.9", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_run(axes: Axes, run: Run, colour: str, unit: float) -> None:
    stretches = [list(records) for _, records in groupby(run.evaluations, key=lambda record: record.phase)]
    for records in stretches:
        level = records[0].level
        axes.plot(
            [record.flops / unit for record in records],
            [record.loss for record in records],
            color=colour,
            lw=2.2 if level == 1 else 1.4,
            ls=LINE_STYLES[min(level, len(LINE_STYLES)) - 1],
            marker="." if len(records) == 1 else None,
        )
    for before, after in pairwise(stretches):
        _draw_transition(axes, before[-1], after[0], colour, unit)


def _draw_transition(axes: Axes, before: EvaluationRecord, after: EvaluationRecord, colour: str, unit: float) -> None:
    """A thin line from the last loss of one level to the first of the next, a triangle at its middle."""
    x, y = (before.flops / unit, after.flops / unit), (before.loss, after.loss)
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
    for colour, row in zip(_colours(len(comparison.rows)), comparison.rows):
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


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _power(flops: float) -> int:
    return math.floor(math.log10(flops)) if flops > 0 else 0
