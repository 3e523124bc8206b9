"""No process of a run outlives it, not even when the driver is killed with SIGKILL.

In: nothing. Out: a mark in the environment that every process of the run inherits, and a small process that waits for the driver's end and
then kills whatever still carries the mark. Ray's raylet dies with its driver, but its agents wait for a lost server for minutes.
Linux only (/proc); processes on other nodes are their cluster's.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

MARK = "GPTOSS_RUN_MARK"
GRACE_S = 3.0  # Ray and vLLM end by themselves within this when their parent is gone

# Runs without this package, from kill_marked's own text: it must start in no time. It reads until the driver ends, which closes the pipe.
_KEEPER = """
import os, signal, sys, time
from pathlib import Path
sys.stdin.read()
time.sleep(float(sys.argv[2]))
"""


class Keeper:
    """Made before the first process of the run is started."""

    def __init__(self) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        source = f"{_KEEPER}\n{inspect.getsource(kill_marked)}\nkill_marked(sys.argv[1])\n"
        # The keeper itself must not carry the mark, nor get the Ctrl-C that is meant for the driver.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, self.mark, str(GRACE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ[MARK] = self.mark.partition("=")[2]

    def close(self) -> list[int]:
        """After an orderly end: kill what is left, at once. Returns the pids that had to be killed."""
        left = kill_marked(self.mark)
        self.process.kill()
        self.process.wait()
        os.environ.pop(MARK, None)
        return left


def kill_marked(mark: str) -> list[int]:
    """SIGKILL every process of this machine with `mark` in its environment, but not this one. Returns their pids."""
    killed = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
                killed.append(int(folder.name))
        except OSError:  # gone, or another user's
            continue
    return killed
