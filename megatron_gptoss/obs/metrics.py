"""What did each step measure?

In: a step number and named values. Out: metrics.jsonl, one JSON object a step, and the same numbers as TensorBoard scalars. Values that are
not finite are written as the JSON strings "nan", "inf" and "-inf", because JSON has no numbers for them; `read_metrics` turns them back.
Uses tensorboard's own writer: the driver needs no torch for it. Does not decide what is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# protobuf makes these classes at import, where a type checker cannot see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_gptoss.obs.disk import disk_errors
from megatron_gptoss.obs.json_floats import NOT_FINITE, to_json
from megatron_gptoss.obs.run_dir import RunDir, write_atomic

Value = float | int | bool | str


class MetricsLog:
    """Append-only over steps. Values given later for the step last written join its object: an evaluation after the update, say."""

    def __init__(self, run: RunDir, resumed_step: int | None = None, clock: Callable[[], float] = time.time):
        """`resumed_step`: the last finished step of the checkpoint a run goes on from; what was logged after it is dropped."""
        self._clock = clock
        rows = read_metrics(run.metrics_file) if run.metrics_file.exists() else []
        if rows and resumed_step is None:
            raise ValueError(f"{run.metrics_file} has entries already, and this run is not resumed")
        rows = [row for row in rows if row["step"] <= (resumed_step or 0)]
        write_atomic(run.metrics_file, "".join(_line(row) for row in rows))
        self._last: dict[str, Any] = rows[-1] if rows else {}
        self._path = run.metrics_file
        self._file = self._path.open("r+b")
        self._last_start = self._file.seek(0, 2) - (len(_line(self._last).encode()) if rows else 0)
        with disk_errors(run.tensorboard):
            self._events = EventFileWriter(str(run.tensorboard))
        if resumed_step is not None:
            # TensorBoard then hides what an earlier session logged from this step on.
            start = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(wall_time=clock(), step=resumed_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Steps never go down. Flushed before it returns. MachineError when the disk is full."""
        last_step = self._last.get("step", -1)
        if step < last_step:
            raise ValueError(f"step {step} after step {last_step}")
        now = self._clock()
        if step == last_step:
            self._last = self._last | dict(values)
            self._file.seek(self._last_start)
        else:
            self._last = {"step": step, "time": now, **values}
            self._last_start = self._file.seek(0, 2)
        with disk_errors(self._path):
            self._file.write(_line(self._last).encode())
            self._file.truncate()
            self._file.flush()
        scalars = [Summary.Value(tag=name, simple_value=float(v)) for name, v in values.items() if not isinstance(v, str)]
        with disk_errors(Path(self._events.get_logdir())):
            self._events.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
            self._events.flush()

    def close(self) -> None:
        # Every write was flushed. What a full disk refused has been said, and both would try once more to write it.
        for log in (self._file, self._events):
            with suppress(OSError):
                log.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole objects, in order. A last line that an interrupted write left torn is passed over."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append({name: NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in row.items()})
    return rows


def _line(row: Mapping[str, Any]) -> str:
    plain = {name: to_json(v) if isinstance(v, float) else v for name, v in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"
