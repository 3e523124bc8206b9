"""Runs Python that a model wrote, and lets nothing of it out: a pool of warm interpreters under bubblewrap.

In: programs. Out: how each ended and what it printed. It judges no answer. What a program may not do, and how that is enforced, stands in
sandbox_worker.py. A sandbox that does not work is an error that stops the run, never a program that failed: it is tried before the first
program and after everything strange, and failures of its own are counted.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gptoss.errors import MachineError, RunFailed
from megatron_gptoss.tasks.json_workers import JsonWorkers, python_script

Walls = Literal["bubblewrap", "none"]
End = Literal[
    "ok",
    "error",  # an exception, or another exit status than 0
    "timeout",  # the wall clock
    "cpu",  # processor time
    "memory",  # MemoryError at the limit
    "output",  # more output than allowed
    "killed",  # SIGKILL from elsewhere, the kernel out of memory say
    "crashed",  # another signal: a stack that overflowed in C
    "broken",  # the sandbox failed on this program, and works on others
]
WORKER = Path(__file__).with_name("sandbox_worker.py")
GRACE_S = 20.0  # beyond a program's own time, for a machine under load; then the interpreter is taken for dead
WATCHED, MOST_BROKEN = 500, 5  # of the last so many programs at most so many may break the sandbox
DEVICES = ("null", "zero", "random", "urandom")


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use. The sandbox is one process a program, so these are limits of the whole."""

    timeout_s: float = 5.0  # wall clock
    memory_mib: int = 512  # address space beyond that of the warm interpreter
    output_bytes: int = 16384  # standard output and error together; what comes later ends the program
    tmp_mib: int = 64  # files in /tmp

    @property
    def cpu_s(self) -> int:
        """Processor time, whole seconds: threads cannot use more than the wall clock has."""
        return math.ceil(self.timeout_s)


@dataclass(frozen=True)
class ProgramResult:
    end: End
    output: str  # standard output and error, mixed as they came; U+FFFD for what is no UTF-8
    wall_s: float


class Sandbox:
    """Up to `num_processes` programs at once; any number of threads may call `run`, which blocks while all are busy.

    `modules`: imported once, before any program. MachineError where bubblewrap is missing or cannot work here; RunFailed when it breaks
    later.
    """

    def __init__(
        self, limits: SandboxLimits, walls: Walls = "bubblewrap", num_processes: int = 2, modules: Sequence[str] = ("sympy", "numpy")
    ) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._broken: deque[bool] = deque(maxlen=WATCHED)
        if walls == "bubblewrap":
            command, env = bubblewrap_command(find_bubblewrap(), modules), {}
        else:
            command, env = [*python_script(WORKER), "open", *modules], {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._workers = JsonWorkers("sandbox", command, num_processes, env)
        try:
            self._try_out()
        except RunFailed as error:
            self.close()
            raise MachineError(f"task.sandbox = {walls}: {error}{_why(command) if walls == 'bubblewrap' else ''}") from error

    def run(self, code: str, limits: SandboxLimits | None = None) -> ProgramResult:
        """Runs a program with a fresh /tmp. RunFailed when the sandbox itself does not work any more, or too often."""
        result = self._ask(code, limits or self.limits)
        with self._lock:
            self._broken.append(result.end == "broken")
            broken, seen = sum(self._broken), len(self._broken)
        if result.end in ("broken", "killed"):
            self._try_out()
        if broken > MOST_BROKEN:
            raise RunFailed(
                f"the sandbox broke on {broken} of the last {seen} programs (more than {MOST_BROKEN}), though it runs trivial ones. Scores "
                f"would be wrong. The last program began with {code[:200]!r}"
            )
        return result

    def close(self) -> None:
        self._workers.close()

    def _try_out(self) -> None:
        """RunFailed unless a trivial program does what it must."""
        result = self._ask("print(6 * 7)", SandboxLimits(timeout_s=60.0))
        if (result.end, result.output) != ("ok", "42\n"):
            raise RunFailed(f"the sandbox does not work: print(6 * 7) ended with {result.end!r} and printed {result.output[:500]!r}")

    def _ask(self, code: str, limits: SandboxLimits) -> ProgramResult:
        request = {
            "code": code, "timeout_s": limits.timeout_s, "cpu_s": limits.cpu_s, "memory_mib": limits.memory_mib, "tmp_mib": limits.tmp_mib,
            "output_bytes": limits.output_bytes,
        }  # fmt: skip
        answer = self._workers.ask(request, limits.timeout_s + GRACE_S)
        if isinstance(answer, str):
            return ProgramResult("broken", f"the sandbox gave no answer ({answer})", limits.timeout_s)
        return ProgramResult(answer["end"], answer["output"], answer["wall_s"])


def find_bubblewrap() -> str:
    """The path of bwrap. MachineError, with what to install or set, without one."""
    path = shutil.which("bwrap")
    if path is None:
        raise MachineError(
            "task.sandbox = bubblewrap, and there is no bwrap on PATH: programs that the model writes would run without walls. Install it "
            '(apt install bubblewrap). On a machine that holds nothing of value, task.sandbox = "none" runs them with limits only.'
        )
    return path


def bubblewrap_command(bwrap: str, modules: Sequence[str]) -> list[str]:
    """A warm interpreter between walls: the system's libraries and this Python read-only, no network, no /proc, no home, an empty /tmp."""
    # The capabilities are those of the new user namespace. The worker gives each program namespaces of its own with them, and then no
    # program has them.
    command = [bwrap, "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-add", "ALL"]
    command += ["--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "lib32", "bin"):
        path = Path("/") / name
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    prefix, python = Path(sys.base_prefix), f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    home = prefix if prefix == Path("/usr") else Path("/python")  # not at its own path, which may be in somebody's home
    if home != prefix:
        command += ["--ro-bind", str(prefix), str(home)]
    command += ["--ro-bind", sysconfig.get_path("purelib"), "/packages", "--ro-bind", str(WORKER), "/sandbox_worker.py"]
    command += ["--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    settings = {
        "LD_LIBRARY_PATH": f"{home}/lib", "PYTHONPATH": "/packages", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp",
        "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
    }  # fmt: skip
    for name, value in settings.items():
        command += ["--setenv", name, value]
    return [*command, str(home / python), "-s", "-S", "-P", "/sandbox_worker.py", "walled", *modules]


def _why(command: Sequence[str]) -> str:
    """What bubblewrap itself says when a worker does not start, and the usual reason."""
    with tempfile.TemporaryFile() as said:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, timeout=60, check=False, env={})
        except (OSError, subprocess.TimeoutExpired) as error:
            return f" ({error})"
        said.seek(0)
        words = said.read(2000).decode("utf-8", "replace").strip()
    usual = "Does this machine allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)?"
    return f"\nbubblewrap says: {words}\n{usual}" if words else ""
