"""How many trivial programs a second does the sandbox run?

    .venv/bin/python tools/bench_sandbox.py --processes 2 --seconds 10 [--modules sympy,numpy] [--walls none]

In: how many interpreters, for how long. Out: calls a second by the wall clock, processor time per call over all processes (this one
included), and the load of the machine before and after: on a busy machine only the processor time can be compared.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Annotated

import psutil
import typer

from megatron_gptoss.tasks.sandbox import Sandbox, SandboxLimits


def cpu_s() -> float:
    """Processor time of this process and all it started, what has ended included."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(sandbox: Sandbox, processes: int, seconds: float) -> tuple[int, float, float]:
    """Programs that printed what they must, wall and processor seconds. AssertionError at the first that did not."""
    counts, wrong = [0] * processes, []
    deadline = time.monotonic() + seconds

    def ask(worker: int) -> None:
        while time.monotonic() < deadline and not wrong:
            n = counts[worker]
            result = sandbox.run(f"print({n} * 2)")
            if (result.end, result.output) != ("ok", f"{n * 2}\n"):
                wrong.append(result)
            counts[worker] += 1

    start, cpu = time.monotonic(), cpu_s()
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    return sum(counts), time.monotonic() - start, cpu_s() - cpu


def main(
    processes: Annotated[int, typer.Option(help="warm interpreters, and threads that ask")] = 2,
    seconds: Annotated[float, typer.Option(help="how long")] = 10.0,
    modules: Annotated[str, typer.Option(help="imported beforehand, with commas")] = "",
    walls: Annotated[str, typer.Option(help="bubblewrap or none")] = "bubblewrap",
) -> None:
    named = [name for name in modules.split(",") if name]
    sandbox = Sandbox(SandboxLimits(timeout_s=60.0), "none" if walls == "none" else "bubblewrap", processes, named)
    before = os.getloadavg()[0]
    try:
        measure(sandbox, processes, 1.0)  # all interpreters are up
        calls, wall, cpu = measure(sandbox, processes, seconds)
    finally:
        sandbox.close()
    cores = len(os.sched_getaffinity(0))
    print(f"{calls} calls in {wall:.1f} s: {calls / wall:.0f} calls/s by the clock; {1000 * cpu / calls:.2f} ms of processor a call, so "
          f"{2 * calls / cpu:.0f} calls/s on two cores that do nothing else")  # fmt: skip
    print(f"{cores} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after, modules {modules or 'none'}, walls {walls}")


if __name__ == "__main__":
    typer.run(main)
