"""Rollouts that run ahead of the step that trains on them, by a bounded number of policy versions.

In: prompts by number, a coroutine that rolls a prompt's group out, and word of every step that is done. Out: the groups of each step, in
the prompts' order. It lives in the event loop and knows neither engines nor trainer, so its laws are tested without either.

Groups are numbered as their prompts are. A step takes the earliest ones and waits for its stragglers: to take whatever is finished instead
would prefer short answers. So the group `p` places behind the last one taken belongs to the step `p // groups_per_step` steps ahead, and it
is begun only when that is at most `max_lag_steps`. It cannot then be older than the bound when its step comes; should an engine still
answer with an older policy, the group is stale: left out, counted, and replaced by the next ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.rollout.versions import oldest
from megatron_gptoss.types import PolicyVersion, Prompt, RolloutGroup

# Stale groups in a row, in steps, that end the run: nothing would ever be trained.
STALE_STEPS = 3


@dataclass(frozen=True)
class Taken:
    """What one step trains on."""

    groups: list[RolloutGroup]  # groups_per_step of them
    num_prompts: int  # consumed, stale ones included
    num_stale: int
    span_s: float  # from the start of its first group to the end of its last; other work went on meanwhile


@dataclass(frozen=True)
class _Begun:
    """A group on its way."""

    task: asyncio.Task[tuple[RolloutGroup, float]]  # and when it ended
    begun_s: float


class RolloutStream:
    """All methods in the event loop. `prompts(number, count)` gives prompts from `number` on, `roll(prompt, number)` a group. `first` is
    the first number that was never trained on. What no step before the end of `num_steps` would take is not begun."""

    def __init__(
        self,
        prompts: Callable[[int, int], Sequence[Prompt]],
        roll: Callable[[Prompt, int], Awaitable[RolloutGroup]],
        *,
        first: int,
        groups_per_step: int,
        max_lag_steps: int,
        num_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.prompts, self.roll, self.clock = prompts, roll, clock
        self.groups_per_step, self.max_lag_steps = groups_per_step, max_lag_steps
        self.next_number = first
        self.steps_to_take = num_steps
        self.begun: deque[_Begun] = deque()  # in the prompts' order

    async def run_ahead(self) -> None:
        """Call at the start, and when the engines hold what the last step made of the policy: begin what may be begun now."""
        self._begin_allowed()

    async def take(self, version: PolicyVersion) -> Taken:
        """The next step's groups, when all of them are finished. `version`: the policy that the step starts from.

        Raises what any group begun so far raises, also one of a later step; EngineFailed when all that comes is stale.
        """
        groups: list[RolloutGroup] = []
        spans: list[tuple[float, float]] = []
        num_stale = 0
        while len(groups) < self.groups_per_step:
            if not self.begun:
                raise RuntimeError("a step's rollouts were asked for that may not be begun yet, or after the last step")
            first = self.begun[0]
            self._raise_failure()
            while not first.task.done():
                await asyncio.wait([each.task for each in self.begun if not each.task.done()], return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
            group, ended_s = first.task.result()
            self.begun.popleft()
            age = version - since if (since := oldest(group.rollouts)) is not None else 0
            if age <= self.max_lag_steps:
                groups.append(group)
                spans.append((first.begun_s, ended_s))
                continue
            num_stale += 1
            if num_stale > STALE_STEPS * self.groups_per_step:
                raise EngineFailed(f"{num_stale} groups in a row are stale: the engines sample with a policy {age} versions old")
            self._begin_allowed(behind=len(groups))
        self.steps_to_take -= 1
        span_s = max(ended for _, ended in spans) - min(begun for begun, _ in spans)
        return Taken(groups, len(groups) + num_stale, num_stale, span_s)

    async def close(self) -> None:
        """End what is on its way."""
        tasks = [each.task for each in self.begun]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.begun.clear()

    def _begin_allowed(self, behind: int = 0) -> None:
        """The step that is next starts from the weights that the engines hold. `behind`: groups that it has already."""
        allowed = min(self.max_lag_steps + 1, self.steps_to_take) * self.groups_per_step - behind
        missing = max(allowed - len(self.begun), 0)
        for number, prompt in enumerate(self.prompts(self.next_number, missing), start=self.next_number):
            self.begun.append(_Begun(asyncio.create_task(self._timed(prompt, number)), self.clock()))
        self.next_number += missing

    async def _timed(self, prompt: Prompt, number: int) -> tuple[RolloutGroup, float]:
        return await self.roll(prompt, number), self.clock()

    def _raise_failure(self) -> None:
        for each in self.begun:
            if each.task.done():
                each.task.result()
