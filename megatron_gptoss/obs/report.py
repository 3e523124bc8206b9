"""Did this run learn, and is it sound? One picture.

In: a run's metrics.jsonl. Out: a PNG with six panels over steps: reward, held-out success, trainer against engine, gradient norm, entropy,
and where the time went. Panels of metrics that were not measured say so. Does not compute metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gptoss.obs.metrics import read_metrics
from megatron_gptoss.obs.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY = "#1f77b4", "#ff7f0e", "#2ca02c", "#9aa0a6"
# A phase has one colour in every report.
PHASE_COLOURS = {"rollout": BLUE, "score": GREEN, "update": ORANGE, "sync": "#d62728"}
Points = list[tuple[int, float]]


def write_report(run_dir: Path, out_png: Path) -> None:
    """Raises FileNotFoundError when the run has no metrics, ValueError when there is no step in them."""
    rows = read_metrics(RunDir(run_dir).metrics_file)
    if not rows:
        raise ValueError(f"{RunDir(run_dir).metrics_file} has no steps yet")
    import matplotlib  # here, because it takes half a second that a run without a report need not spend

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for draw, ax in zip((_reward, _success, _mismatch, _gradient, _entropy, _time), axes.flat, strict=True):
        draw(ax, rows)
        ax.set_xlabel("step")
        ax.grid(alpha=0.25)
        ax.set_xlim(rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{run_dir.name}: {rows[-1]['step']} steps", fontsize=15)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=110)
    plt.close(figure)


def points(rows: Sequence[dict[str, Any]], name: str) -> Points:
    """(step, value) wherever `name` was measured and is finite."""
    return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the `width - 1` before it; fewer at the start. [2, 4, 6] with width 2 is [2, 3, 5]."""
    return [sum(values[max(i - width + 1, 0) : i + 1]) / len(values[max(i - width + 1, 0) : i + 1]) for i in range(len(values))]


def _line(ax: Axes, found: Points, label: str, **style: Any) -> None:
    if found:
        ax.plot(*zip(*found, strict=True), label=label, **style)


def _absent(ax: Axes, what: str) -> None:
    ax.text(0.5, 0.5, f"{what} was not measured", ha="center", va="center", transform=ax.transAxes, color=GREY)


def _reward(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ax.set_title("Reward of the training rollouts")
    found = points(rows, "reward/mean")
    if not found:
        return _absent(ax, "reward")
    _line(ax, found, "step", color=BLUE, alpha=0.35, marker=".", markersize=4)
    steps, values = zip(*found, strict=True)
    _line(ax, list(zip(steps, running_mean(values, 5), strict=True)), "mean of 5 steps", color=BLUE, linewidth=2.5)
    ax.set_ylabel("mean reward")
    ax.legend(loc="lower right")


def _success(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ax.set_title("Success on held-out problems")
    found = points(rows, "eval/success")
    if not found:
        return _absent(ax, "held-out success")
    _line(ax, found, "success", color=GREEN, marker="o", linewidth=2)
    ax.set_ylim(-0.03, 1.08)
    ax.set_ylabel("share of problems solved")
    ends = [(found[0], "start"), (found[-1], "end")] if len(found) > 1 else [(found[0], "start")]
    for (step, value), word in ends:
        below = value > (0.15 if word == "start" else 0.85)  # off the line, which mostly rises, and inside the panel
        ax.annotate(
            f"{word} {value:.3f}",
            (step, value),
            xytext=(10 if word == "start" else -4, -20 if below else 12),
            textcoords="offset points",
            ha="right" if word == "end" else "left",
            fontweight="bold",
        )


def _mismatch(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ax.set_title("Trainer against engine, same tokens")
    largest, k3 = points(rows, "mismatch/logp_abs_max"), points(rows, "mismatch/k3")
    positive = [[(s, v) for s, v in series if v > 0] for series in (largest, k3)]  # a logarithm has no place for an exact 0
    if not any(positive):
        return _absent(ax, "a difference") if not (largest or k3) else _note(ax, "exactly equal at every step")
    _line(ax, positive[0], "largest log-prob gap", color=ORANGE, linewidth=1.8)
    _line(ax, positive[1], "k3 (KL estimate)", color=BLUE, linewidth=1.8)
    ax.set_yscale("log")
    ax.set_ylabel("nats")
    ax.legend(loc="best")


def _note(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes)


def _gradient(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ax.set_title("Gradient norm, before clipping")
    found = points(rows, "grad/norm")
    if not found:
        return _absent(ax, "the gradient norm")
    _line(ax, found, "gradient norm", color=ORANGE, marker=".", linewidth=1.5)
    skipped = [row["step"] for row in rows if row.get("train/skipped")]
    if skipped:
        ax.plot(skipped, [0.0] * len(skipped), "x", color="#d62728", label="no update", clip_on=False)
        ax.legend(loc="best")
    ax.set_ylim(bottom=0)


def _entropy(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ax.set_title("Entropy of the policy")
    found = points(rows, "policy/entropy")
    if not found:
        return _absent(ax, "entropy")
    _line(ax, found, "entropy", color="#9467bd", marker=".", linewidth=1.5)
    ax.set_ylabel("nats per token")
    ax.set_ylim(bottom=0)


def _time(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ax.set_title("Where the time of a step goes")
    timed = [row for row in rows if points([row], "time/step_s") or any(points([row], f"time/{p}_s") for p in PHASE_COLOURS)]
    if not timed:
        return _absent(ax, "time")
    steps = [row["step"] for row in timed]
    base = [0.0] * len(timed)
    for phase, colour in PHASE_COLOURS.items():
        values = [sum(v for _, v in points([row], f"time/{phase}_s")) for row in timed]
        ax.bar(steps, values, bottom=base, width=0.9, color=colour, label=f"{phase} ({sum(values) / len(values):.1f} s)")
        base = [b + v for b, v in zip(base, values, strict=True)]
    whole = [max(sum(v for _, v in points([row], "time/step_s")), b) for row, b in zip(timed, base, strict=True)]
    rest = [w - b for w, b in zip(whole, base, strict=True)]
    if any(rest):
        ax.bar(steps, rest, bottom=base, width=0.9, color=GREY, label=f"other ({sum(rest) / len(rest):.1f} s)")
    ax.set_ylim(0, max(whole) * 1.35 or 1.0)  # room for the legend
    ax.set_ylabel("seconds")
    ax.legend(loc="upper center", ncols=3, title="mean per step", fontsize=9)
