"""The pool's decisions, with an engine that lives in memory: where turns go, what a death leads to, that no mixed pool serves.

The fake engine stands for the protocol only; real engines are in tests/e2e/test_engine.py and test_many_engines.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.rollout.engine import EngineDied, HeldWeights, WeightsRefused
from megatron_gptoss.rollout.pool import EnginePool, Given, InlinePolicy, PoolLimits
from megatron_gptoss.sync.verify import NO_WEIGHTS
from megatron_gptoss.types import TurnRequest, TurnResult

DIGEST = 0xFEED


class FakeEngine:
    """Answers at once, or when `answer` is set; can be told to die, to freeze, to refuse, or to confirm something else."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name, self.log_path, self.pid = name, str(log_path), 4000
        self.held = NO_WEIGHTS
        self.requests: list[str] = []
        self.updates: list[int] = []
        self.running = self.killed = self.stopped = False
        self.in_flight = self.most_in_flight = self.probes = 0
        self.answer, self.alive = asyncio.Event(), asyncio.Event()  # when not alive it is frozen: it answers nothing, dead or not
        self.answer.set()
        self.alive.set()
        self.start_s = self.update_s = self.probe_s = 0.0
        self.working = False  # starts or takes weights
        self.start_fails = self.dies_in_update = self.refuses = False
        self.confirms: HeldWeights | None = None

    async def start(self) -> None:
        self.working = True
        await asyncio.sleep(self.start_s)
        self.working = False
        if self.start_fails:
            raise EngineDied(f"{self.name} did not start")
        self.running = True

    async def generate(self, request: TurnRequest) -> TurnResult:
        assert self.running and not self.killed
        self.requests.append(request.request_id)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            await self.answer.wait()
            await self.alive.wait()
        finally:
            self.in_flight -= 1
        if self.killed:
            raise EngineDied(f"{self.name} was killed")
        return TurnResult((7,), (-0.5,), "stop", self.held)

    async def probe(self) -> None:
        assert self.running and not self.working, "asked while it starts or takes weights"
        self.probes += 1
        await asyncio.sleep(self.probe_s)
        await self.alive.wait()
        if self.killed:
            raise EngineDied(f"{self.name} was killed")

    async def update_weights(self, version: int, buckets: Any) -> HeldWeights:
        assert self.running and buckets == "the weights"
        self.working = True
        await asyncio.sleep(self.update_s)
        await self.alive.wait()
        self.working = False
        self.updates.append(version)
        if self.dies_in_update:
            raise EngineDied(f"{self.name} died in an update")
        if self.refuses:
            raise WeightsRefused("the model has no place for 'model.norm.bias'")
        self.held = version
        return self.confirms or HeldWeights(version, 37, DIGEST)

    async def stop(self) -> None:
        self.stopped = True

    def kill(self) -> list[int]:
        self.killed = True
        return [self.pid]

    def die(self) -> None:
        """As the operating system would do it: whoever waits for an answer gets none."""
        self.killed = True
        self.answer.set()


class Workshop:
    """Makes fake engines, and applies `prepare` to each before the pool sees it."""

    def __init__(self, folder: Path, prepare: Callable[[FakeEngine, int, int], None] = lambda engine, index, attempt: None) -> None:
        self.folder, self.prepare = folder, prepare
        self.made: list[FakeEngine] = []

    def __call__(self, index: int, attempt: int) -> FakeEngine:
        log = self.folder / f"engine-{index}.{attempt}.log"
        log.write_text(f"first line\nthe last words of engine {index}.{attempt}\n")
        engine = FakeEngine(f"engine-{index}.{attempt}", log)
        self.prepare(engine, index, attempt)
        self.made.append(engine)
        return engine


def new_pool(workshop: Workshop, num_engines: int = 2, clock: Callable[[], float] = time.monotonic, **changes: Any) -> EnginePool:
    """Without probes, unless `probe_every_s` is given."""
    limits = {"max_in_flight": 100, "start_timeout_s": 5.0, "turn_timeout_s": 5.0, "probe_every_s": 1000.0, "probe_timeout_s": 0.3}
    return EnginePool(workshop, num_engines, PoolLimits(**limits | {"max_restarts": 2, "restart_window_s": 1000.0} | changes), clock=clock)


def turn(number: int, conversation: str | None = None) -> TurnRequest:
    return TurnRequest(f"t{number}", conversation or f"c{number}", (1, 2), 4, (), 1.0)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_new_conversations_go_to_the_least_loaded_engine(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, num_engines=3)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        for engine in workshop.made:
            engine.answer.clear()
        waiting = [asyncio.create_task(pool.generate(turn(n))) for n in range(9)]
        await settle()
        assert [len(engine.requests) for engine in workshop.made] == [3, 3, 3]
        workshop.made[1].answer.set()
        await settle()
        waiting += [asyncio.create_task(pool.generate(turn(n))) for n in range(9, 12)]
        await settle()
        assert [len(engine.requests) for engine in workshop.made] == [3, 6, 3]
        for engine in workshop.made:
            engine.answer.set()
        await asyncio.gather(*waiting)
        assert [slot.turns for slot in pool.slots] == [0, 0, 0]

    run(story())


def test_a_conversation_stays_with_its_engine_until_the_weights_change(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        await asyncio.gather(pool.generate(turn(0, "a")), pool.generate(turn(1, "b")))
        for n in range(2, 8):
            await pool.generate(turn(n, "b"))
        assert [len(engine.requests) for engine in workshop.made] == [1, 7]
        await pool.publish(InlinePolicy(1, "the weights", DIGEST))
        assert (await pool.generate(turn(8, "b"))).version == 1
        assert workshop.made[0].requests[-1] == "t8"  # both idle, no cached prefix anywhere: the first

    run(story())


def test_unfinished_turns_of_a_dead_engine_are_asked_again_and_it_returns_with_the_same_policy(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(InlinePolicy(3, "the weights", DIGEST))
        first = workshop.made[0]
        first.answer.clear()
        waiting = [asyncio.create_task(pool.generate(turn(n))) for n in range(6)]
        await settle()
        lost = list(first.requests)
        first.die()
        results = await asyncio.gather(*waiting)
        assert [result.version for result in results] == [3] * 6
        assert len(lost) == 3 and pool.counts.redispatched_turns == 3
        asked = Counter(name for engine in workshop.made for name in engine.requests)
        assert all(asked[f"{name}.retry1"] == 1 for name in lost) and max(asked.values()) == 1
        await pool.start()
        successor = workshop.made[2]
        assert pool.counts.restarts == 1 and pool.slots[0].engine is successor and successor.updates == [3]
        assert "engine-0.0 (pid 4000): engine-0.0 was killed" in pool.counts.causes[0]

    run(story())


def test_turns_wait_when_the_only_engine_is_being_brought_back(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, num_engines=1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        workshop.made[0].answer.clear()
        waiting = asyncio.create_task(pool.generate(turn(0)))
        await settle()
        workshop.made[0].die()
        assert (await waiting).token_ids == (7,)
        assert workshop.made[1].requests == ["t0.retry1"]

    run(story())


def test_a_turn_past_its_deadline_means_a_dead_engine(tmp_path: Path) -> None:
    def hang_first(engine: FakeEngine, index: int, attempt: int) -> None:
        if attempt == 0:
            engine.answer.clear()

    async def story() -> None:
        workshop = Workshop(tmp_path, hang_first)
        pool = new_pool(workshop, num_engines=1, turn_timeout_s=0.1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        assert (await pool.generate(turn(0))).token_ids == (7,)
        assert workshop.made[0].killed and "a turn took longer than 0.1 s" in pool.counts.causes[0]

    run(story())


@pytest.mark.parametrize("fault", ["start_fails", "dies_in_update"])
def test_an_engine_that_keeps_dying_ends_the_pool_with_its_name_pid_and_log(tmp_path: Path, fault: str) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path, lambda engine, index, attempt: setattr(engine, fault, index == 1))
        pool = new_pool(workshop, max_restarts=2)
        with pytest.raises(EngineFailed) as failure:
            await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        assert len(workshop.made) == 4 and pool.counts.restarts == 2
        for part in ("engine-1.2", "pid 4000", "max_restarts = 2", str(tmp_path / "engine-1.2.log"), "the last words of engine 1.2"):
            assert part in str(failure.value)
        with pytest.raises(EngineFailed):
            await pool.generate(turn(0))

    run(story())


@pytest.mark.parametrize("confirmed", [HeldWeights(4, 37, DIGEST), HeldWeights(5, 37, DIGEST + 1), HeldWeights(NO_WEIGHTS, 0, 0)])
def test_a_wrong_confirmation_is_never_served(tmp_path: Path, confirmed: HeldWeights) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(InlinePolicy(4, "the weights", DIGEST))
        workshop.made[1].confirms = confirmed
        with pytest.raises(EngineFailed, match=r"engine-1\.0 .*sent version 5 .*confirms version"):
            await pool.publish(InlinePolicy(5, "the weights", DIGEST))
        with pytest.raises(EngineFailed):
            await pool.generate(turn(0))
        assert pool.counts.restarts == 0  # a restart would not cure it

    run(story())


def test_a_refused_update_is_never_served(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.start()
        workshop.made[0].refuses = True
        with pytest.raises(EngineFailed, match=r"no place for 'model\.norm\.bias'"):
            await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        with pytest.raises(EngineFailed):
            await pool.generate(turn(0))

    run(story())


@dataclass
class RefusedByAll:
    """Weights that the second engine refused first, so that all were told to give up."""

    version: int = 0

    async def give(self, engines: Any, timeout_s: float) -> Given:
        words = ["given up", "no place", "given up"]
        return Given(DIGEST, [WeightsRefused(why) for why in words], blamed=engines[1].name)


def test_of_many_refusals_the_one_that_came_first_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        pool = new_pool(Workshop(tmp_path), num_engines=3)
        await pool.start()
        with pytest.raises(EngineFailed, match=rf"^rollout engine {pool.slots[1].engine.name} .*: no place"):
            await pool.publish(RefusedByAll())

    run(story())


def test_an_engine_that_dies_in_an_update_returns_with_the_new_policy(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        workshop.made[0].dies_in_update = True
        await pool.publish(InlinePolicy(1, "the weights", DIGEST))
        assert [slot.version for slot in pool.slots] == [1, 1]
        assert workshop.made[2].updates == [1]  # never the old one

    run(story())


@dataclass
class SecondTry:
    """Weights whose first sending is given up, so that an engine that lives has none for a moment; a turn that waited in it meets that."""

    version: int
    given_up: Callable[[], None]

    async def give(self, engines: Any, timeout_s: float) -> Given:
        self.given_up()
        await settle()
        return await InlinePolicy(self.version, "the weights", DIGEST).give(engines, timeout_s)


@pytest.mark.parametrize("heard", ["at once", "when the engine has its weights"])
def test_a_turn_that_meets_an_update_that_is_tried_again_is_asked_again(tmp_path: Path, heard: str) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, num_engines=1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        (engine,) = workshop.made
        refused, plain = asyncio.Event(), engine.generate

        async def waits_at_the_gate(request: TurnRequest) -> TurnResult:
            engine.generate = plain  # type: ignore[method-assign]
            await refused.wait()
            raise WeightsRefused("the engine holds no whole policy")

        engine.generate = waits_at_the_gate  # type: ignore[method-assign]
        asked = asyncio.create_task(pool.generate(turn(0)))
        await settle()
        await pool.publish(SecondTry(1, refused.set if heard == "at once" else lambda: None))
        refused.set()
        assert (await asked).version == 1 and engine.requests == ["t0.retry1"]
        assert pool.failure is None and pool.counts.restarts == 0

        engine.generate = waits_at_the_gate  # type: ignore[method-assign]
        with pytest.raises(EngineFailed, match="no whole policy"):  # nobody has taken its weights
            await pool.generate(turn(1))

    run(story())


def test_no_turn_before_a_policy_and_bad_requests_do_not_cost_an_engine(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.start()
        with pytest.raises(EngineFailed, match="before any policy"):
            await pool.generate(turn(0))
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))

        async def reject(request: TurnRequest) -> TurnResult:
            raise ValueError("too long")

        workshop.made[0].generate = reject  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="too long"):
            await pool.generate(turn(0))
        assert pool.counts.restarts == 0 and pool.slots[0].turns == 0

    run(story())


def test_close_stops_and_kills_every_engine(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        await pool.close()
        assert all(engine.stopped and engine.killed for engine in workshop.made)

    run(story())


def test_an_engine_is_given_so_many_turns_at_once_and_the_rest_go_first_come_first_served(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, max_in_flight=3)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        for engine in workshop.made:
            engine.answer.clear()
        done: list[int] = []

        async def one(number: int) -> None:
            await pool.generate(turn(number))
            done.append(number)

        waiting = [asyncio.create_task(one(n)) for n in range(20)]
        await settle()
        assert [engine.in_flight for engine in workshop.made] == [3, 3] and len(pool.waiting) == 14
        for engine in workshop.made:
            engine.answer.set()
        await asyncio.gather(*waiting)
        for engine in workshop.made:
            assert engine.most_in_flight == 3
            assert engine.requests == sorted(engine.requests, key=lambda name: int(name[1:])), "nobody overtakes"
        assert sorted(done) == list(range(20)) and not pool.waiting and [slot.turns for slot in pool.slots] == [0, 0]

    run(story())


def test_a_conversation_whose_engine_is_full_goes_where_there_is_room(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        first, second = (pool := new_pool(workshop, max_in_flight=2)) and workshop.made
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        await pool.generate(turn(0, "a"))
        first.answer.clear()
        full = [asyncio.create_task(pool.generate(turn(n, "a"))) for n in (1, 2)]
        await settle()
        assert first.in_flight == 2
        await pool.generate(turn(3, "a"))
        assert second.requests == ["t3"]
        first.answer.set()
        await asyncio.gather(*full)
        await pool.generate(turn(4, "a"))
        assert second.requests == ["t3", "t4"], "where its last turn was, its prefix is cached"

    run(story())


def test_what_was_begun_earlier_is_served_first_whenever_it_comes(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, num_engines=1, max_in_flight=1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        (engine,) = workshop.made
        engine.answer.clear()
        orders = [5, 3, 0, 3, 1, 5, 0]
        waiting = [asyncio.create_task(pool.generate(replace(turn(n), order=order))) for n, order in enumerate(orders)]
        await settle()
        engine.answer.set()
        await asyncio.gather(*waiting)
        rest = sorted(range(1, len(orders)), key=lambda n: (orders[n], n))
        assert engine.requests == [f"t{n}" for n in (0, *rest)], "the first was on its way when the others came"

    run(story())


def test_an_engine_that_comes_back_takes_its_share_of_those_who_wait(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, max_in_flight=2)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        first, second = workshop.made
        for engine in workshop.made:
            engine.answer.clear()
        waiting = [asyncio.create_task(pool.generate(turn(n))) for n in range(10)]
        await settle()
        first.die()
        await until(lambda: len(workshop.made) == 3 and len(workshop.made[2].requests) == 8)  # it answers at once, the second never
        assert second.in_flight == 2
        second.answer.set()
        await asyncio.gather(*waiting)

    run(story())


def test_turns_that_lost_their_engine_do_not_wait_behind_those_who_came_later(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, num_engines=1, max_in_flight=3)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        workshop.made[0].answer.clear()
        waiting = [asyncio.create_task(pool.generate(turn(n))) for n in range(9)]
        await settle()
        workshop.made[0].die()
        await asyncio.gather(*waiting)
        assert workshop.made[1].requests == ["t0.retry1", "t1.retry1", "t2.retry1", "t3", "t4", "t5", "t6", "t7", "t8"]

    run(story())


def test_who_gives_up_waiting_leaves_no_place_taken(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, num_engines=1, max_in_flight=1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        (engine,) = workshop.made
        engine.answer.clear()
        tasks = [asyncio.create_task(pool.generate(turn(n))) for n in range(4)]
        await settle()
        tasks[1].cancel()  # while it waits for a place
        tasks[0].cancel()  # while it is sampled; its place goes to the third
        await settle()
        assert engine.requests == ["t0", "t2"]
        engine.answer.set()
        await asyncio.gather(*tasks[2:])
        assert pool.slots[0].turns == 0 and not pool.waiting

        taken = await pool._place((0, 50), "x")
        place = asyncio.create_task(pool._place((0, 51), "y"))
        await settle()
        pool._free(*taken)
        place.cancel()  # it has a place by now, and has not heard of it yet
        await settle()
        assert place.cancelled() and pool.slots[0].turns == 0

    run(story())


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with turns of long deadlines"])
def test_a_frozen_engine_is_found_and_replaced_with_the_current_weights(tmp_path: Path, busy: bool) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop, probe_every_s=0.05, probe_timeout_s=0.2, turn_timeout_s=1000.0)
        await pool.publish(InlinePolicy(3, "the weights", DIGEST))
        workshop.made[0].alive.clear()
        asked = [asyncio.create_task(pool.generate(turn(n))) for n in range(6 if busy else 0)]
        await until(lambda: len(workshop.made) == 3)
        assert workshop.made[0].killed and "did not answer a health probe within 0.2 s" in pool.counts.causes[0]
        assert [result.version for result in await asyncio.gather(*asked)] == [3] * len(asked)
        await pool.start()
        assert workshop.made[2].updates == [3] and pool.counts.redispatched_turns == len(asked) / 2
        await until(lambda: workshop.made[2].probes > 1)  # the new one is watched too
        assert pool.counts.restarts == 1 and not workshop.made[1].killed

    run(story())


def test_a_slow_engine_that_answers_in_time_lives(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path, lambda engine, index, attempt: setattr(engine, "probe_s", 0.3))
        pool = new_pool(workshop, probe_every_s=0.01, probe_timeout_s=5.0)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        await until(lambda: all(engine.probes > 2 for engine in workshop.made))
        assert pool.counts.restarts == 0

    run(story())


def test_starts_and_updates_are_not_probed_however_long_they_take(tmp_path: Path) -> None:
    """The fake engine fails when it is asked meanwhile; a question that was asked before is withdrawn."""

    def slow(engine: FakeEngine, index: int, attempt: int) -> None:
        engine.start_s = engine.update_s = 0.5

    async def story() -> None:
        workshop = Workshop(tmp_path, slow)
        pool = new_pool(workshop, probe_every_s=0.02, probe_timeout_s=0.1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        for engine in workshop.made:
            engine.probe_s = 0.5
        await until(lambda: all(slot.probe is not None and not slot.probe.done() for slot in pool.slots))
        await pool.publish(InlinePolicy(1, "the weights", DIGEST))
        assert pool.counts.restarts == 0
        for engine in workshop.made:
            engine.probe_s, engine.probes = 0.0, 0
        await until(lambda: all(engine.probes for engine in workshop.made))

    run(story())


def test_restarts_are_counted_within_a_window(tmp_path: Path) -> None:
    async def story() -> None:
        workshop, now = Workshop(tmp_path), [0.0]
        pool = new_pool(workshop, num_engines=1, clock=lambda: now[0], max_restarts=2, restart_window_s=10.0)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))

        async def lose_one() -> None:
            workshop.made[-1].answer.clear()
            asked = asyncio.create_task(pool.generate(turn(len(workshop.made))))
            await settle()
            workshop.made[-1].die()
            await asked

        for at in (0.0, 9.0, 10.0, 19.0):  # never three within ten seconds
            now[0] = at
            await lose_one()
        now[0] = 19.5
        with pytest.raises(EngineFailed, match=r"max_restarts = 2 within rollout\.restart_window_s = 10 s are used up"):
            await lose_one()
        assert pool.counts.restarts == 4

    run(story())


def test_a_surprise_while_an_engine_is_brought_up_reaches_those_who_wait(tmp_path: Path) -> None:
    def no_second(engine: FakeEngine, index: int, attempt: int) -> None:
        if attempt:
            raise RuntimeError("no room for another actor")

    async def story() -> None:
        workshop = Workshop(tmp_path, no_second)
        pool = new_pool(workshop, num_engines=1)
        await pool.publish(InlinePolicy(0, "the weights", DIGEST))
        workshop.made[0].answer.clear()
        asked = [asyncio.create_task(pool.generate(turn(n))) for n in range(3)]
        await settle()
        workshop.made[0].die()
        for each in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(each, RuntimeError)

    run(story())
