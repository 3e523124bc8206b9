"""Many turns over few calls. A call of its own costs each turn half a millisecond of processor time on either side, which is Ray's and has
nothing to do with the turn; a policy that answers in tens of milliseconds and uses tools makes hundreds of turns a second.

In: turns as they come, on the driver's side. Out: their outcomes as they end. What is asked for in one tick of the driver's event loop goes
out in one call, and one call waits at the engine and brings back all that have ended meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from megatron_gptoss.types import TurnRequest, TurnResult

Outcome = TurnResult | Exception
Ticket = int


class TurnDesk:
    """The engine's side."""

    def __init__(self, serve: Callable[[TurnRequest], Awaitable[Outcome]]) -> None:
        """`serve` returns what goes wrong and raises nothing."""
        self.serve = serve
        self.running: set[asyncio.Task[None]] = set()  # the event loop itself holds its tasks only weakly
        self.ended: list[tuple[Ticket, Outcome]] = []
        self.some_ended = asyncio.Event()

    def begin(self, turns: Sequence[tuple[Ticket, TurnRequest]]) -> None:
        for ticket, request in turns:
            task = asyncio.create_task(self._one(ticket, request))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def _one(self, ticket: Ticket, request: TurnRequest) -> None:
        outcome = await self.serve(request)
        self.ended.append((ticket, outcome))  # on a line of its own: the list there was before the wait has been taken by now
        self.some_ended.set()

    async def outcomes(self) -> list[tuple[Ticket, Outcome]]:
        """Waits until at least one turn has ended; each outcome is returned once."""
        await self.some_ended.wait()
        await asyncio.sleep(0)  # those that end in the same step of the engine come along
        ended, self.ended = self.ended, []
        self.some_ended.clear()
        return ended


class TurnCourier:
    """The driver's side; all of it in one event loop."""

    def __init__(
        self,
        begin: Callable[[list[tuple[Ticket, TurnRequest]]], Awaitable[None]],
        outcomes: Callable[[], Awaitable[list[tuple[Ticket, Outcome]]]],
    ) -> None:
        """The two calls. They reach the engine in the order in which they are made, before anything of them is awaited; whatever either
        raises becomes the outcome of the turns it was for."""
        self.begin, self.outcomes = begin, outcomes
        self.tickets = itertools.count()
        self.to_send: list[tuple[Ticket, TurnRequest]] = []
        self.waiting: dict[Ticket, asyncio.Future[TurnResult]] = {}
        self.sending: set[asyncio.Task[None]] = set()
        self.reader: asyncio.Task[None] | None = None

    async def ask(self, request: TurnRequest) -> TurnResult:
        """The turn's result, or what went wrong raised. Who stops waiting does not stop the turn."""
        loop, ticket = asyncio.get_running_loop(), next(self.tickets)
        turn = self.waiting[ticket] = loop.create_future()
        if not self.to_send:
            loop.call_soon(self.send)
        self.to_send.append((ticket, request))
        if self.reader is None or self.reader.done():
            self.reader = asyncio.create_task(self._read())
        try:
            return await turn
        finally:
            self.waiting.pop(ticket, None)

    def send(self) -> None:
        """What was asked for goes out now. For whoever makes another call that must reach the engine after it."""
        if self.to_send:
            turns, self.to_send = self.to_send, []
            tickets = [ticket for ticket, _ in turns]
            try:
                begun = self.begin(turns)
            except Exception as error:
                self._fail(tickets, error)
                return
            task = asyncio.create_task(self._sent(begun, tickets))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def _sent(self, begun: Awaitable[None], tickets: Sequence[Ticket]) -> None:
        try:
            await begun
        except Exception as error:
            self._fail(tickets, error)

    async def _read(self) -> None:
        """As long as anybody waits."""
        while self.waiting:
            try:
                ended = await self.outcomes()
            except Exception as error:
                self._fail(list(self.waiting), error)
            else:
                for ticket, outcome in ended:
                    self._deliver(ticket, outcome)

    def _fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in tickets:
            self._deliver(ticket, error)

    def _deliver(self, ticket: Ticket, outcome: Outcome) -> None:
        future = self.waiting.pop(ticket, None)
        if future is None or future.done():  # given up
            return
        if isinstance(outcome, Exception):
            future.set_exception(type(outcome)(*outcome.args))  # one each: raising it adds to its traceback
        else:
            future.set_result(outcome)
