"""Laws of the gate between turns and updates, with turns that live in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from megatron_gptoss.rollout.update_gate import UpdateGate
from megatron_gptoss.types import TurnRequest


class Bench:
    """Turns that end when they are told to, or when the gate aborts them and they have begun."""

    def __init__(self) -> None:
        self.gate = UpdateGate(self.abort)
        self.ends: dict[str, asyncio.Event] = {}
        self.deaf: set[str] = set()  # not known to the engine yet
        self.aborted: list[str] = []
        self.updates = 0

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id not in self.deaf:
            self.ends[request_id].set()

    async def turn(self, name: str, interruptible: bool) -> bool:
        """Whether it was interrupted."""
        self.ends[name] = asyncio.Event()
        async with self.gate.turn(TurnRequest(name, "c", (1,), 1, (), 1.0, interruptible=interruptible)) as running:
            assert not self.updates, "no turn runs beside an update"
            await self.ends[name].wait()
            return running.interrupted

    async def update(self, during: float = 0.0) -> None:
        async with self.gate.update():
            assert not self.gate.turns and not self.updates, "an update runs alone"
            self.updates += 1
            await asyncio.sleep(during)
            self.updates -= 1


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_update_ends_the_turns_it_may_interrupt_and_waits_for_the_others():
    async def story() -> None:
        bench = Bench()
        free, whole = asyncio.create_task(bench.turn("free", True)), asyncio.create_task(bench.turn("whole", False))
        await settle()
        update = asyncio.create_task(bench.update())
        assert await free is True
        await settle()
        assert not update.done() and set(bench.aborted) == {"free"}
        late = asyncio.create_task(bench.turn("late", True))
        await settle()
        assert "late" not in bench.gate.turns, "it waits for the update, and is not interrupted"
        bench.ends["whole"].set()
        await update
        assert await whole is False
        bench.ends["late"].set()
        assert await late is False and bench.aborted.count("late") == 0

    run(story())


def test_a_turn_that_the_engine_did_not_know_yet_is_interrupted_a_moment_later():
    async def story() -> None:
        bench = Bench()
        bench.deaf = {"new"}
        turn = asyncio.create_task(bench.turn("new", True))
        await settle()
        update = asyncio.create_task(bench.update())
        await settle()
        assert bench.aborted == ["new"] and not turn.done()
        bench.deaf.clear()
        assert await turn is True
        await update
        assert len(bench.aborted) == 2

    run(story())


def test_a_turn_that_ends_by_itself_before_its_abort_is_not_lost():
    """`interrupted` is only believed of a turn that vLLM says was aborted (Engine.generate)."""

    async def story() -> None:
        bench = Bench()
        bench.deaf = {"done"}
        turn = asyncio.create_task(bench.turn("done", True))
        await settle()
        update = asyncio.create_task(bench.update())
        await settle()
        bench.ends["done"].set()
        await update
        assert turn.done()

    run(story())


def test_an_update_that_is_given_up_leaves_the_gate_open():
    async def story() -> None:
        bench = Bench()
        turn = asyncio.create_task(bench.turn("whole", False))
        await settle()
        update = asyncio.create_task(bench.update())
        await settle()
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        second = asyncio.create_task(bench.turn("second", False))
        await settle()
        assert "second" in bench.gate.turns
        for end in bench.ends.values():
            end.set()
        await asyncio.gather(turn, second)

    run(story())


def test_updates_follow_each_other():
    async def story() -> None:
        bench = Bench()
        await asyncio.gather(bench.update(0.01), bench.update(0.01), bench.update(0.01))

    run(story())
