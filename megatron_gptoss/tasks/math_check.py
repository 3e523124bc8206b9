"""Is an answer the reference answer? The final answer of a text, and math-verify behind a deadline.

In: a text, a reference. Out: an `Outcome`. It does not judge the way there. math-verify stops itself with signals, which work only in a
process's main thread (from another thread it scores 0), and it can hang in one multiplication. So it runs in processes of its own, killed
at the deadline and started again when next needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Literal

from megatron_gptoss.errors import RunFailed

Outcome = Literal["equal", "different", "no-answer", "timeout", "crashed"]
START_TIMEOUT_S = 60.0  # importing sympy takes about 2 s, on a loaded machine many times that


def final_answer(text: str) -> str | None:
    """The answer a text marks as its own, None if it marks none. The strongest marker decides, and of several of one kind the last.

    1. `\\boxed{...}`, what the prompt asks for. 2. A line `#### ...`, GSM8K's own. 3. A line `A: ...`, as in the example model solutions
    published with GSM8K. A number without a marker is no answer: it may be any number of the working.
    """
    marked = _last_boxed(text)
    for marker in (r"####", r"A:"):
        if marked is None:
            lines = re.findall(rf"^[ \t]*{marker}(.*)$", text, flags=re.MULTILINE)
            marked = lines[-1] if lines else None
    if marked is None:
        return None
    return marked.strip().removesuffix(".").strip() or None  # "18." ends a sentence


def _last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{}, braces matched; None without one, or when it never closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
        if depth == 0:
            return text[start:at]
    return None


class MathChecker:
    """Compares answers in up to `num_workers` processes. Any number of threads may call `check`; it blocks while all are busy.

    Processes start when needed and stay. `close` ends them; they also end by themselves when this process does.
    """

    def __init__(self, timeout_s: float, num_workers: int = 2) -> None:
        self.timeout_s = timeout_s
        self._free = threading.BoundedSemaphore(num_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    def check(self, gold: str, text: str) -> Outcome:
        """Whether the final answer of `text` equals `gold`. RunFailed when no worker can be started or after `close`."""
        answer = final_answer(text)
        return "no-answer" if answer is None else self.compare(gold, answer)

    def compare(self, gold: str, answer: str) -> Outcome:
        """Whether two answers, as LaTeX or plain numbers, are equal. The deadline is `timeout_s`, a worker's start not counted."""
        with self._free:
            outcome = self._ask_once(gold, answer)
            # A worker may have been killed by somebody else, an out-of-memory killer say; two crashes in a row are the answer's doing.
            return self._ask_once(gold, answer) if outcome == "crashed" else outcome

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.end()  # one that is busy is released by the thread that asked it, which sees it die
            for worker in self._idle:
                worker.release()
            self._all.clear()
            self._idle.clear()

    def _ask_once(self, gold: str, answer: str) -> Outcome:
        worker = self._take()
        outcome = worker.ask(gold, answer, self.timeout_s)
        with self._lock:
            if outcome in ("equal", "different") and not self._closed:
                self._idle.append(worker)
            else:
                self._all.discard(worker)
                worker.release()
        return outcome

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RunFailed("the answer checker was used after it was closed")
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                self._all.discard(worker)
                worker.release()
            worker = _Worker()
            self._all.add(worker)
        try:
            worker.wait_until_ready()
        except RunFailed:
            with self._lock:
                self._all.discard(worker)
                worker.release()
            raise
        return worker


class _Worker:
    """One math-verify process. Used by one thread at a time."""

    def __init__(self) -> None:
        # Popen starts a fresh program (no fork of the driver, which holds Ray's threads) and lets no other child inherit the pipes, so the
        # worker sees the end of stdin when this process dies. Its own session keeps Ctrl-C away from it. -P: no script folder in sys.path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._stdin, self._stdout = _open(self._process.stdin), _open(self._process.stdout)
        self._buffer = b""

    def wait_until_ready(self) -> None:
        line = self._read_line(START_TIMEOUT_S)
        if line is None or "ready" not in line:
            why = (line or {}).get("error") or f"it gave no sign of life for {START_TIMEOUT_S:.0f} s or ended with {self._process.poll()}"
            raise RunFailed(f"the math-verify process did not start: {why}")

    def ask(self, gold: str, answer: str, timeout_s: float) -> Outcome:
        try:
            self._stdin.write(json.dumps({"gold": gold, "answer": answer, "timeout_s": timeout_s}).encode() + b"\n")
            self._stdin.flush()
            line = self._read_line(timeout_s)
        except OSError:  # the pipe broke
            return "crashed"
        if line is not None:
            return "equal" if line["equal"] else "different"
        return "timeout" if self.alive() else "crashed"

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Ends the process and closes its pipes; only for the thread that holds the worker."""
        self.end()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                pipe.close()

    def _read_line(self, timeout_s: float) -> dict | None:
        """The next answer; None at the deadline or when the process ended."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:  # not select(), which fails on descriptors above 1023
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(self._stdout.fileno(), 4096)
                if not chunk:
                    self._process.wait()
                    return None
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
