"""When may an engine's weights be replaced, and what becomes of the turns that run then?

In: turns and updates as they come. Out: turns side by side, updates alone. It neither samples nor takes weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from megatron_gptoss.types import TurnRequest

INTERRUPT_AGAIN_S = 0.05  # a turn that vLLM did not know yet when it was told to abort it


@dataclass
class RunningTurn:
    interruptible: bool
    interrupted: bool = False  # by an update, which waits for it to end


class UpdateGate:
    """Turns run side by side; an update runs alone, and turns that come meanwhile wait for it. It waits for those that run, but has `abort`
    end the interruptible ones."""

    def __init__(self, abort: Callable[[str], Awaitable[None]]) -> None:
        self.abort = abort
        self.turns: dict[str, RunningTurn] = {}
        self.updating = False
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def turn(self, request: TurnRequest) -> AsyncIterator[RunningTurn]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.updating)
            running = self.turns[request.request_id] = RunningTurn(request.interruptible)
        try:
            yield running
        finally:
            async with self.changed:
                del self.turns[request.request_id]
                self.changed.notify_all()

    @contextlib.asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.updating)
            self.updating = True
        try:
            while self.turns:
                await self._interrupt()
                with contextlib.suppress(TimeoutError):
                    async with self.changed, asyncio.timeout(INTERRUPT_AGAIN_S):
                        await self.changed.wait_for(lambda: not self.turns)
            yield
        finally:
            async with self.changed:
                self.updating = False
                self.changed.notify_all()

    async def _interrupt(self) -> None:
        for request_id, running in list(self.turns.items()):
            if running.interruptible:
                running.interrupted = True
                with contextlib.suppress(Exception):  # a dead engine core; the turn says so itself
                    await self.abort(request_id)
