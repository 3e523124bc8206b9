"""No process of an engine outlives the one that started it.

In: nothing. Out: Linux kills this process, stopped or not, when its parent's thread ends. It watches nothing by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends.

    The engine core's is the actor's event loop, which lives as long as the actor; a worker's is the engine core's main thread.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was in force
        os.kill(os.getpid(), signal.SIGKILL)
