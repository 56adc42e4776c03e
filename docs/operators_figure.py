"""Draws docs/operators.svg: one weight matrix down and up with the numbers of the rules, and the three depth policies.

``python docs/operators_figure.py`` writes the SVG beside this file, with the same bytes each time.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Values = npt.NDArray[np.float64]
COLOURS = np.array([["#cfe3f3", "#f8dcc8"], ["#cdeadf", "#f2d9e7"]])  # one per coarse element
FINE: Values = np.array([[4, 2, 1, 0], [3, 1, 2, 1], [0, 2, 5, 3], [1, 1, 4, 2]], dtype=float)
POLICIES = {
    "copy (paper)": ("mean", ("1", "1"), "adds the branch twice"),
    "split": ("sum", ("1/2", "1/2"), "kept to first order"),
    "first": ("sum", ("1", "0"), "kept exactly"),
}


def coalesce(x: Values) -> Values:
    """Rows produce: mean over pairs; columns consume: sum over pairs."""
    by_group: Values = x.reshape(2, 2, 2, 2)  # (coarse row, member, coarse column, member)
    result: Values = by_group.mean(axis=1).sum(axis=2)
    return result


def decoalesce(y: Values) -> Values:
    """Rows produce: copied to both members; columns consume: divided by two."""
    return np.repeat(np.repeat(y, 2, axis=0), 2, axis=1) / 2


def draw(path: Path) -> None:
    """Write the figure."""
    matplotlib.rcParams.update({"svg.hashsalt": "operators", "font.size": 10, "svg.fonttype": "none"})
    figure = Figure(figsize=(10.5, 6.0), layout="constrained")
    halves = np.asarray(figure.subfigures(2, 1, height_ratios=(1.15, 1)))
    _draw_width(halves[0].subplots(1, 4, width_ratios=(4, 2.4, 2.4, 4)))
    _draw_depth(halves[1].subplots(1, 3))
    figure.savefig(path, metadata={"Date": None})


def _draw_width(panels: npt.NDArray[np.object_]) -> None:
    coarse = coalesce(FINE)
    trained = coarse + np.array([[1, -1], [-2, 2]])
    _matrix(panels[0], FINE, "x: fine weight\n(rows produce, columns consume)")
    _matrix(panels[1], coarse, "C x\nmean of rows,\nsum of columns")
    _matrix(panels[2], trained, "y: C x after\ncoarse training\n")
    _matrix(panels[3], decoalesce(trained), "P(y)\nrows copied, columns divided by 2")
    for panel, text in zip(panels, ("coalesce", "train", "de-coalesce")):
        panel.annotate(text, (1.02, -0.12), xycoords="axes fraction", ha="center", annotation_clip=False)
        panel.annotate(
            "", (1.17, -0.03), (0.87, -0.03), xycoords="axes fraction", arrowprops={"arrowstyle": "->"},
            annotation_clip=False,
        )  # fmt: skip


def _matrix(axes: Axes, values: Values, title: str) -> None:
    """Cells coloured by their coarse element, thick lines around the groups."""
    rows, columns = values.shape
    for row, column in np.ndindex(rows, columns):
        colour = COLOURS[row * 2 // rows, column * 2 // columns]
        axes.add_patch(_box(column, row, 1, 1, facecolor=colour, edgecolor="white"))
        axes.text(column + 0.5, row + 0.5, f"{values[row, column]:g}", ha="center", va="center")
    for row, column in np.ndindex(2, 2):
        height, width = rows / 2, columns / 2
        axes.add_patch(_box(column * width, row * height, width, height, facecolor="none", edgecolor="0.3"))
    axes.set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def _draw_depth(panels: npt.NDArray[np.object_]) -> None:
    for axes, (policy, (down, factors, effect)) in zip(panels, POLICIES.items()):
        _cell(axes, 0.0, 0.62, "fine layer 2i", "#cfe3f3")
        _cell(axes, 0.0, 0.12, "fine layer 2i+1", "#cfe3f3")
        _cell(axes, 0.62, 0.37, "coarse layer i", "#f8dcc8")
        for height, factor in zip((0.74, 0.24), factors):
            axes.annotate("", (0.38, height), (0.62, 0.49), arrowprops={"arrowstyle": "->"})
            shift = 0.09 if height > 0.5 else -0.09
            axes.text(0.5, (height + 0.49) / 2 + shift, f"x {factor}", ha="center", va="center")
        axes.set(xlim=(-0.02, 1.02), ylim=(0, 1))
        axes.set_title(f"residual writers, {policy}: {down} down\nup: {effect}", fontsize=10)
        axes.axis("off")


def _cell(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.add_patch(_box(x, y, 0.38, 0.24, facecolor=colour, edgecolor="0.3"))
    axes.text(x + 0.19, y + 0.12, text, ha="center", va="center")


def _box(x: float, y: float, width: float, height: float, *, facecolor: str, edgecolor: str) -> Rectangle:
    return Rectangle((x, y), width, height, linewidth=1.2, facecolor=facecolor, edgecolor=edgecolor)


if __name__ == "__main__":
    draw(Path(__file__).with_name("operators.svg"))
