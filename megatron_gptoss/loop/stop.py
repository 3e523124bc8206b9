"""Has somebody asked the run to stop soon?

In: SIGUSR1, which a batch system sends before it takes the nodes away. Out: a flag that the story reads between steps. Ctrl-C and SIGTERM
mean now, and are not here.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """A context: the signal is heard inside it, and means what it meant before again outside."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> StopRequest:
        self.before = signal.signal(signal.SIGUSR1, self._hear)
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None) -> None:
        signal.signal(signal.SIGUSR1, self.before)

    def _hear(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
