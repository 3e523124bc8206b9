"""All rollout engines as one: where a turn goes, what happens when an engine dies, and that all hold the same policy.

In: a function that makes an engine, turns, published weights. Out: turn results; `EngineFailed` when the engines cannot go on as one.
It runs in the driver's event loop, and knows engines only by the protocol `Engine`, so its decisions are tested without Ray and vLLM.
It does not build prompts, group rollouts or gather weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_gptoss.config.placement import Place
from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.obs.logs import last_lines
from megatron_gptoss.rollout.engine import EngineDied, HeldWeights, WeightsRefused
from megatron_gptoss.sync.verify import NO_WEIGHTS
from megatron_gptoss.types import PolicyVersion, TurnRequest, TurnResult

LOG_LINES_SHOWN = 20
POLITE_STOP_S = 5.0  # an idle engine ends well within this; whatever is left is killed


class Engine(Protocol):
    """What the pool needs of an engine. `rollout.engine.EngineHandle` is the real one."""

    name: str
    log_path: str
    pid: int | None
    place: Place | None

    async def start(self) -> None: ...
    async def generate(self, request: TurnRequest) -> TurnResult: ...
    async def update_weights(self, version: PolicyVersion, buckets: Any) -> HeldWeights: ...
    async def stop(self) -> None: ...
    def kill(self) -> list[int]: ...


@dataclass(frozen=True)
class Given:
    """How giving a policy to some engines went."""

    digest: int  # sync.verify.digest over what was sent
    answers: Sequence[HeldWeights | Exception]  # of each engine: its account, or EngineDied, also when it was late, or why it refused


class Policy(Protocol):
    """Weights that engines can be given, together or one alone, as often as an engine needs them."""

    @property
    def version(self) -> PolicyVersion: ...
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
    turns: int = 0  # in flight on this engine
    work: asyncio.Task[None] | None = None  # bringing the engine up; at most one at a time


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
        *,
        start_timeout_s: float,
        turn_timeout_s: float,
        max_restarts: int,
    ) -> None:
        self.make_engine = make_engine
        self.start_timeout_s, self.turn_timeout_s, self.max_restarts = start_timeout_s, turn_timeout_s, max_restarts
        self.slots = [Slot(index, make_engine(index, 0)) for index in range(num_engines)]
        self.published: Policy | None = None
        self.home: dict[str, int] = {}  # conversation -> slot, since the last publish; that one emptied the prefix caches anyway
        self.failure: EngineFailed | None = None
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
        self.published = policy
        self.home.clear()
        # Engines that are being brought up are given it when they run; the others get it together.
        ready = [slot for slot in self.slots if slot.running and slot.death is None and (slot.work is None or slot.work.done())]
        if ready:
            together = asyncio.create_task(self._update(ready, policy))
            for slot in ready:
                slot.work = together
            await together
        await self._all_serve()

    async def generate(self, request: TurnRequest) -> TurnResult:
        """One turn, from the conversation's engine or else the least loaded; asked again, under a new id, when that engine dies.

        The deadline counts from the dispatch and includes waiting for a place among `max_running`.
        Raises: EngineFailed when the engines cannot go on; ValueError for a request that no engine can serve.
        """
        if self.published is None:
            raise EngineFailed("a turn was asked for before any policy was published to the engines")
        asked, attempt = request, 0
        while True:
            slot = await self._choose(request.conversation_id)
            engine = slot.engine
            slot.turns += 1
            try:
                return await within(self.turn_timeout_s, engine.generate(asked), "a turn")
            except EngineDied as error:
                # Other turns meet the same death; only the first reports it, and none may blame the successor.
                if slot.engine is engine and slot.death is None:
                    slot.death = str(error)
                    self._work_on(slot)
            except WeightsRefused as error:
                raise self._fail(slot, str(error)) from None
            finally:
                if slot.engine is engine:
                    slot.turns -= 1
            attempt += 1
            asked = replace(request, request_id=f"{request.request_id}.retry{attempt}")
            self.counts.redispatched_turns += 1

    async def close(self) -> None:
        """Stop all engines and kill what does not stop; none of their processes is left."""
        for slot in self.slots:
            if slot.work is not None:
                slot.work.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(slot.engine.stop() for slot in self.slots), return_exceptions=True), POLITE_STOP_S)
        await asyncio.gather(*(asyncio.to_thread(slot.engine.kill) for slot in self.slots))

    # --- where a turn goes ---------------------------------------------------------------------------------------------------------

    async def _choose(self, conversation_id: str) -> Slot:
        """The conversation's slot while it serves, else the least loaded that serves; waits when none does."""
        while True:
            if self.failure is not None:
                raise self.failure
            serving = [slot for slot in self.slots if self._serves(slot)]
            if serving:
                break
            done, _ = await asyncio.wait([self._work_on(slot) for slot in self.slots], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        home = self.home.get(conversation_id)
        slot = next((slot for slot in serving if slot.index == home), None) or min(serving, key=lambda slot: (slot.turns, slot.index))
        self.home[conversation_id] = slot.index
        return slot

    def _serves(self, slot: Slot) -> bool:
        holds_the_policy = self.published is None or slot.version == self.published.version
        return slot.running and slot.death is None and holds_the_policy

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
        if slot.work is None or slot.work.done():
            slot.work = asyncio.create_task(self._bring_up(slot))
            # Its error is kept in self.failure too; without this asyncio complains when nobody happened to wait.
            slot.work.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot.work

    async def _bring_up(self, slot: Slot) -> None:
        """Replace the engine if it died, start it if it does not run, give it the published policy if it holds another."""
        while not self._serves(slot):
            if self.failure is not None:
                raise self.failure
            try:
                if slot.death is not None:
                    await self._replace(slot, slot.death)
                if not slot.running:
                    await within(self.start_timeout_s, slot.engine.start(), "its start")
                    slot.running = True
                if self.published is not None and slot.version != self.published.version:
                    await self._update([slot], self.published)
            except EngineDied as error:
                slot.death = str(error)

    async def _replace(self, slot: Slot, cause: str) -> None:
        """Kill what is left of the engine and ask for a new one, unless that was done too often."""
        await asyncio.to_thread(slot.engine.kill)
        if self.counts.restarts >= self.max_restarts:
            raise self._fail(slot, f"{cause}; rollout.max_restarts = {self.max_restarts} restarts are used up")
        self.counts.restarts += 1
        self.counts.causes.append(f"{slot.engine.name} (pid {slot.engine.pid}): {cause}")
        slot.engine = self.make_engine(slot.index, slot.starts)
        slot.starts += 1
        slot.running, slot.death, slot.version, slot.turns = False, None, NO_WEIGHTS, 0

    async def _update(self, slots: Sequence[Slot], policy: Policy) -> None:
        """Give these running engines the policy. Those that die are noted; EngineFailed when one has it not as it was sent."""
        given = await policy.give([slot.engine for slot in slots], self.turn_timeout_s)
        for slot, answer in zip(slots, given.answers, strict=True):
            if isinstance(answer, EngineDied):
                slot.death = slot.death or str(answer)
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
