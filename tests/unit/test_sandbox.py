# ruff: noqa: E501 (a program a line)
"""Laws of the sandbox: hostile programs end within their limits and reach nothing, and the pool serves the next program as if nothing had been.

In: bubblewrap, which .ci/run installs; without it only the refusal can be tested.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_gptoss.errors import MachineError, RunFailed
from megatron_gptoss.tasks.sandbox import MOST_BROKEN, ProgramResult, Sandbox, SandboxLimits

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not on this machine")
# Programs that go on until they are stopped are stopped soon; the others have time on a machine under load.
SHORT = SandboxLimits(timeout_s=2.0, memory_mib=256, output_bytes=20_000, tmp_mib=16)
LIMITS = replace(SHORT, timeout_s=60.0)
STOPPED = {"timeout", "cpu"}

# name: (program, how it may end, what must stand in its output). @HOME, @REPO, @PID and @OUTSIDE are this machine's.
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", {"error"}, "Resource temporarily unavailable"),
    "fork bomb that goes on": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", STOPPED, ""),
    "bomb of a shell": ("import os; os.execv('/bin/sh', ['sh', '-c', 'b(){ b|b& }; b; sleep 100'])", {"error", *STOPPED, "output"}, ""),
    "subprocess": ("import subprocess; subprocess.run(['/bin/true'])", {"error"}, "Resource temporarily unavailable"),
    "multiprocessing": ("import multiprocessing as m; m.get_context('fork').Pool(64)", {"error"}, ""),
    "daemon": ("import os\nif os.fork() == 0: os.setsid()", {"error"}, "Resource temporarily unavailable"),
    "endless threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()", {"error", "memory", *STOPPED}, "",
    ),
    "a thread that stays": ("import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()", {"timeout"}, ""),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}, "MemoryError"),
    "memory at once": ("x = b'x' * 10**12", {"memory"}, "MemoryError"),
    "memory in C": ("import ctypes\nm = ctypes.CDLL(None).malloc; m.restype = ctypes.c_void_p\nprint(m(ctypes.c_size_t(1 << 33)))", {"ok"}, "None"),
    "shared memory": ("import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 22))", {"error", "memory"}, ""),
    "memory in a file": ("import os; os.memfd_create('x')", {"error"}, "not permitted"),
    "memory of a bomb of zeros": ("import zlib; d = zlib.compress(bytes(1 << 27))\nx = [zlib.decompress(d) for _ in range(9)]", {"memory"}, ""),
    "full /tmp": ("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", {"error", "crashed"}, ""),
    "many files": ("n = 0\nwhile True:\n open(f'/tmp/{n}', 'w'); n += 1", {"error"}, "No space left"),
    "endless loop": ("while True: pass", STOPPED, ""),
    "endless sleep": ("import time; time.sleep(10**6)", {"timeout"}, ""),
    "deaf to signals": (
        "import signal\nfor s in range(1, 32):\n try: signal.signal(s, signal.SIG_IGN)\n except OSError: pass\nwhile True: pass", STOPPED, "",
    ),
    "endless in C": ("import re; re.match('(a+)+$', 'a' * 64 + 'b')", STOPPED, ""),
    "huge power": ("print(len(str(9 ** 9 ** 9)))", {*STOPPED, "memory"}, ""),
    "exec of a loop": ("import os; os.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])", STOPPED, ""),
    "closed output": ("import os; os.close(1); os.close(2)\nwhile True: pass", STOPPED, ""),
    "endless output": ("while True: print('x' * 100)", {"output"}, "xxx"),
    "output at once": ("import os; os.write(1, b'x' * (1 << 24))", {"output"}, "xxx"),
    "endless errors": ("import os\nwhile True: os.write(2, b'e')", {"output", *STOPPED}, "eee"),
    "output that is no text": ("import os; os.write(1, bytes(range(256)) + b'\\n{\"end\": \"ok\"}\\n')", {"ok"}, "\ufffd"),
    "network": ("import socket; socket.create_connection(('1.1.1.1', 53), 3)", {"error"}, "unreachable"),
    "name look-up": ("import socket; socket.getaddrinfo('example.com', 80)", {"error"}, "gaierror"),
    "datagrams": ("import socket; socket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))", {"error"}, "unreachable"),
    "the host's socket": ("import socket; socket.socket(40, socket.SOCK_STREAM).connect((2, 1024))", {"error"}, "not supported"),
    "raw sockets": ("import socket; socket.socket(17, socket.SOCK_RAW)", {"error"}, ""),
    "home folder": ("import os; print(os.listdir('@HOME'))", {"error"}, "No such file"),
    "own home": ("import os; print(sorted(os.listdir(os.path.expanduser('~'))))", {"ok"}, "[]"),
    "passwords": ("print(open('/etc/passwd').read())", {"error"}, "No such file"),
    "other processes": ("import os; print(os.listdir('/proc'))", {"error"}, "No such file"),
    "environment": ("import os; print('GPTOSS_TEST_SECRET' in os.environ, os.environb.get(b'PATH'))", {"ok"}, "False None"),
    "write outside": ("open('/usr/x', 'w')", {"error"}, "Read-only"),
    "write to the root": ("open('/x', 'w')", {"error"}, "Read-only"),
    "write to Python": ("import random; open(random.__file__, 'a')", {"error"}, "Read-only"),
    "rename the host": ("import socket; socket.sethostname('x')", {"error"}, "not permitted"),
    "write to the worker": ("open('/sandbox_worker.py', 'a')", {"error"}, "Read-only"),
    "write to the checkout": ("open('@REPO/x', 'w')", {"error"}, "No such file"),
    "kill the parent": ("import os; os.kill(os.getppid() or 999999, 9)", {"error"}, "No such process"),
    "kill everybody": ("import os; os.kill(-1, 9)", {"error"}, "No such process"),
    "kill the test": ("import os; os.kill(@PID, 9)", {"error"}, "No such process"),
    "kill itself": ("import os; os.kill(0, 9); print('here')", {"ok", "killed"}, ""),
    "abort": ("import os; os.abort()", {"crashed"}, ""),
    "null pointer": ("import ctypes; ctypes.string_at(0)", {"crashed"}, ""),
    "symlink out": ("import os; os.symlink('@OUTSIDE', '/tmp/l'); print(open('/tmp/l').read())", {"error"}, "No such file"),
    "symlink to write": ("import os; os.symlink('/usr', '/tmp/u'); open('/tmp/u/x', 'w')", {"error"}, "Read-only"),
    "symlink loop": ("import os; os.symlink('/tmp/a', '/tmp/a'); open('/tmp/a')", {"error"}, "symbolic links"),
    "deep folders": ("import os\nwhile True:\n os.mkdir('a'); os.chdir('a')", {"error", *STOPPED}, ""),
    "recursion": ("def f(): f()\nf()", {"error"}, "RecursionError"),
    "recursion without a limit": ("import sys; sys.setrecursionlimit(10**9)\ndef f(x): return [f([x])]\nf(0)", {"crashed", "memory", *STOPPED}, ""),
    "recursion in C": ("import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)", {"crashed", "memory", "error"}, ""),
    "new namespace": ("import os; os.unshare(os.CLONE_NEWUSER)", {"error"}, "not permitted"),
    "mount": ("import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.umount2(b'/tmp', 2), ctypes.get_errno())", {"ok"}, "-1 1"),
    "ptrace": ("import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.ptrace(0, 0, 0, 0), ctypes.get_errno())", {"ok"}, "-1 1"),
    "higher limits": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", {"error"}, "not allowed"),
    "device": ("import os, stat; os.mknod('/tmp/d', stat.S_IFBLK | 0o666, os.makedev(254, 0))", {"error"}, "not permitted"),
    "the driver's pipes": (
        "import os\nfor fd in range(3, 1024):\n try: os.write(fd, b'{\"end\": \"ok\"}\\n'); print('open', fd)\n except OSError: pass", {"ok"}, "",
    ),
    "exit status": ("import os; os._exit(97)", {"memory"}, ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    os.environ["GPTOSS_TEST_SECRET"] = "1"
    made = Sandbox(LIMITS, num_processes=3, modules=())
    yield made
    made.close()
    del os.environ["GPTOSS_TEST_SECRET"]


@pytest.fixture(scope="module")
def results(sandbox, tmp_path_factory) -> dict[str, ProgramResult]:
    """All hostile programs, three at a time, and a trivial one after each."""
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_text("secret")
    here = {"@HOME": str(Path.home()), "@REPO": str(Path(__file__).parents[2]), "@PID": str(os.getpid()), "@OUTSIDE": str(outside)}

    def run(item) -> tuple[str, ProgramResult]:
        name, (code, ends, _) = item
        for word, value in here.items():
            code = code.replace(word, value)
        found = sandbox.run(code, SHORT if ends & STOPPED else LIMITS)
        after = sandbox.run("import os; print(len(os.listdir('/tmp')), os.getpid())")
        assert (after.end, after.output) == ("ok", "0 1\n"), (name, after)
        return name, found

    with ThreadPoolExecutor(3) as threads:
        return dict(threads.map(run, HOSTILE.items()))


@needs_bwrap
def test_there_are_forty_and_more():
    assert len(HOSTILE) >= 40


@needs_bwrap
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained_and_reported(name, results):
    _, ends, says = HOSTILE[name]
    found = results[name]
    assert found.end in ends, found
    assert says in found.output
    assert len(found.output) <= LIMITS.output_bytes
    assert "secret" not in found.output
    if name in ("the driver's pipes", "home folder"):
        assert "open" not in found.output and "[" not in found.output.replace("[Errno", "")


@needs_bwrap
def test_nothing_is_left_of_them_and_the_same_interpreters_go_on(results, sandbox):
    workers = list(sandbox._workers._all)
    assert len(workers) == 3
    for worker in workers:
        assert worker.alive()
        inside = psutil.Process(worker._process.pid).children(recursive=True)
        assert len(inside) <= 2, inside  # bubblewrap's init and the interpreter: no program
    assert sandbox.run("print(sum(range(10)))").output == "45\n"


@needs_bwrap
def test_programs_by_hand(sandbox):
    assert sandbox.run("print(1)\nprint(1 / 0)").output.splitlines()[0::3] == ["1", "ZeroDivisionError: division by zero"]
    assert sandbox.run("def f(:\n").end == "error"
    assert sandbox.run("import sys; sys.exit(0)").end == "ok"
    assert sandbox.run("import sys; sys.exit('why')").output == "why\n"
    assert sandbox.run("x = 1\ndef f(): return x\nprint(f(), __name__)").output == "1 __main__\n"
    assert sandbox.run("x = 2").end == "ok"
    assert sandbox.run("print(x)").end == "error"  # nothing of an earlier program is left
    assert sandbox.run("import random; print(random.random())").output == sandbox.run("import random; print(random.random())").output
    assert sandbox.run("import threading; threading.Thread(target=print, args=('late',)).start()").output == "late\n"
    assert sandbox.run("print('\\ud800')").end == "error"


@needs_bwrap
def test_the_processor_limit_is_told_from_the_clock(sandbox, monkeypatch):
    """One processor second, and a clock that is far off."""
    monkeypatch.setattr(SandboxLimits, "cpu_s", 1)
    assert sandbox.run("while True: pass").end == "cpu"
    assert sandbox.run("import time; time.sleep(100)", SHORT).end == "timeout"


@needs_bwrap
def test_many_threads_get_their_own_results(sandbox):
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda n: sandbox.run(f"print({n})").output, range(60)))
    assert found == [f"{n}\n" for n in range(60)]


@needs_bwrap
def test_an_interpreter_killed_from_outside_costs_no_program():
    sandbox = Sandbox(SandboxLimits(timeout_s=60.0), num_processes=1, modules=())
    try:
        for _ in range(2):
            (worker,) = sandbox._workers._all
            os.killpg(worker._process.pid, 9)
            assert sandbox.run("print(1)").output == "1\n"
        (worker,) = sandbox._workers._all
        inside = psutil.Process(worker._process.pid).children(recursive=True)
        threading.Timer(0.5, inside[-1].kill).start()
        assert sandbox.run("import time; time.sleep(2); print(2)").output == "2\n"
    finally:
        sandbox.close()
    for process in inside:
        process.wait(10)  # closing leaves nothing


@needs_bwrap
def test_a_sandbox_that_breaks_stops_the_run(monkeypatch):
    sandbox = Sandbox(SandboxLimits(timeout_s=60.0), num_processes=1, modules=())
    try:
        ask = sandbox._workers.ask
        monkeypatch.setattr(
            sandbox._workers, "ask", lambda request, timeout: "crashed" if request["code"] == "bad" else ask(request, timeout)
        )
        for _ in range(MOST_BROKEN):
            assert sandbox.run("bad").end == "broken"  # one program: the task is told, and the sandbox is tried
        with pytest.raises(RunFailed, match=r"the sandbox broke on 6 of the last 6 programs"):
            sandbox.run("bad")
        sandbox._broken.clear()
        assert sandbox.run("1/0").end == "error"  # a program's own failure is no broken sandbox
        monkeypatch.setattr(sandbox._workers, "ask", lambda request, timeout: {"end": "killed", "output": "no", "wall_s": 0.0})
        with pytest.raises(RunFailed, match=r"the sandbox does not work: print\(6 \* 7\) ended with 'killed'"):
            sandbox.run("1/0")
    finally:
        monkeypatch.undo()
        sandbox.close()


def test_without_bubblewrap_it_refuses_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MachineError, match=r"task.sandbox = bubblewrap, and there is no bwrap on PATH.*apt install bubblewrap.*\"none\""):
        Sandbox(LIMITS, modules=())
    sandbox = Sandbox(LIMITS, walls="none", num_processes=1, modules=())
    try:
        assert sandbox.run("print(2)").output == "2\n"
        assert sandbox.run("while True: pass", SandboxLimits(timeout_s=1.0)).end in STOPPED
        assert sandbox.run("x = b'x' * 10**12").end == "memory"
        assert sandbox.run("import os; os.fork()").end == "error"
    finally:
        sandbox.close()


@needs_bwrap
def test_walls_that_cannot_be_built_say_why():
    with pytest.raises(
        MachineError, match=r"task.sandbox = bubblewrap: the sandbox process did not start: ModuleNotFoundError: .*no_such_module"
    ):
        Sandbox(LIMITS, modules=("no_such_module",))


@needs_bwrap
def test_the_interpreters_end_with_their_driver(tmp_path):
    script = (
        "import os, signal; from megatron_gptoss.tasks.sandbox import Sandbox, SandboxLimits\n"
        "s = Sandbox(SandboxLimits(), num_processes=1, modules=())\n"
        "print(next(iter(s._workers._all))._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120).stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the interpreter outlives its driver"
        time.sleep(0.1)
