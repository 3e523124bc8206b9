"""One event loop that runs in the background while the story is told in plain functions.

In: coroutines. Out: their results, to whoever waits. Engines' tasks, probes and rollouts that run ahead live in it also while the main
thread waits for the trainer. It knows nothing of what runs in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

LAST_WAIT_S = 20.0  # for tasks that were told to end


class EventLoop:
    """A context: the loop runs inside it. At its end every task left is cancelled, and awaited."""

    def __enter__(self) -> EventLoop:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="event-loop", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None) -> None:
        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            self.begin(self._end_tasks()).result(LAST_WAIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LAST_WAIT_S)
        if not self.thread.is_alive():
            self.loop.close()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine. An interrupt of the waiting thread (Ctrl-C) cancels it, lets it end, and goes on upwards."""
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = self.begin(watched())
        try:
            return future.result()
        except BaseException:
            if not ended.is_set():
                future.cancel()
                ended.wait(LAST_WAIT_S)
            raise

    def begin[T](self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine and return at once. From any thread but the loop's own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def _end_tasks(self) -> None:
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
