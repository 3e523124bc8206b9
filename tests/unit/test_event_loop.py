"""The event loop in the background: work goes on while nobody waits, errors arrive, an interrupt ends what it must, nothing is left."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
import time

import pytest

from megatron_gptoss.loop.event_loop import EventLoop


def test_tasks_go_on_while_the_main_thread_does_something_else() -> None:
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    with EventLoop() as loop:
        loop.begin(tick())
        time.sleep(0.3)
        before = len(ticks)
        assert before > 3
        assert loop.run(asyncio.sleep(0, "an answer")) == "an answer"
    after = len(ticks)
    time.sleep(0.05)
    assert len(ticks) == after


def test_an_error_of_the_coroutine_is_raised_where_it_is_waited_for() -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with EventLoop() as loop, pytest.raises(KeyError, match="lost"):
        loop.run(fail())


def test_an_interrupt_cancels_what_is_waited_for_and_lets_it_clean_up() -> None:
    told = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts into the background without one

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            told.append("cleaned up")

    try:
        with EventLoop() as loop:
            threading.Timer(0.3, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                loop.run(long())
            assert told == ["cleaned up"]
            assert loop.run(asyncio.sleep(0, 1)) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_its_end_cancels_and_awaits_every_task() -> None:
    told = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            told.append("ended")
            raise

    with EventLoop() as loop:
        loop.begin(stubborn())
        loop.run(asyncio.sleep(0.05))
    assert told == ["ended"] and not loop.thread.is_alive() and loop.loop.is_closed()
