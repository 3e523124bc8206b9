"""How did several runs go, side by side? One picture, a panel for each metric, a colour for each setting.

In: rows of metrics.jsonl by setting and seed. Out: a PNG. A panel in which nothing was measured says so. Does not read run directories and
does not judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gptoss.obs.report import Points, points, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
# In the order of use; the first is the one that the others are compared with.
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#e377c2")


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    unit: str = ""
    logarithmic: bool = False  # values at or below 0 have no place there, and are left out
    smooth: int = 1  # mean of so many steps is the line; the steps themselves stand pale behind it


def draw_curves(title: str, runs: Mapping[str, Sequence[Rows]], panels: Sequence[Panel], out_png: Path, *, columns: int = 4) -> Figure:
    """`runs`: label -> the rows of each seed. Seeds are thin lines, their mean over the steps that all have is a thick one."""
    import matplotlib  # here, because it takes half a second that a run without a picture need not spend

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.5 * lines + 1.0), constrained_layout=True, squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(ax, panel, runs)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    handles = [Line2D([], [], color=colour, linewidth=2.5, label=label) for label, colour in zip(runs, _colours(runs), strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 4), frameon=False, fontsize=11)
    figure.suptitle(title, fontsize=14)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=80)
    plt.close(figure)
    return figure


def _colours(runs: Mapping[str, Any]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]


def _draw_panel(ax: Axes, panel: Panel, runs: Mapping[str, Sequence[Rows]]) -> None:
    ax.set_title(panel.title, fontsize=11)
    ax.set_xlabel("step")
    ax.set_ylabel(panel.unit)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    drawn = 0
    for seeds, colour in zip(runs.values(), _colours(runs), strict=True):
        found = [of_seed for rows in seeds if (of_seed := _points(rows, panel))]
        drawn += len(found)
        for each in found:
            pale: dict[str, Any] = (
                {"alpha": 0.3, "linewidth": 0.8} if len(found) > 1 or panel.smooth > 1 else {"alpha": 0.9, "linewidth": 1.6}
            )
            ax.plot(*zip(*each, strict=True), color=colour, marker="." if len(each) < 12 else "", **pale)
        together = mean_of_seeds(found)
        if together and (len(found) > 1 or panel.smooth > 1):
            steps, values = zip(*together, strict=True)
            ax.plot(steps, running_mean(values, panel.smooth), color=colour, linewidth=2.0)
    if not drawn:
        measured = any(points([dict(row) for row in rows], panel.metric) for seeds in runs.values() for rows in seeds)
        words = "0 at every step" if measured else "not measured"
        ax.text(0.5, 0.5, words, ha="center", va="center", transform=ax.transAxes, color="#9aa0a6")
    elif panel.logarithmic:
        ax.set_yscale("log")


def _points(rows: Rows, panel: Panel) -> Points:
    found = points([dict(row) for row in rows], panel.metric)
    return [(step, value) for step, value in found if value > 0] if panel.logarithmic else found


def mean_of_seeds(seeds: Sequence[Points]) -> Points:
    """Over the steps that every seed has; [] without seeds."""
    tables = [dict(each) for each in seeds]
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [(step, sum(table[step] for table in tables) / len(tables)) for step in common]
