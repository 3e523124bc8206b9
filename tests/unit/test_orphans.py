"""Whatever a driver started is gone after it: processes that changed their title, that left their session, that were orphaned before."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DRIVER = """
import subprocess, sys, time
from megatron_gptoss.loop.orphans import Keeper
keeper = Keeper()
# a grandchild whose parent dies: it belongs to init when the driver ends; in a session of its own, its environment wiped
code = "import subprocess, time; subprocess.Popen(['env', '-i', '/bin/sleep', '600'], start_new_session=True); time.sleep(1.5)"
subprocess.Popen([sys.executable, "-c", code])
subprocess.Popen(["/bin/sleep", "601"], start_new_session=True)
time.sleep(3)
print("ready", flush=True)
if sys.argv[1] == "orderly":
    keeper.close()
    print("closed", flush=True)
time.sleep(60)
"""


def sleepers() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # a zombie has no command line
            if process.name() == "sleep" and process.cmdline()[-1:] in (["600"], ["601"]):
                found.add(process.pid)
    return found


@pytest.mark.parametrize("end", ["killed", "orderly"])
def test_nothing_outlives_the_driver(end):
    before = sleepers()
    root = Path(__file__).parents[2]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, end], stdout=subprocess.PIPE, text=True, cwd=root)
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "ready\n"
        if end == "orderly":
            assert driver.stdout.readline() == "closed\n"
            assert sleepers() <= before, "gone when close returns"
            return
        assert len(sleepers() - before) == 2
        driver.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while sleepers() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not sleepers() - before
    finally:
        driver.kill()
        for pid in sleepers() - before:
            os.kill(pid, signal.SIGKILL)
