"""Laws of turns that share their calls: every asker gets his own turn's outcome, whatever the others' are, when it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatron_gptoss.rollout.turns import Outcome, TurnCourier, TurnDesk
from megatron_gptoss.types import TurnRequest, TurnResult


class Wire:
    """Both sides in one event loop, the calls between them counted, late, and broken at will."""

    def __init__(self, serve: Callable[[TurnRequest], Awaitable[Outcome]]) -> None:
        self.desk = TurnDesk(serve)
        self.courier = TurnCourier(self.begin, self.outcomes)
        self.calls: list[Any] = []
        self.dead: Exception | None = None
        self.broken = asyncio.Event()

    async def _over(self, what: Awaitable[Any]) -> Any:
        """What awaits an actor that dies is told so."""
        answer, died = asyncio.ensure_future(what), asyncio.ensure_future(self.broken.wait())
        await asyncio.wait({answer, died}, return_when=asyncio.FIRST_COMPLETED)
        if self.dead is not None:
            answer.cancel()
            raise self.dead
        died.cancel()
        return answer.result()

    def begin(self, turns: list) -> Awaitable[None]:
        self.calls.append([request.request_id for _, request in turns])

        async def there() -> None:
            self.desk.begin(turns)

        return self._over(there())

    def outcomes(self) -> Awaitable[list]:
        self.calls.append("outcomes")
        return self._over(self.desk.outcomes())

    def die(self, error: Exception) -> None:
        self.dead = error
        self.broken.set()


def turn(name: str) -> TurnRequest:
    return TurnRequest(name, name, (1,), 4, (2,), 1.0)


def answer(name: str) -> TurnResult:
    return TurnResult((len(name),), (-0.5,), name, 1)


def told(coroutine: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(coroutine(), timeout=20))


def test_what_is_asked_in_one_tick_is_one_call_and_each_gets_his_own():
    async def story() -> None:
        async def serve(request: TurnRequest) -> Outcome:
            await asyncio.sleep(0.001 * int(request.request_id[1:]) % 0.007)
            return answer(request.request_id)

        wire = Wire(serve)
        names = [f"t{i}" for i in range(60)]
        results = await asyncio.gather(*(wire.courier.ask(turn(name)) for name in names))
        assert [result.stop_reason for result in results] == names
        assert [call for call in wire.calls if call != "outcomes"] == [names]
        assert wire.calls.count("outcomes") < len(names), "those that end together come together"
        assert not wire.desk.running and not wire.courier.waiting
        # Nobody waits, so nothing is asked of the engine; the next turn wakes the reader again.
        before = len(wire.calls)
        await asyncio.sleep(0.02)
        assert len(wire.calls) == before and wire.courier.reader is not None and wire.courier.reader.done()
        assert (await wire.courier.ask(turn("t5"))).stop_reason == "t5"

    told(story)


def test_a_short_turn_does_not_wait_for_a_long_one_that_was_sent_with_it():
    async def story() -> None:
        end = asyncio.Event()

        async def serve(request: TurnRequest) -> Outcome:
            if request.request_id == "long":
                await end.wait()
            return answer(request.request_id)

        wire = Wire(serve)
        long = asyncio.create_task(wire.courier.ask(turn("long")))
        assert (await wire.courier.ask(turn("short"))).stop_reason == "short"
        assert (await wire.courier.ask(turn("later"))).stop_reason == "later"
        assert not long.done()
        end.set()
        assert (await long).stop_reason == "long"

    told(story)


def test_one_that_is_refused_hurts_nobody_else():
    async def story() -> None:
        async def serve(request: TurnRequest) -> Outcome:
            return ValueError(f"{request.request_id} is too long") if request.request_id.startswith("bad") else answer(request.request_id)

        wire = Wire(serve)
        names = ["good1", "bad1", "bad2", "good2"]
        outcomes = await asyncio.gather(*(wire.courier.ask(turn(name)) for name in names), return_exceptions=True)
        assert [getattr(outcomes[i], "stop_reason", None) for i in (0, 3)] == ["good1", "good2"]
        assert [str(outcomes[i]) for i in (1, 2)] == ["bad1 is too long", "bad2 is too long"]
        assert all(type(outcomes[i]) is ValueError for i in (1, 2))

    told(story)


def test_a_death_is_told_to_all_that_wait_and_to_those_who_come_after():
    async def story() -> None:
        async def serve(request: TurnRequest) -> Outcome:
            await asyncio.Event().wait()
            raise AssertionError

        wire = Wire(serve)
        asked = [asyncio.create_task(wire.courier.ask(turn(f"t{i}"))) for i in range(3)]
        await asyncio.sleep(0.01)
        wire.die(RuntimeError("engine-0 is gone"))
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in errors] == ["engine-0 is gone"] * 3
        assert len({id(error) for error in errors}) == 3, "each his own: raising one adds to its traceback"
        with pytest.raises(RuntimeError, match="engine-0 is gone"):
            await wire.courier.ask(turn("after"))

    told(story)


def test_a_call_that_cannot_be_made_ends_its_own_turns_at_once():
    async def story() -> None:
        async def serve(request: TurnRequest) -> Outcome:
            return answer(request.request_id)

        wire = Wire(serve)

        def cannot(turns: list) -> Awaitable[None]:
            raise TypeError("cannot pickle it")

        wire.courier.begin = cannot
        with pytest.raises(TypeError, match="cannot pickle it"):
            await wire.courier.ask(turn("t0"))
        wire.courier.begin = wire.begin
        assert (await wire.courier.ask(turn("t1"))).stop_reason == "t1", "the reader, which waited for t0, brings this one"

    told(story)


def test_who_gives_up_is_forgotten_and_his_turn_s_outcome_with_him():
    async def story() -> None:
        end = asyncio.Event()

        async def serve(request: TurnRequest) -> Outcome:
            if request.request_id == "slow":
                await end.wait()
            return answer(request.request_id)

        wire = Wire(serve)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wire.courier.ask(turn("slow")), timeout=0.01)
        assert not wire.courier.waiting
        end.set()
        assert (await wire.courier.ask(turn("next"))).stop_reason == "next"

    told(story)


def test_what_must_come_after_a_turn_can_send_it_first():
    async def story() -> None:
        async def serve(request: TurnRequest) -> Outcome:
            return answer(request.request_id)

        wire = Wire(serve)
        asked = asyncio.create_task(wire.courier.ask(turn("t0")))
        await asyncio.sleep(0)
        wire.courier.send()
        wire.calls.append("update")
        await asked
        assert wire.calls.index(["t0"]) < wire.calls.index("update")
        assert [call for call in wire.calls if isinstance(call, list)] == [["t0"]], "and it is sent once"

    told(story)
