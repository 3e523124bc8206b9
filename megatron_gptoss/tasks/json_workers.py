"""Processes that answer questions in JSON lines, behind a deadline: what checkers and the sandbox share.

In: a command, and requests. Out: answers, or "timeout" or "crashed". The process writes one line when it is up, {"ready": true} or
{"error": text}, then one line for each line it reads, and ends at the end of its input, which comes also when this process is killed.
It does not know what the questions are about.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from megatron_gptoss.errors import RunFailed

Failure = Literal["timeout", "crashed"]
START_TIMEOUT_S = 60.0  # importing sympy takes about 2 s, on a loaded machine many times that


def python_script(path: Path) -> list[str]:
    """The command that runs a script with this interpreter. -P: no script folder in sys.path, so its neighbours are not imported."""
    return [sys.executable, "-P", str(path)]


class JsonWorkers:
    """Up to `num_workers` processes. Any number of threads may call `ask`; it blocks while all are busy.

    Processes start when needed and stay. `close` ends them; they also end by themselves when this process does.
    """

    def __init__(self, what: str, command: Sequence[str], num_workers: int, env: Mapping[str, str] | None = None) -> None:
        self.what = what  # for messages: "math-verify"
        self._command = tuple(command)
        self._env = env
        self._free = threading.BoundedSemaphore(num_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | Failure:
        """The answer. The deadline does not count a worker's start. RunFailed when no worker can be started or after `close`."""
        with self._free:
            answer = self._ask_once(request, timeout_s)
            # A worker may have been killed by somebody else, an out-of-memory killer say; two crashes in a row are the request's doing.
            return self._ask_once(request, timeout_s) if answer == "crashed" else answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.end()  # one that is busy is released by the thread that asked it, which sees it die
            for worker in self._idle:
                worker.release()
            self._all.clear()
            self._idle.clear()

    def _ask_once(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | Failure:
        worker = self._take()
        answer = worker.ask(request, timeout_s)
        with self._lock:
            if not isinstance(answer, str) and not self._closed:
                self._idle.append(worker)
            else:
                self._all.discard(worker)
                worker.release()
        return answer

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RunFailed(f"the {self.what} processes were used after they were closed")
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                self._all.discard(worker)
                worker.release()
            worker = _Worker(self._command, self._env)
            self._all.add(worker)
        why = worker.wait_until_ready()
        if why is not None:
            with self._lock:
                self._all.discard(worker)
                worker.release()
            raise RunFailed(f"the {self.what} process did not start: {why}")
        return worker


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        # Popen starts a fresh program (no fork of the driver, which holds Ray's threads) and lets no other child inherit the pipes, so the
        # worker sees the end of stdin when this process dies. Its own session keeps Ctrl-C away from it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env=env
        )
        self._stdin, self._stdout = _open(self._process.stdin), _open(self._process.stdout)
        self._buffer = b""

    def wait_until_ready(self) -> str | None:
        """None when it is up, else why it is not."""
        line = self._read_line(START_TIMEOUT_S)
        if line is not None and "ready" in line:
            return None
        return (line or {}).get("error") or f"it gave no sign of life for {START_TIMEOUT_S:.0f} s or ended with {self._process.poll()}"

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | Failure:
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
            line = self._read_line(timeout_s)
        except (OSError, ValueError):  # the pipe broke, or what came is no JSON
            return "crashed"
        if line is not None:
            return line
        return "timeout" if self.alive() else "crashed"

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        # The whole group: bubblewrap waits outside for the one that runs inside.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def release(self) -> None:
        """Ends the process and closes its pipes; only for the thread that holds the worker."""
        self.end()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                pipe.close()

    def _read_line(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer; None at the deadline or when the process ended."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:  # not select(), which fails on descriptors above 1023
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(self._stdout.fileno(), 65536)
                if not chunk:
                    self._process.wait()
                    return None
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
