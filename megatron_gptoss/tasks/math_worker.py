"""The other end of math_check.py: a process that compares answers with math-verify.

In: JSON lines on stdin, {"gold", "answer", "timeout_s"}. Out: JSON lines on stdout, {"equal": bool}; the first line is {"ready": true} or
{"error": text}. It is started by its path, so that nothing of this package, of the driver or of Ray is imported here. It ends at the end of
stdin, which comes also when the driver is killed.
"""

import faulthandler
import functools
import json
import os
import resource
import sys

MEMORY_LIMIT = 4 << 30  # bytes of address space; 10^(10^10) must not take the machine down
GRACE_S = 5.0  # the driver kills at the timeout; this is for a driver that is gone


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # whatever a library prints must not look like an answer
    os.dup2(nowhere, 2)
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_LIMIT if allowed == resource.RLIM_INFINITY else min(MEMORY_LIMIT, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (limit, allowed))
    try:
        from math_verify import parse, verify
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return

    @functools.lru_cache(maxsize=4096)  # reading takes nine tenths of the time, and the rollouts of a group share reference and answers
    def read(text: str):
        # math-verify's own timeouts are off: they are whole seconds of SIGALRM, and the driver has a deadline already.
        return parse(f"\\boxed{{{text}}}", parsing_timeout=0)

    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        # A watchdog in C: it also fires while one huge power holds the interpreter, when no signal handler and no Python thread runs.
        faulthandler.dump_traceback_later(request["timeout_s"] + GRACE_S, exit=True, file=nowhere)
        try:
            gold, answer = read(request["gold"]), read(request["answer"])
            equal = bool(gold) and bool(answer) and bool(verify(gold, answer, timeout_seconds=0))
        except (Exception, MemoryError, RecursionError):
            equal = False  # what cannot be read is not equal
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"equal": equal}), file=answers)


if __name__ == "__main__":
    serve()
