"""All rollout engines as one: where a turn goes, what happens when an engine dies or freezes, and that all hold the same policy.

In: a function that makes an engine, turns, published weights. Out: turn results; `EngineFailed` when the engines cannot go on as one.
It runs in the driver's event loop, and knows engines only by the protocol `Engine`, so its decisions are tested without Ray and vLLM.
It does not build prompts, group rollouts or gather weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_gptoss.config.placement import Place
from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.obs.logs import last_lines
from megatron_gptoss.rollout.engine import EngineDied, HeldWeights, WeightsRefused
from megatron_gptoss.sync.transfer import Superseded
from megatron_gptoss.sync.verify import NO_WEIGHTS
from megatron_gptoss.types import PolicyVersion, TurnRequest, TurnResult

LOG_LINES_SHOWN = 20
POLITE_STOP_S = 5.0  # an idle engine ends well within this; whatever is left is killed
ASK_AGAIN_S = 1.0  # for weights that were gone: the next ones are on their way, or the trainer kept them after all


class Engine(Protocol):
    """What the pool needs of an engine. `rollout.handle.EngineHandle` is the real one."""

    name: str
    log_path: str
    pid: int | None
    place: Place | None

    async def start(self) -> None: ...
    async def generate(self, request: TurnRequest) -> TurnResult: ...
    async def update_weights(self, version: PolicyVersion, buckets: Any) -> HeldWeights: ...
    async def probe(self) -> None: ...
    async def sleep(self) -> None: ...
    async def stop(self) -> None: ...
    def kill(self) -> list[int]: ...


@dataclass(frozen=True)
class PoolLimits:
    """How much an engine is given at once, and how long anything may take. docs/engines.md says what follows from them."""

    max_in_flight: int  # turns that one engine is given at once; the others wait in the pool
    start_timeout_s: float
    turn_timeout_s: float  # a turn from its dispatch, and a weight update
    probe_every_s: float  # pause between two questions whether an engine is alive
    probe_timeout_s: float  # for its answer
    max_restarts: int  # of all engines together, within any `restart_window_s`
    restart_window_s: float


@dataclass(frozen=True)
class Given:
    """How giving a policy to some engines went."""

    digest: int  # sync.verify.digest over what was sent
    answers: Sequence[HeldWeights | Exception]  # of each engine: its account, or EngineDied, also when it was late, or why it refused
    blamed: str = ""  # the engine whose refusal came first, where the others refused because of it


class Policy(Protocol):
    """Weights that engines can be given, together or one alone, as often as an engine needs them."""

    @property
    def version(self) -> PolicyVersion: ...

    # Raises Superseded when these weights cannot be had any more.
    async def give(self, engines: Sequence[Engine], timeout_s: float) -> Given: ...


@dataclass(frozen=True)
class InlinePolicy:
    """All weights travel inside the calls, to each engine by itself."""

    version: PolicyVersion
    buckets: Any  # as EngineHandle.update_weights takes them; a Ray reference lets all engines read one copy
    digest: int

    async def give(self, engines: Sequence[Engine], timeout_s: float) -> Given:
        return Given(self.digest, await asyncio.gather(*(self._one(engine, timeout_s) for engine in engines)))

    async def _one(self, engine: Engine, timeout_s: float) -> HeldWeights | Exception:
        try:
            return await within(timeout_s, engine.update_weights(self.version, self.buckets), "a weight update")
        except (EngineDied, WeightsRefused, ValueError) as error:
            return error


@dataclass
class Slot:
    """One place in the pool, and the engine that fills it now."""

    index: int
    engine: Engine
    starts: int = 1  # engines that filled this place so far
    running: bool = False
    death: str | None = None  # why the engine must be replaced
    version: PolicyVersion = NO_WEIGHTS
    turns: int = 0  # places taken on this engine
    calls: set[asyncio.Future[TurnResult]] = field(default_factory=set)  # turns in flight; given up when the engine is found dead
    work: asyncio.Task[None] | None = None  # bringing the engine up or giving it weights; at most one at a time
    watch: asyncio.Task[None] | None = None  # asks the engine whether it is alive
    probe: asyncio.Future[None] | None = None  # such a question

    @property
    def busy(self) -> bool:
        """It is being brought up or given weights, which has deadlines of its own."""
        return self.work is not None and not self.work.done()


@dataclass(frozen=True, order=True)
class Waiting:
    """A turn that waits for a place on an engine."""

    ticket: tuple[int, int]  # its order, then when it came: the lowest is served first; a turn keeps its own when its engine dies
    conversation_id: str = field(compare=False)
    place: asyncio.Future[tuple[Slot, Engine]] = field(compare=False)


@dataclass
class PoolCounts:
    """For metrics; they only grow."""

    restarts: int = 0
    redispatched_turns: int = 0
    causes: list[str] = field(default_factory=list)  # one line per restart


class EnginePool:
    """`make_engine(index, attempt)` asks for a fresh engine for a place and returns at once; `attempt` counts from 0 in each place."""

    def __init__(
        self,
        make_engine: Callable[[int, int], Engine],
        num_engines: int,
        limits: PoolLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.make_engine, self.limits, self.clock = make_engine, limits, clock
        self.slots = [Slot(index, make_engine(index, 0)) for index in range(num_engines)]
        self.published: Policy | None = None
        self.asleep = False  # the engines' GPUs are the trainer's; whatever an engine needs waits for the next publish
        self.home: dict[str, int] = {}  # conversation -> slot, since the last publish; that one emptied the prefix caches anyway
        self.tickets = itertools.count()
        self.waiting: list[Waiting] = []  # a heap: first come, first served, among those of the same order
        self.restarted_at: deque[float] = deque()  # within the last restart_window_s
        self.failure: BaseException | None = None  # the pool serves nothing more
        self.counts = PoolCounts()

    def places(self) -> list[Place]:
        """Where the engines run that have started."""
        return [slot.engine.place for slot in self.slots if slot.engine.place is not None]

    async def start(self) -> None:
        """Bring all engines up side by side. A publish may be asked for before this returns; it waits for the engines."""
        await self._all_serve()

    async def publish(self, policy: Policy) -> None:
        """Give every engine this policy, all at once, and return when all have confirmed its version and digest. Running turns are
        finished first.

        Raises EngineFailed when an engine refuses or confirms anything else; the pool then serves nothing more, for it would be mixed.
        """
        self.published, self.asleep = policy, False
        self.home.clear()
        # Engines that are being brought up are given it when they run; the others get it together.
        ready = [slot for slot in self.slots if slot.running and slot.death is None and (slot.work is None or slot.work.done())]
        if ready:
            await self._begin(ready, self._update(ready, policy))
        await self._all_serve()

    async def sleep(self) -> None:
        """No turn may be running. All engines give back the memory of their GPUs until the next publish, which may be of the same policy.
        One that is found dead meanwhile is replaced by then, when the trainer rests."""
        await asyncio.gather(*(slot.work for slot in self.slots if slot.work is not None and not slot.work.done()))
        self.asleep = True
        awake = [slot for slot in self.slots if slot.running and slot.death is None]
        await asyncio.gather(*(self._begin([slot], self._put_to_sleep(slot)) for slot in awake))

    async def _put_to_sleep(self, slot: Slot) -> None:
        slot.version = NO_WEIGHTS
        try:
            await within(self.limits.turn_timeout_s, slot.engine.sleep(), "falling asleep")
        except EngineDied as error:
            self._note_death(slot, str(error))

    async def generate(self, request: TurnRequest) -> TurnResult:
        """One turn, from the conversation's engine or else the least loaded; asked again, under a new id, when that engine dies or has just
        lost its weights.

        It waits here for a place among an engine's `max_in_flight`; its deadline counts from the dispatch. The wait needs none of its own:
        it ends with the turns before it, each of which has a deadline.
        Raises: EngineFailed when the engines cannot go on; ValueError for a request that no engine can serve.
        """
        if self.published is None:
            raise EngineFailed("a turn was asked for before any policy was published to the engines")
        asked, attempt, ticket = request, 0, (request.order, next(self.tickets))
        while True:
            slot, engine = await self._place(ticket, request.conversation_id)
            held = slot.version
            try:
                return await self._ask(slot, engine, asked)
            except EngineDied as error:
                self._found_dead(slot, engine, str(error))
            except WeightsRefused as error:
                # It may have met an update that was given up because another engine died; this one is given the policy again.
                if slot.engine is engine and self._serves(slot) and slot.version == held:
                    raise self._fail(slot, str(error)) from None
            finally:
                self._free(slot, engine)
            attempt += 1
            asked = replace(request, request_id=f"{request.request_id}.retry{attempt}")
            self.counts.redispatched_turns += 1

    async def close(self) -> None:
        """Stop all engines and kill what does not stop; none of their processes is left."""
        self.failure = self.failure or EngineFailed("the engines are being stopped")
        self._hand_out()  # that is, tell those who wait
        for task in (each for slot in self.slots for each in (slot.work, slot.watch, slot.probe) if each is not None):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(slot.engine.stop() for slot in self.slots), return_exceptions=True), POLITE_STOP_S)
        await asyncio.gather(*(asyncio.to_thread(slot.engine.kill) for slot in self.slots))

    # --- where a turn goes ---------------------------------------------------------------------------------------------------------

    async def _place(self, ticket: tuple[int, int], conversation_id: str) -> tuple[Slot, Engine]:
        """Wait for a place on an engine, which `_free` gives back. Raises what ended the pool."""
        waiting = Waiting(ticket, conversation_id, asyncio.get_running_loop().create_future())
        heapq.heappush(self.waiting, waiting)
        self._hand_out()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if not waiting.place.cancelled() and waiting.place.exception() is None:  # it was given one in the same moment
                self._free(*waiting.place.result())
            raise

    def _free(self, slot: Slot, engine: Engine) -> None:
        if slot.engine is engine:  # a successor has its places free
            slot.turns -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the places there are to those who wait. Called whenever a turn comes, a place is free, or an engine begins to serve."""
        while self.waiting:
            first = self.waiting[0]
            if self.failure is not None and not first.place.done():
                first.place.set_exception(self.failure)
            if not first.place.done():
                slot = self._choose(first.conversation_id)
                if slot is None:
                    break
                slot.turns += 1
                self.home[first.conversation_id] = slot.index
                first.place.set_result((slot, slot.engine))
            heapq.heappop(self.waiting)
        if self.waiting and not self.asleep and not any(self._serves(slot) for slot in self.slots):
            for slot in self.slots:
                self._work_on(slot)

    def _choose(self, conversation_id: str) -> Slot | None:
        """The conversation's slot while it serves and has room, else the least loaded that does; None when none does."""
        open_slots = [slot for slot in self.slots if self._serves(slot) and slot.turns < self.limits.max_in_flight]
        home = self.home.get(conversation_id)
        return min(open_slots, key=lambda slot: (slot.index != home, slot.turns, slot.index), default=None)

    def _serves(self, slot: Slot) -> bool:
        holds_the_policy = self.published is None or slot.version == self.published.version
        return slot.running and slot.death is None and holds_the_policy

    async def _ask(self, slot: Slot, engine: Engine, request: TurnRequest) -> TurnResult:
        """The engine's answer. EngineDied when it is late, and as soon as anybody finds the engine dead: a frozen one never answers."""
        if slot.engine is not engine or slot.death is not None:
            raise EngineDied(slot.death or "it was replaced")
        call = asyncio.ensure_future(engine.generate(request))
        slot.calls.add(call)
        try:
            await asyncio.wait({call}, timeout=self.limits.turn_timeout_s)
            if not call.done():
                raise EngineDied(f"a turn took longer than {self.limits.turn_timeout_s:g} s")
            if call.cancelled():
                raise EngineDied("it was found dead")
            return call.result()
        finally:
            call.cancel()
            slot.calls.discard(call)

    # --- is it alive? --------------------------------------------------------------------------------------------------------------

    async def _watch(self, slot: Slot, engine: Engine) -> None:
        """Ask a running engine again and again, all the way to its workers, whether it is alive: a frozen one says nothing by itself.

        Not while it takes weights: what it is asked then waits behind them, and they have a deadline of their own.
        """
        timeout_s = self.limits.probe_timeout_s
        while slot.engine is engine and slot.death is None:
            await asyncio.sleep(self.limits.probe_every_s)
            if slot.busy:
                continue
            slot.probe = asyncio.ensure_future(engine.probe())
            await asyncio.wait({slot.probe}, timeout=timeout_s)
            if not slot.probe.done():
                slot.probe.cancel()
                self._found_dead(slot, engine, f"it did not answer a health probe within {timeout_s:g} s")
            elif not slot.probe.cancelled() and (error := slot.probe.exception()) is not None:
                self._found_dead(slot, engine, f"a health probe failed: {error}")

    def _found_dead(self, slot: Slot, engine: Engine, why: str) -> None:
        """Begin to replace the engine. Many meet the same death; only the first reports it, and none may blame the successor."""
        if slot.engine is engine and slot.death is None:
            self._note_death(slot, why)
            if not self.asleep:
                self._work_on(slot)

    def _note_death(self, slot: Slot, why: str) -> None:
        slot.death = slot.death or why
        for call in slot.calls:
            call.cancel()

    # --- bringing an engine up, and back -------------------------------------------------------------------------------------------

    async def _all_serve(self) -> None:
        outcomes = await asyncio.gather(*(self._until_serving(slot) for slot in self.slots), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _until_serving(self, slot: Slot) -> None:
        while not self._serves(slot):
            await asyncio.shield(self._work_on(slot))  # a waiter that gives up must not stop the engine of the others

    def _work_on(self, slot: Slot) -> asyncio.Task[None]:
        """The one task that brings this slot up; started when there is none."""
        return slot.work if slot.work is not None and not slot.work.done() else self._begin([slot], self._bring_up(slot))

    def _begin(self, slots: Sequence[Slot], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work on these slots that nothing else may meet. When it is done turns go on, and a death that it left is seen to."""
        task = asyncio.create_task(work)
        for slot in slots:
            slot.work = task
            if slot.probe is not None:
                slot.probe.cancel()  # it would wait behind the work

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.failure = self.failure or error
            for slot in slots if self.failure is None and not self.asleep else ():
                if slot.death is not None:
                    self._work_on(slot)
            self._hand_out()

        task.add_done_callback(done)
        return task

    async def _bring_up(self, slot: Slot) -> None:
        """Replace the engine if it died, start it if it does not run, give it the published policy if it holds another."""
        while not self._serves(slot):
            if self.failure is not None:
                raise self.failure
            try:
                if slot.death is not None:
                    await self._replace(slot, slot.death)
                if not slot.running:
                    await within(self.limits.start_timeout_s, slot.engine.start(), "its start")
                    slot.running = True
                    slot.watch = asyncio.create_task(self._watch(slot, slot.engine))
                if self.published is not None and slot.version != self.published.version:
                    await self._update([slot], self.published)
            except EngineDied as error:
                self._note_death(slot, str(error))
            except Superseded:
                await asyncio.sleep(ASK_AGAIN_S)

    async def _replace(self, slot: Slot, cause: str) -> None:
        """Kill what is left of the engine and ask for a new one, unless that was done too often of late."""
        await asyncio.to_thread(slot.engine.kill)
        now, most, window_s = self.clock(), self.limits.max_restarts, self.limits.restart_window_s
        while self.restarted_at and now - self.restarted_at[0] >= window_s:
            self.restarted_at.popleft()
        if len(self.restarted_at) >= most:
            used_up = f"rollout.max_restarts = {most} within rollout.restart_window_s = {window_s:g} s are used up"
            raise self._fail(slot, f"{cause}; {used_up}")
        self.restarted_at.append(now)
        self.counts.restarts += 1
        self.counts.causes.append(f"{slot.engine.name} (pid {slot.engine.pid}): {cause}")
        if slot.watch is not None:
            slot.watch.cancel()
        slot.engine = self.make_engine(slot.index, slot.starts)
        slot.starts += 1
        slot.running, slot.death, slot.version, slot.turns, slot.calls = False, None, NO_WEIGHTS, 0, set()

    async def _update(self, slots: Sequence[Slot], policy: Policy) -> None:
        """Give these running engines the policy. Those that die are noted; EngineFailed when one has it not as it was sent."""
        given = await policy.give([slot.engine for slot in slots], self.limits.turn_timeout_s)
        for slot, answer in sorted(zip(slots, given.answers, strict=True), key=lambda pair: pair[0].engine.name != given.blamed):
            if isinstance(answer, EngineDied):
                self._note_death(slot, str(answer))
            elif isinstance(answer, Exception):
                raise self._fail(slot, str(answer)) from None
            elif answer.version != policy.version or answer.digest != given.digest:
                raise self._fail(
                    slot,
                    f"it was sent version {policy.version} with digest {given.digest:#018x}, "
                    f"and confirms version {answer.version} with digest {answer.digest:#018x} over {answer.num_tensors} tensors",
                )
            else:
                slot.version = policy.version

    def _fail(self, slot: Slot, why: str) -> EngineFailed:
        """The pool's end: remembered, so that no turn is served by the engines that are left."""
        engine = slot.engine
        tail = "\n".join(f"  {line}" for line in last_lines(Path(engine.log_path), LOG_LINES_SHOWN))
        log = f"log {engine.log_path} ends with:\n{tail}"
        failure = EngineFailed(f"rollout engine {engine.name} (pid {engine.pid}): {why}\n{log}")
        self.failure = self.failure or failure
        return failure


async def within[Answer](timeout_s: float, answer: Awaitable[Answer], what: str) -> Answer:
    """An engine that misses a deadline counts as dead. Raises EngineDied."""
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        raise EngineDied(f"{what} took longer than {timeout_s:g} s") from None
