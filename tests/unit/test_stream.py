"""Laws of rollouts that run ahead, at every interleaving that hypothesis finds: no clock, a virtual world of policies and groups."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.rollout.stream import RolloutStream
from megatron_gptoss.rollout.versions import lags, oldest, runs_of
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup

TOKENS = 4  # of each group's only rollout; each is sampled when the schedule says so, by the policy of that moment


@dataclass
class World:
    """Engines that hold one policy at a time, and sample a token of a group whenever they are told to."""

    version: int = 0
    begun: list[tuple[int, int]] = field(default_factory=list)  # (prompt number, policy at that moment)
    walking: dict[int, list[int]] = field(default_factory=dict)  # prompt number -> policies of its tokens so far
    finished: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)

    def prompts(self, number: int, count: int) -> list[Prompt]:
        return [Prompt(str(n), "t", "", "") for n in range(number, number + count)]

    async def roll(self, prompt: Prompt, number: int) -> RolloutGroup:
        assert prompt.id == str(number)
        self.begun.append((number, self.version))
        self.walking[number] = []
        self.finished[number] = asyncio.get_running_loop().create_future()
        try:
            await self.finished[number]
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return group(prompt, self.walking.pop(number))

    def sample(self, number: int) -> None:
        if not self.finished[number].done():
            self.walking[number].append(self.version)
            if len(self.walking[number]) == TOKENS:
                self.finished[number].set_result(None)

    def on_their_way(self) -> list[int]:
        return [number for number, walk in self.walking.items() if not self.finished[number].done()]


def group(prompt: Prompt, versions: list[int]) -> RolloutGroup:
    n = len(versions)
    rollout = Rollout(
        prompt, 0, (1,) * (n + 1), (False, *[True] * n), (0.0, *[-1.0] * n), runs_of((v, 1) for v in versions), 0, "final", "", 0.0, ()
    )
    rollout.check()
    return RolloutGroup(prompt, (rollout,))


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def stream_of(world: World, *, groups: int, lag: int, steps: int, first: int = 0) -> RolloutStream:
    return RolloutStream(world.prompts, world.roll, first=first, groups_per_step=groups, max_lag_steps=lag, num_steps=steps)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 7), st.integers(0, 2**32))
def test_every_interleaving_keeps_bound_order_and_number(groups, lag, steps, first, seed):
    """While a step waits, trains or publishes, tokens of any group on its way are sampled in any order. Some steps change no weights."""

    async def story() -> None:
        world, random = World(), Random(seed)
        stream = stream_of(world, groups=groups, lag=lag, steps=steps, first=first)
        taken: list[int] = []

        async def sample_some() -> None:
            await settle()
            for _ in range(random.randrange(3 * groups * TOKENS)):
                if running := world.on_their_way():
                    world.sample(random.choice(running))
            await settle()

        await stream.run_ahead()
        for step in range(steps):
            await sample_some()
            taking = asyncio.create_task(stream.take(world.version))
            while not taking.done():
                await sample_some()
            found = await taking
            assert found.num_stale == 0 and len(found.groups) == groups == found.num_prompts
            taken += [int(each.prompt.id) for each in found.groups]
            _, oldest_lag = lags([rollout for each in found.groups for rollout in each.rollouts], world.version)
            assert oldest_lag <= lag, "no token is older than the bound when it is trained"
            await sample_some()  # the update
            assert all(number - first < (step + 1 + lag) * groups for number, _ in world.begun), "nobody runs ahead of the bound"
            world.version += random.random() < 0.8
            await sample_some()
            await stream.run_ahead()
            await settle()
            ahead = min(step + 2 + lag, steps) * groups
            assert [number for number, _ in world.begun] == list(range(first, first + ahead)), "in order, and as far as the bound allows"
        assert taken == list(range(first, first + steps * groups)), "every prompt once, in order, and none beyond the last step"
        assert not stream.begun and not world.walking

    asyncio.run(story())


def test_a_lag_of_none_is_the_synchronous_loop():
    async def story() -> None:
        world = World()
        stream = stream_of(world, groups=2, lag=0, steps=3)
        await stream.run_ahead()
        for step in range(3):
            await settle()
            assert len(world.begun) == 2 * (step + 1)
            for number in world.on_their_way() * TOKENS:
                world.sample(number)
            await stream.take(world.version)
            await settle()
            assert len(world.begun) == 2 * (step + 1), "nothing is begun between the rollouts and the new weights"
            world.version += 1
            await stream.run_ahead()

    asyncio.run(story())


def test_a_step_waits_for_its_stragglers_whatever_else_is_finished():
    async def story() -> None:
        world = World()
        stream = stream_of(world, groups=2, lag=1, steps=4)
        await stream.run_ahead()
        await settle()
        for number in (1, 2, 3) * TOKENS:
            world.sample(number)
        taking = asyncio.create_task(stream.take(0))
        await settle()
        assert not taking.done()
        for _ in range(TOKENS):
            world.sample(0)
        assert [each.prompt.id for each in (await taking).groups] == ["0", "1"]

    asyncio.run(story())


class Backward(World):
    """Engines whose tokens are older than they say, for some prompts."""

    stale: tuple[int, ...] = ()

    async def roll(self, prompt: Prompt, number: int) -> RolloutGroup:
        done = await super().roll(prompt, number)
        return group(prompt, [-2] * TOKENS) if number in self.stale else done


@pytest.mark.parametrize("stale", [(), (0,), (1,), (0, 1), (0, 1, 2), (1, 3), (2, 5), (3, 4, 5, 6)])
def test_stale_groups_are_left_out_counted_and_replaced_by_the_next_prompts(stale):
    async def story() -> None:
        world = Backward()
        world.stale = stale
        stream = stream_of(world, groups=2, lag=1, steps=3)
        await stream.run_ahead()
        trained, num_stale, consumed = [], 0, 0
        for _ in range(3):
            taking = asyncio.create_task(stream.take(world.version))
            while not taking.done():
                await settle()
                for number in world.on_their_way():
                    world.sample(number)
            found = taking.result()
            assert all((oldest(each.rollouts) or 0) >= world.version - 1 for each in found.groups)
            trained += [int(each.prompt.id) for each in found.groups]
            num_stale, consumed = num_stale + found.num_stale, consumed + found.num_prompts
            assert [number for number, _ in world.begun][-1] < consumed + 2, "what replaces a stale group is no further ahead"
            world.version += 1
            await stream.run_ahead()
        fresh = [number for number in range(20) if number not in stale]
        assert trained == fresh[:6] and len(trained) == 6
        assert num_stale == sum(number < trained[-1] for number in stale) and consumed == 6 + num_stale == trained[-1] + 1
        assert not stream.begun, "the last step leaves nothing on its way"

    asyncio.run(story())


def test_when_everything_is_stale_the_run_ends():
    async def story() -> None:
        world = Backward()
        world.stale = tuple(range(100))
        stream = stream_of(world, groups=2, lag=1, steps=3)
        await stream.run_ahead()
        taking = asyncio.create_task(stream.take(0))
        for _ in range(200):
            await settle()
            for number in world.on_their_way():
                world.sample(number)
        with pytest.raises(EngineFailed, match=r"7 groups in a row are stale: .* a policy 2 versions old"):
            await taking
        await stream.close()

    asyncio.run(story())


def test_a_failure_of_any_group_on_its_way_surfaces_when_the_next_step_waits():
    async def story() -> None:
        for late in (False, True):
            world = World()
            stream = stream_of(world, groups=2, lag=1, steps=4)
            await stream.run_ahead()
            await settle()
            taking = asyncio.create_task(stream.take(0)) if late else None
            await settle()
            world.finished[3].set_exception(EngineFailed("engine 1 died"))
            await settle()
            with pytest.raises(EngineFailed, match="engine 1 died"):
                await (taking or stream.take(0))
            await stream.close()
            assert sorted(world.cancelled) == [0, 1, 2] and len(asyncio.all_tasks()) == 1

    asyncio.run(story())


def test_the_span_is_from_the_first_start_to_the_last_end():
    async def story() -> None:
        world, now = World(), [10.0]
        stream = RolloutStream(world.prompts, world.roll, first=0, groups_per_step=2, max_lag_steps=1, num_steps=2, clock=lambda: now[0])
        await stream.run_ahead()
        await settle()
        for at, number in ((12.0, 1), (13.0, 2), (17.0, 0), (19.0, 3)):
            now[0] = at
            for _ in range(TOKENS):
                world.sample(number)
            await settle()
        now[0] = 30.0
        assert (await stream.take(0)).span_s == 7.0
        await stream.run_ahead()
        assert (await stream.take(0)).span_s == 9.0

    asyncio.run(story())


def test_a_resumed_stream_begins_with_the_first_prompt_that_was_not_trained_on():
    async def story() -> None:
        world = World(version=5)
        stream = stream_of(world, groups=2, lag=1, steps=1, first=14)
        await stream.run_ahead()
        await settle()
        assert world.begun == [(14, 5), (15, 5)], "one step is left, so nothing of a later one is begun"
        await stream.close()

    asyncio.run(story())


def test_groups_without_a_sampled_token_are_as_fresh_as_any():
    async def story() -> None:
        world = World()

        async def empty(prompt: Prompt, _number: int) -> RolloutGroup:
            return group(prompt, [])

        stream = RolloutStream(world.prompts, empty, first=0, groups_per_step=1, max_lag_steps=1, num_steps=1)
        await stream.run_ahead()
        assert (await stream.take(7)).num_stale == 0

    asyncio.run(story())
