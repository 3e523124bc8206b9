"""Engines on the trainer's GPUs: asleep while it works, whole when awake, replaced only when it rests. And weights that are gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.rollout.engine import EngineDied, HeldWeights
from megatron_gptoss.rollout.pool import EnginePool, InlinePolicy
from megatron_gptoss.sync.transfer import Superseded
from megatron_gptoss.sync.verify import NO_WEIGHTS
from tests.unit import test_pool
from tests.unit.test_pool import DIGEST, FakeEngine, Workshop, new_pool, run, settle, turn, until


class Sleeper(FakeEngine):
    """It notes what it is asked, and refuses what a sleeping engine cannot do."""

    def __init__(self, name: str, log_path: Path) -> None:
        super().__init__(name, log_path)
        self.asleep, self.dies_in_sleep = False, False
        self.story: list[str] = []

    async def start(self) -> None:
        self.story.append("start")
        await super().start()

    async def sleep(self) -> None:
        assert not self.in_flight, "put to sleep in the middle of a turn"
        if self.dies_in_sleep:
            raise EngineDied(f"{self.name} died while it fell asleep")
        self.story.append("sleep")
        self.asleep, self.held = True, NO_WEIGHTS

    async def update_weights(self, version: int, buckets: object) -> HeldWeights:
        self.story.append(f"update {version}")
        self.asleep = False
        return await super().update_weights(version, buckets)

    async def generate(self, request):
        assert not self.asleep, "asked in its sleep"
        return await super().generate(request)


@pytest.fixture(autouse=True)
def engines_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_pool, "FakeEngine", Sleeper)


def policy(version: int) -> InlinePolicy:
    return InlinePolicy(version, "the weights", DIGEST)


async def asleep(workshop: Workshop, **limits: float) -> EnginePool:
    pool = new_pool(workshop, **limits)  # type: ignore[arg-type]
    await pool.start()
    await pool.sleep()
    return pool


def test_engines_sleep_before_there_are_weights_and_between_rollouts_and_the_same_policy_wakes_them(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = await asleep(workshop)
        await pool.publish(policy(0))
        assert (await pool.generate(turn(0))).version == 0
        await pool.sleep()
        await pool.publish(policy(0))  # a step that changed nothing
        assert (await pool.generate(turn(1))).version == 0
        await pool.sleep()
        early = asyncio.create_task(pool.generate(turn(2)))  # it waits, and nobody is asked in its sleep
        await settle()
        assert not early.done()
        await pool.publish(policy(1))
        assert (await early).version == 1
        told = ["start", "sleep", "update 0", "sleep", "update 0", "sleep", "update 1"]
        assert [engine.story for engine in workshop.made] == [told, told]  # type: ignore[attr-defined]
        assert pool.counts.restarts == 0

    run(story())


def test_an_engine_found_dead_in_its_sleep_is_replaced_when_it_is_needed_and_not_before(tmp_path: Path) -> None:
    """Before, its GPU is full of the trainer."""

    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = await asleep(workshop, probe_every_s=0.02)
        workshop.made[1].die()
        await until(lambda: pool.slots[1].death is not None)
        await asyncio.sleep(0.1)
        assert len(workshop.made) == 2 and pool.counts.restarts == 0
        await pool.publish(policy(3))
        assert len(workshop.made) == 3 and workshop.made[2].updates == [3] and workshop.made[0].updates == [3]
        assert {(await pool.generate(turn(n, f"c{n}"))).version for n in range(4)} == {3}

    run(story())


def test_an_engine_that_dies_while_it_falls_asleep_is_replaced_with_the_next_policy(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(policy(0))
        workshop.made[0].dies_in_sleep = True  # type: ignore[attr-defined]
        await pool.sleep()
        await settle()
        assert len(workshop.made) == 2
        await pool.publish(policy(1))
        assert len(workshop.made) == 3 and pool.counts.restarts == 1
        assert (await pool.generate(turn(0))).version == 1

    run(story())


def test_an_engine_that_is_on_its_way_up_sleeps_when_it_is_up(tmp_path: Path) -> None:
    async def story() -> None:
        workshop = Workshop(tmp_path)
        pool = new_pool(workshop)
        await pool.publish(policy(0))
        workshop.prepare = lambda engine, index, attempt: setattr(engine, "start_s", 0.2)
        pool._found_dead(pool.slots[0], pool.slots[0].engine, "a test says so")
        await settle()
        await pool.sleep()
        assert [engine.asleep for engine in workshop.made] == [False, True, True]  # type: ignore[attr-defined]
        await pool.publish(policy(1))
        assert pool.counts.restarts == 1

    run(story())


@dataclass
class Fading:
    """Weights that can be had while `there` says so."""

    version: int
    there: list[bool]

    async def give(self, engines, timeout_s: float):
        if not self.there[0]:
            raise Superseded(f"version {self.version} is gone")
        return await policy(self.version).give(engines, timeout_s)


def test_an_engine_whose_weights_are_gone_waits_for_the_next_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr("megatron_gptoss.rollout.pool.ASK_AGAIN_S", 0.01)
        workshop, there = Workshop(tmp_path), [True]
        pool = new_pool(workshop)
        await pool.publish(Fading(0, there))
        there[0] = False
        pool._found_dead(pool.slots[0], pool.slots[0].engine, "a test says so")
        await until(lambda: len(workshop.made) == 3 and workshop.made[2].running)
        await asyncio.sleep(0.1)
        assert (await pool.generate(turn(0))).version == 0 and workshop.made[2].updates == []
        await pool.publish(policy(1))
        assert workshop.made[2].updates == [1] and pool.counts.restarts == 1
        # The trainer may also have kept them after all: a refused optimizer step.
        there[0] = True
        await pool.publish(Fading(2, there))
        there[0] = False
        pool._found_dead(pool.slots[0], pool.slots[0].engine, "a test says so")
        await until(lambda: len(workshop.made) == 4 and workshop.made[3].running)
        there[0] = True
        await until(lambda: workshop.made[3].updates == [2])

    run(story())


def test_publishing_what_is_gone_ends_the_run_instead_of_waiting(tmp_path: Path) -> None:
    async def story() -> None:
        pool = new_pool(Workshop(tmp_path))
        await pool.start()
        with pytest.raises(Superseded):
            await pool.publish(Fading(0, [False]))
        with pytest.raises((EngineFailed, Superseded)):
            await pool.generate(turn(0))

    run(story())
