"""The other end of sandbox.py: a warm Python that runs each program in a child of its own, inside bubblewrap.

In: JSON lines on stdin, {"code", "timeout_s", "cpu_s", "memory_mib", "tmp_mib", "output_bytes"}. Out: JSON lines on stdout, {"end",
"output", "wall_s"}; the first line is {"ready": true} or {"error": text}. Arguments: "walled" or "open", then modules to import
beforehand. It is started by its path with the standard library alone, and ends at the end of stdin.

bubblewrap makes the walls that all programs share: no network, a read-only root, no /proc, a user that is nobody outside. Each program then
gets, by one clone() that costs a millisecond, its own process and mount namespaces with a fresh /tmp, limits, no capabilities, and a system
call filter that lets it start threads but no process. So when its one process ends, nothing is left of it. "open" is without bubblewrap and
without the namespaces: limits and the filter remain, files and network are open.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import mmap
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback

LIBC = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter's lock: the child of a clone must find it taken
CLONE_THREAD, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x10000, 0x20000, 0x8000000, 0x20000000
SYS_CLONE = 56  # x86-64
OUT_OF_MEMORY = 97  # exit status of a program that ended with MemoryError

# x86-64 system calls that a program does not get. Without fork, vfork and a process-making clone() it is one process for ever; the others
# reach over a wall or hold memory that RLIMIT_AS does not count.
REFUSED = {
    errno.EAGAIN: (57, 58),  # fork, vfork: what a full process table says
    errno.ENOSYS: (435, 425),  # clone3 (libc falls back to clone, whose flags a filter can read), io_uring_setup
    errno.EPERM: (
        101, 310, 311, 272, 308,  # ptrace, process_vm_readv, process_vm_writev, unshare, setns
        165, 166, 155, 161,  # mount, umount2, pivot_root, chroot
        428, 429, 430, 432, 442, 304,  # open_tree, move_mount, fsopen, fsmount, mount_setattr, open_by_handle_at
        319, 447, 29, 64, 68, 240,  # memfd_create, memfd_secret, shmget, semget, msgget, mq_open
        323, 321, 298, 248, 249, 250,  # userfaultfd, bpf, perf_event_open, add_key, request_key, keyctl
        246, 320, 175, 313, 176, 169, 167, 168, 163, 103,  # kexec, modules, reboot, swap, acct, syslog
    ),
}  # fmt: skip
FAMILIES = (1, 2, 10)  # socket families: unix, inet, inet6. AF_VSOCK would reach the machine's host, whatever the network namespace.


def serve() -> None:
    walled, modules = sys.argv[1] == "walled", sys.argv[2:]
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    try:
        if platform.machine() != "x86_64":
            raise OSError(f"the system call filter is written for x86_64, and this is {platform.machine()}")
        for name in modules:
            importlib.import_module(name)
        base = address_space()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"ready": True}), file=answers)
    for line in requests:
        print(json.dumps(run(json.loads(line), base, walled)), file=answers)


def run(request: dict, base: int, walled: bool) -> dict:
    """Runs one program to its end or to the first limit it meets."""
    readable, writable = os.pipe()
    built, build = os.pipe()
    with contextlib.ExitStack() as stack:
        folder = "/tmp" if walled else stack.enter_context(tempfile.TemporaryDirectory())
        flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID if walled else 0
        pid = LIBC.syscall(SYS_CLONE, flags | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            child(request, writable, build, base, walled, folder)
        os.close(writable)
        os.close(build)
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")  # ends this worker: the driver sees it, and starts another
        confined = os.read(built, 1) == b"1"
        os.close(built)
        start = time.monotonic()  # a busy machine takes its time to build walls; that is not the program's
        pidfd = os.pidfd_open(pid)
        output, limit = collect(readable, pidfd, start + request["timeout_s"], request["output_bytes"])
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # also ends what still waits; without effect on what has ended
        _, status, usage = os.wait4(pid, 0)
        os.close(pidfd)
        output += drain(readable, request["output_bytes"] - len(output))
        os.close(readable)
    if not confined:  # no program's doing: none has run
        raise OSError(f"the walls could not be built: {output.decode('utf-8', 'replace')}")
    end = limit or how_it_ended(status, usage.ru_utime + usage.ru_stime, request["cpu_s"])
    return {"end": end, "output": output.decode("utf-8", "replace"), "wall_s": time.monotonic() - start}


def collect(readable: int, pidfd: int, deadline: float, most: int) -> tuple[bytes, str]:
    """What the program writes until it ends, and the limit it met, "" for none."""
    output = b""
    poller = select.poll()
    poller.register(readable, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        ready = dict(poller.poll(max(0.0, left) * 1000)) if left > 0 else {}
        if not ready:
            return output, "timeout"
        if readable in ready:
            chunk = os.read(readable, 65536)
            output += chunk
            if len(output) > most:
                return output[:most], "output"
            if not chunk:
                poller.unregister(readable)  # closed by the program, which may run on
        elif pidfd in ready:
            return output, ""


def drain(readable: int, most: int) -> bytes:
    """What still stands in the pipe of a process that has ended."""
    os.set_blocking(readable, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(readable, most) if most > 0 else b""
    return b""


def how_it_ended(status: int, cpu_s: float, most_cpu_s: int) -> str:
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGKILL:
            return "cpu" if cpu_s >= most_cpu_s - 0.1 else "killed"
        return "crashed"
    return {0: "ok", OUT_OF_MEMORY: "memory"}.get(os.WEXITSTATUS(status), "error")


def child(request: dict, writable: int, build: int, base: int, walled: bool, folder: str) -> None:
    """The program's process. Never returns."""
    status = 1
    try:
        os.dup2(writable, 1)
        os.dup2(writable, 2)
        os.dup2(build, 3)
        os.closerange(4, 1024)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)  # by lines: what a program printed outlives its end
        confine(request, base, walled, folder)
        os.write(3, b"1")
        os.close(3)
        random.seed(0)  # the same program prints the same twice
        status = execute(request["code"])
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def execute(code: str) -> int:
    """Runs the code as a script. Its exit status."""
    status = 0
    try:
        exec(compile(code, "<program>", "exec", dont_inherit=True), {"__name__": "__main__", "__builtins__": __builtins__})
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except MemoryError:
        status = OUT_OF_MEMORY
        with contextlib.suppress(BaseException):
            os.write(2, b"MemoryError\n")
    except BaseException as error:
        status = 1
        inner = error.__traceback__.tb_next if error.__traceback__ else None  # without this file's own line
        traceback.print_exception(type(error), error, inner)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return status & 0xFF if status else 0


def confine(request: dict, base: int, walled: bool, folder: str) -> None:
    if walled:
        options = f"size={request['tmp_mib']}m,nr_inodes=10000,mode=1777".encode()
        check(LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", 2 | 4, options), "mount /tmp")  # MS_NOSUID | MS_NODEV
    os.chdir(folder)
    os.setsid()
    memory = base + (request["memory_mib"] << 20)
    limits = {
        resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: request["cpu_s"], resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_FSIZE: request["tmp_mib"] << 20, resource.RLIMIT_MEMLOCK: 0,
    }  # fmt: skip
    for what, value in limits.items():
        resource.setrlimit(what, (value, value))
    for capability in range(41):
        LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails harmlessly where there is none to drop
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    check(LIBC.syscall(126, header, none), "capset")
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    program = filter_program()
    buffer = ctypes.create_string_buffer(program)
    check(LIBC.prctl(22, 2, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)), 0, 0), "seccomp")


def filter_program() -> bytes:
    """The system call filter, as classic BPF over struct seccomp_data (nr at 0, arch at 4, arguments from 16)."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000, 0x80000000
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (give, 0, 0, kill),  # another architecture's numbers mean other calls
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse | errno.ENOSYS),  # the x32 numbers
    ]  # fmt: skip
    for error, numbers in REFUSED.items():
        for number in numbers:
            steps += [(equal, 0, 1, number), (give, 0, 0, refuse | error)]
    steps += [(equal, 0, 4, SYS_CLONE), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD), (give, 0, 0, refuse | errno.EAGAIN)]
    steps += [(give, 0, 0, allow), (equal, 0, 3 + len(FAMILIES), 41), (load, 0, 0, 16)]  # 41: socket
    steps += [(equal, len(FAMILIES) - n, 0, family) for n, family in enumerate(FAMILIES)]
    steps += [(give, 0, 0, refuse | errno.EAFNOSUPPORT), (give, 0, 0, allow), (give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def address_space() -> int:
    """Bytes of address space this process has now, found with RLIMIT_AS itself, since there is no /proc. To one page."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 46
    try:
        while high - low > mmap.PAGESIZE:
            middle = (low + high) // 2
            resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
            try:
                mmap.mmap(-1, mmap.PAGESIZE).close()
                high = middle
            except (OSError, MemoryError):
                low = middle
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    serve()
