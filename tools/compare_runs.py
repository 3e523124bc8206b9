"""Two or more runs side by side: which settings differ, at which step they part, and how their metrics went.

    python tools/compare_runs.py runs/demo-1 runs/demo-2 [runs/demo-3 ...] [--picture both.png] [--metrics reward/mean,grad/norm]

In: run directories (config.toml and metrics.jsonl; a run that still goes on will do). Out: on the terminal the settings that differ, the
first step at which each run differs from the first one, and a table of metrics; a picture if asked. Changes nothing.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_gptoss.errors import ConfigError, DataError, GptossError
from megatron_gptoss.obs.metrics import read_metrics
from megatron_gptoss.obs.report import points
from megatron_gptoss.obs.run_dir import RunDir

SHOWN = ("reward/mean", "eval/success", "mismatch/k3", "mismatch/logp_abs_max", "policy/entropy", "policy/clip_fraction", "grad/norm",
         "time/step_s")  # fmt: skip
# Settings in which two runs always differ.
NAMES = ("run.id", "run.name", "run.dir", "run.resume")


@dataclass(frozen=True)
class Run:
    name: str
    settings: dict[str, Any]  # "rl.lr" -> value
    rows: list[dict[str, Any]]  # of metrics.jsonl, by step


def read_run(path: Path) -> Run:
    run = RunDir(path)
    if not run.config_file.is_file() or not run.metrics_file.is_file():
        raise ConfigError(
            f"{path} is not a run directory: it has no {'config.toml' if not run.config_file.is_file() else 'metrics.jsonl'}."
        )
    try:
        config = tomllib.loads(run.config_file.read_text())
    except ValueError as error:
        raise DataError(f"{run.config_file} is not TOML: {error}.") from None
    settings = {f"{section}.{key}": value for section, values in config.items() for key, value in values.items()}
    return Run(path.name, settings, read_metrics(run.metrics_file))


def settings_that_differ(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Key -> value in each run, "-" where a run does not know the key. Names and places of runs are left out."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {key: [run.settings.get(key, "-") for run in runs] for key in keys if key not in NAMES}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def is_measured_by_clock(metric: str) -> bool:
    return metric.split("/")[0] == "time" or metric.endswith("_per_s")


@dataclass(frozen=True)
class Parting:
    """Where a run first differs from another one."""

    step: int
    metrics: tuple[tuple[str, Any, Any], ...]  # name, in the first run, in this one; only those that both measured


def first_difference(a: Run, b: Run) -> Parting | None:
    """Of what both runs measured at steps that both made, clocks left out; exact. None: no difference as far as both go."""
    of_b = {row["step"]: row for row in b.rows}
    for row in a.rows:
        other = of_b.get(row["step"], {})
        names = [name for name in row if name in other and name != "step" and not is_measured_by_clock(name)]
        differing = tuple((name, row[name], other[name]) for name in names if not _same(row[name], other[name]))
        if differing:
            return Parting(row["step"], differing)
    return None


def _same(x: Any, y: Any) -> bool:
    return x == y or (isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y))


def metric_rows(run: Run, metric: str) -> tuple[str, str, str, str]:
    """(first, last, mean of the last five, how many steps measured it) as words."""
    values = [value for _, value in points(run.rows, metric)]
    if not values:
        return ("-", "-", "-", "0")
    tail = values[-5:]
    return (f"{values[0]:.4g}", f"{values[-1]:.4g}", f"{sum(tail) / len(tail):.4g}", str(len(values)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def draw(runs: Sequence[Run], metrics: Sequence[str], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(metrics), 3)
    lines = math.ceil(len(metrics) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 3.6 * lines), constrained_layout=True, squeeze=False)
    for ax, metric in zip_longest(axes.flat, metrics):
        if metric is None:
            ax.axis("off")
            continue
        ax.set_title(metric)
        ax.grid(alpha=0.25)
        for number, run in enumerate(runs):
            found = points(run.rows, metric)
            if found:  # a run has one colour in all panels, also where another was not measured
                ax.plot(*zip(*found, strict=True), marker=".", markersize=4, color=f"C{number}", label=run.name)
        ax.set_xlabel("step")
    handles, labels = next((a.get_legend_handles_labels() for a in axes.flat if a.get_legend_handles_labels()[1]), ([], []))
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(labels), 1))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.")],
    metrics: Annotated[str, typer.Option(help="Names of metrics.jsonl, comma-separated.")] = ",".join(SHOWN),
    picture: Annotated[Path | None, typer.Option(help="Where to put a picture.")] = None,
) -> None:
    """Put runs side by side."""
    if len(paths) < 2:
        raise ConfigError("one run has nothing to be compared with; give two or more run directories.")
    runs = [read_run(path) for path in paths]
    names = [name for name in metrics.split(",") if name]
    known = {name for run in runs for row in run.rows for name in row}
    if unknown := [name for name in names if name not in known and metrics != ",".join(SHOWN)]:
        raise ConfigError(f"no run has measured {', '.join(unknown)}. There are: {', '.join(sorted(known - {'step', 'time'}))}.")
    differing = settings_that_differ(runs)
    print("settings that differ" if differing else "no setting differs")
    if differing:
        print(table(["", *(run.name for run in runs)], [[key, *map(str, values)] for key, values in differing.items()]))
    print()
    for run in runs[1:]:
        parting = first_difference(runs[0], run)
        if parting is None:
            both = len({row["step"] for row in runs[0].rows} & {row["step"] for row in run.rows})
            print(f"{run.name} is {runs[0].name} to the last digit, over {both} steps that both made")
        else:
            shown = ", ".join(f"{name} {x!r} -> {y!r}" for name, x, y in parting.metrics[:4])
            more = f" and {len(parting.metrics) - 4} more" if len(parting.metrics) > 4 else ""
            print(f"{run.name} differs from {runs[0].name} from step {parting.step} on: {shown}{more}")
    print()
    lines = [[name, run.name, *metric_rows(run, name)] for name in names if name in known for run in runs]
    print(table(["metric", "run", "first", "last", "mean of last 5", "steps"], lines))
    if picture:
        draw(runs, [name for name in names if name in known], picture)
        print(f"\npicture {picture}")


if __name__ == "__main__":
    try:
        typer.run(compare)
    except GptossError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
