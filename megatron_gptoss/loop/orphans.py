"""No process of a run outlives it, not even when the driver is killed with SIGKILL.

In: nothing. Out: a small process, run from this very file, that remembers every descendant of the driver and kills those that are left when
the driver has ended. Ray's raylet dies with its driver, but its agents wait for a lost server for minutes.
Linux only (/proc); processes on other nodes are their cluster's. A mark in the environment would be simpler, but processes that set their
title (Ray's and vLLM's do) overwrite what /proc shows of it. Only the standard library: the keeper must start in no time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 3.0  # Ray and vLLM mostly end by themselves within this when their parent is gone
LOOK_EVERY_S = 0.5
DIE_S = 5.0  # for those that were killed
NOW = b"now\n"  # from the driver: an orderly end, what is left can go at once


class Keeper:
    """Made before the first process of the run is started."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,  # the driver's end closes with the driver, however it ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is meant for the driver
        )

    def close(self) -> None:
        """The run has ended in order; returns when nothing of it is left."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(NOW)
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def keep(driver: int) -> None:
    """The keeper's life: look at the driver's family until its end, then kill who is left."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all of a step, and means the driver
    since = table()[os.getpid()][1]
    family: dict[int, int] = {}  # pid -> when it started, which tells it from a later process of the same number
    grace_s = GRACE_S
    while True:
        ready, _, _ = select.select([sys.stdin.buffer], [], [], LOOK_EVERY_S)
        family |= still_there(family, driver, since)
        if ready:
            said = os.read(0, 64)
            if said == b"":
                break
            grace_s = 0.0
    time.sleep(grace_s)
    deadline = time.monotonic() + DIE_S
    while (left := still_there(family, driver, since)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # on a busy machine a killed process takes a while to go


def still_there(family: dict[int, int], driver: int, since: int) -> dict[int, int]:
    """Members of the family that live, and all who descend from them or from the driver and are younger than the keeper."""
    now = table()
    found = {pid: start for pid, start in family.items() if now.get(pid, (0, -1))[1] == start}
    above = {driver, *found}
    grew = True
    while grew:
        born = {pid: start for pid, (parent, start) in now.items() if parent in above and pid not in above and start >= since}
        born.pop(os.getpid(), None)
        found |= born
        above |= set(born)
        grew = bool(born)
    return found


def table() -> dict[int, tuple[int, int]]:
    """pid -> (parent, start in clock ticks since boot) of every process of this machine."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in brackets may hold anything; what follows it is numbers: state, parent, ..., the start as the 20th.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    found[int(folder.name)] = (int(fields[1]), int(fields[19]))
    return found


if __name__ == "__main__":
    keep(int(sys.argv[1]))
