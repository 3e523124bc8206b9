"""Where does the time of a step go? One trace of all processes of a run, for a trace viewer, and a table.

In: `with SPANS("forward"):` around work, in the driver, a trainer rank or an engine. Out: a file of spans beside the logs for each process,
and from all of them trace.json, Chrome's trace format, which ui.perfetto.dev and chrome://tracing open. While no file is open a span costs
nothing and leaves nothing. Clocks are each machine's own: processes of one node line up, nodes by as much as their clocks agree.

It knows no GPU: what a program queues there is not over when the call returns, so whoever queues gives `open` a barrier that waits for it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gptoss.obs.disk import disk_errors

STEP = "step "  # a span of the driver with this name and a number is a step; everything is measured against these
FOLDER, TRACE = "trace", "trace.json"  # in a run directory


@dataclass(frozen=True)
class Span:
    process: str  # "driver", "trainer-0", "engine-0": the name of its file
    name: str
    start_us: int  # since 1970
    duration_us: int
    beside: bool = False  # runs beside others of its name, as turns do; the rest nest

    @property
    def end_us(self) -> int:
        return self.start_us + self.duration_us


class Recorder:
    """Of one process, for all its threads. Spans are written as they end, each with one system call: none is torn by another, and a killed
    process loses only what it was at."""

    def __init__(self) -> None:
        self._file: int | None = None  # a descriptor
        self._barrier: Callable[[], object] | None = None

    def open(self, file: Path, barrier: Callable[[], object] | None = None) -> None:
        """From now on spans go to `file`. `barrier` is called at both ends of every span that nests."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.close()
        self._file, self._barrier = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), barrier

    def close(self) -> None:
        file, self._file, self._barrier = self._file, None, None
        if file is not None:
            os.close(file)

    def note(self, name: str, seconds: float) -> None:
        """A span that somebody else has measured, and that ends now."""
        if self._file is not None:
            self._write(name, time.time_ns() // 1000 - int(1e6 * seconds), int(1e6 * seconds), beside=False)

    def _write(self, name: str, start_us: int, duration_us: int, *, beside: bool) -> None:
        if self._file is not None:  # it may have been closed meanwhile
            os.write(self._file, (json.dumps([name, start_us, duration_us, beside]) + "\n").encode())

    @contextmanager
    def __call__(self, name: str, *, beside: bool = False) -> Iterator[None]:
        if self._file is None:
            yield
            return
        barrier = None if beside else self._barrier
        if barrier:
            barrier()
        start_us, start = time.time_ns() // 1000, time.perf_counter_ns()
        try:
            yield
            if barrier:
                barrier()
        finally:
            self._write(name, start_us, (time.perf_counter_ns() - start) // 1000, beside=beside)


SPANS = Recorder()  # this process's: spans are like log lines, wanted in places that know nothing of each other


def read_spans(folder: Path) -> list[Span]:
    """Of all processes, by start. A line that a killed process left torn is passed over."""
    spans = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                name, start_us, duration_us, beside = json.loads(line)
            except ValueError:
                continue
            spans.append(Span(file.stem, name, start_us, duration_us, beside))
    return sorted(spans, key=lambda span: (span.start_us, -span.duration_us))


def of_last_steps(spans: Sequence[Span], count: int) -> list[Span]:
    """What began within the last `count` steps, they included; what began between two, an evaluation or a save, is left out."""
    steps = [span for span in spans if span.name.startswith(STEP)][-count:]
    return [span for span in spans if any(step.start_us <= span.start_us < step.end_us for step in steps)]


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Processes under each other, each with its nested spans on one track; those beside each other on tracks of their own."""
    events: list[dict[str, Any]] = []
    processes = {name: number for number, name in enumerate(dict.fromkeys(span.process for span in sorted(spans, key=lambda s: s.process)))}
    began = min((span.start_us for span in spans), default=0)
    for name, number in processes.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
    for identity, span in enumerate(spans):
        common = {"name": span.name, "cat": span.process, "pid": processes[span.process], "tid": 0, "ts": span.start_us - began}
        if span.beside:
            events.append(common | {"ph": "b", "id": identity})
            events.append(common | {"ph": "e", "id": identity, "ts": span.end_us - began})
        else:
            events.append(common | {"ph": "X", "dur": span.duration_us})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def chrome_trace_spans(trace: Mapping[str, Any]) -> list[Span]:
    """What `chrome_trace` was made of, from 0 on."""
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    spans = [
        Span(names[event["pid"]], event["name"], event["ts"], event["dur"])
        if event["ph"] == "X"
        else Span(names[event["pid"]], event["name"], event["ts"], ends[event["id"]] - event["ts"], True)
        for event in events
        if event["ph"] in "Xb"
    ]
    return sorted(spans, key=lambda span: (span.start_us, -span.duration_us))


@dataclass(frozen=True)
class Share:
    """Of all spans with one path of names in one process, per step."""

    process: str
    path: tuple[str, ...]  # names from the outermost in; a step's own is left out
    count: float  # a step
    seconds: float  # a step, inner spans included
    rest_s: float  # of them, in no inner span
    of_step: float  # share of a step's time


def shares(spans: Sequence[Span]) -> list[Share]:
    """Means over the steps in `spans`, of everything that nests, in the order in which things first happened."""
    steps = [span for span in spans if span.name.startswith(STEP)]
    total = sum(span.duration_us for span in steps) / 1e6
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for process in dict.fromkeys(span.process for span in spans):
        open_spans: list[tuple[Span, tuple[str, ...]]] = []
        for span in (s for s in spans if s.process == process and not s.beside):
            while open_spans and open_spans[-1][0].end_us <= span.start_us:
                open_spans.pop()
            outer = open_spans[-1][1] if open_spans else ()
            path = outer if span.name.startswith(STEP) else (*outer, span.name)
            open_spans.append((span, path))
            if path:
                entry = sums[process, path]
                entry[0] += 1
                entry[1] += span.duration_us / 1e6
                entry[2] += span.duration_us / 1e6
                if outer:
                    sums[process, outer][2] -= span.duration_us / 1e6
    n = len(steps)
    return [
        Share(process, path, count / n, seconds / n, max(rest, 0.0) / n, seconds / total)
        for (process, path), (count, seconds, rest) in (sums.items() if n and total else ())
    ]


@dataclass(frozen=True)
class Crowd:
    """Of all spans of one name that run beside each other in one process."""

    process: str
    name: str
    count: float  # a step
    mean_s: float
    at_once: float  # mean number, over the time in which there was any


def crowds(spans: Sequence[Span]) -> list[Crowd]:
    steps = sum(span.name.startswith(STEP) for span in spans)
    found: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.beside:
            found[span.process, span.name].append(span)
    made = []
    for (process, name), group in found.items() if steps else ():
        busy_us, until = 0, 0
        for span in sorted(group, key=lambda s: s.start_us):
            busy_us += max(0, span.end_us - max(span.start_us, until))
            until = max(until, span.end_us)
        total_us = sum(span.duration_us for span in group)
        made.append(Crowd(process, name, len(group) / steps, total_us / len(group) / 1e6, total_us / busy_us if busy_us else 0.0))
    return made


def table_rows(found: Sequence[Share], beside: Sequence[Crowd] = ()) -> list[tuple[str, str]]:
    """For the console: indented by depth, a heading where the process changes. Things of one depth in the order they first happened."""
    rows: list[tuple[str, str]] = []
    order = {(share.process, share.path): number for number, share in enumerate(found)}

    def place(share: Share) -> list[int]:
        return [order[share.process, share.path[: depth + 1]] for depth in range(len(share.path))]

    for process, group in itertools.groupby(found, key=lambda share: share.process):
        rows.append((process, ""))
        for share in sorted(group, key=place):
            inner = "" if share.rest_s > share.seconds - 5e-7 else f", {1e3 * share.rest_s:.1f} ms of it in none of its parts"
            times = "" if share.count == 1 else f" in {share.count:g}"
            words = f"{1e3 * share.seconds:8.1f} ms{times}, {share.of_step:.1%}{inner}"
            rows.append(("  " * len(share.path) + share.path[-1], words))
    for crowd in beside:
        words = f"{crowd.count:g} a step, {1e3 * crowd.mean_s:.1f} ms each, {crowd.at_once:.1f} at once"
        rows += [(f"{crowd.process}, side by side", ""), (f"  {crowd.name}", words)]
    return rows


def write_trace(run_dir: Path, last_steps: int) -> list[tuple[str, str]]:
    """trace.json of a run's last steps, and where their time went, as rows of a table. [] and no file where no step was traced."""
    spans = of_last_steps(read_spans(run_dir / FOLDER), last_steps)
    if not spans:
        return []
    with disk_errors(run_dir / TRACE):
        (run_dir / TRACE).write_text(json.dumps(chrome_trace(spans)))
    return table_rows(shares(spans), crowds(spans))
