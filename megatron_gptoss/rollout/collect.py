"""Rollouts: every conversation of a step, from its prompt to its reward, all at once.

In: prompts, a pool that samples turns, a task. Out: one `RolloutGroup` per prompt, in the order of the prompts. Token ids only grow: what
the engine sampled is kept as it is and never tokenized again, so what is trained is what was sampled. A turn that an update of the weights
interrupts keeps its tokens, and the new policy is asked for the rest of it. It does not choose prompts, filter groups or restart engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from megatron_gptoss.data.harmony import generation_prefix, parse_turn, render, turn_stop_tokens
from megatron_gptoss.data.prompts import require_room
from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.errors import EngineFailed, GptossError, RunFailed
from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.rollout.routes import add_turn
from megatron_gptoss.rollout.versions import runs_of
from megatron_gptoss.tasks.base import Conversation, Task, Verdict
from megatron_gptoss.types import PolicyVersion, Prompt, Rollout, RolloutGroup, TokenRoutes, TurnRequest, TurnResult

TASK_THREADS = 16  # replies of a task that run at once; tools and checkers wait for processes of their own, so more threads than cores
_threads = ThreadPoolExecutor(TASK_THREADS, thread_name_prefix="task")  # of all calls: where rollouts run ahead, each group is one

_calls = itertools.count()  # makes request ids unique when the same step is collected twice, for training and for evaluation


class Pool(Protocol):
    """Anything that samples a turn. A failure it cannot mend it raises."""

    async def generate(self, request: TurnRequest) -> TurnResult: ...


@dataclass(frozen=True)
class CollectLimits:
    max_turns: int  # assistant turns; a call in the last one is not answered
    max_turn_tokens: int  # sampled tokens of one turn, its stop token included
    max_sequence_tokens: int  # tokens of the whole conversation
    temperature: float
    seeded: bool  # a seed of its own for every turn, instead of the engine's stream

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_turn_tokens, self.max_sequence_tokens) < 1:
            raise ValueError(f"every limit must be at least 1: {self}")


async def collect(
    prompts: Sequence[Prompt],
    group_size: int,
    pool: Pool,
    task: Task,
    tokenizer: Tokenizer,
    limits: CollectLimits,
    *,
    run_seed: int,
    step: int,
    version: PolicyVersion | None = None,
    routes: bool = False,
    order: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[RolloutGroup]:
    """`group_size` rollouts of every prompt, with `progress(done, total)` after each. `version`: the policy that must have sampled every
    turn, None to accept any; then updates may interrupt turns, unless `routes` are kept, which an interrupted turn comes without.
    `routes`: keep which experts the engine sent each token to. `order`: turns of a lower one are served first. Prompt ids must be unique.

    The first failure cancels the other conversations and is raised: what the pool raises; EngineFailed for a turn sampled by another
    policy, or without the routes it should have; ConfigError for a prompt that leaves no room to answer; RunFailed, naming prompt and
    task, for what a task raises.
    """
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError("two prompts of one step have the same id, and would be given the same seeds")
    common = _Common(pool, task, tokenizer, limits, version, routes, order, run_seed, step, next(_calls))
    total, done = len(prompts) * group_size, itertools.count(1)

    async def one(prompt: Prompt, index: int) -> Rollout:
        rollout = await _Walk(common, prompt, index).run()
        if progress is not None:
            progress(next(done), total)
        return rollout

    running = [asyncio.create_task(one(prompt, index)) for prompt in prompts for index in range(group_size)]
    await _all_or_first_failure(running)
    rollouts = iter(each.result() for each in running)
    return [RolloutGroup(prompt, tuple(itertools.islice(rollouts, group_size))) for prompt in prompts]


def turn_seed(run_seed: int, step: int, prompt_id: str, index: int, turn: int) -> int:
    """A seed of 63 bits that depends on nothing else, so that order and number of engines do not matter."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{prompt_id}/{index}/{turn}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


async def _all_or_first_failure(running: Sequence[asyncio.Task[Rollout]]) -> None:
    """Waits for all. At the first failure, or when cancelled itself, cancels the rest, waits until they are gone, and raises."""
    if not running:
        return
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        failed = [each for each in running if each.done() and not each.cancelled() and each.exception() is not None]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for each in failed:
        each.result()


@dataclass(frozen=True)
class _Common:
    """What all conversations of one call share."""

    pool: Pool
    task: Task
    tokenizer: Tokenizer
    limits: CollectLimits
    version: PolicyVersion | None
    wants_routes: bool
    order: int
    run_seed: int
    step: int
    call: int

    @property
    def interruptible(self) -> bool:
        """Neither a seed nor routes could be carried over to the rest of a turn."""
        return self.version is None and not self.limits.seeded and not self.wants_routes


@dataclass
class _Walk:
    """One conversation on its way, and the tokens so far."""

    common: _Common
    prompt: Prompt
    index: int
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[tuple[PolicyVersion, int]] = field(default_factory=list)  # of each sampled part of a turn, with its number of tokens
    num_tool_calls: int = 0
    routes: TokenRoutes | None = None

    async def run(self) -> Rollout:
        limits, tokenizer = self.common.limits, self.common.tokenizer
        with self._task_errors("begin"):
            conversation = self.common.task.begin(self.prompt)
            opening = conversation.opening()
            self._append([*render(opening, tokenizer), *generation_prefix(tokenizer)])
        require_room(self.prompt, len(self.token_ids), limits.max_sequence_tokens, limits.max_turn_tokens)
        stops = turn_stop_tokens(opening, tokenizer)
        for turn in range(limits.max_turns):
            room = limits.max_sequence_tokens - len(self.token_ids)
            token_ids, stop_reason = await self._sample(turn, min(limits.max_turn_tokens, room), stops)
            if stop_reason == "abort":
                return self._cut(conversation, "aborted")
            if stop_reason == "length":
                return self._cut(conversation, "length" if room >= limits.max_turn_tokens else "context")
            parsed = parse_turn(token_ids, tokenizer)
            last = turn == limits.max_turns - 1
            if last and parsed.kind == "call":
                break  # nobody would read the tool's answer
            with self._task_errors("reply"):
                # In a thread, because tools and checkers block; the other conversations go on.
                reply = await asyncio.get_running_loop().run_in_executor(_threads, conversation.reply, parsed)
                if isinstance(reply, Verdict):
                    return self._finish(reply, reply.stop_reason)
                answer = [*render(reply, tokenizer), *generation_prefix(tokenizer)]
            self.num_tool_calls += len(parsed.calls) if parsed.kind == "call" else 0
            if last:
                break
            if len(self.token_ids) + len(answer) >= limits.max_sequence_tokens:
                return self._cut(conversation, "context")
            self._append(answer)
        return self._cut(conversation, "max_turns")

    async def _sample(self, turn: int, max_new_tokens: int, stops: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """One assistant turn, in as many parts as updates make of it. Returns its tokens and why it ended."""
        common, start = self.common, len(self.token_ids)
        conversation_id = f"{common.call}/step{common.step}/{self.prompt.id}/{self.index}"
        for part in itertools.count():
            room = start + max_new_tokens - len(self.token_ids)
            request = TurnRequest(
                request_id=f"{conversation_id}/{turn}" + (f".part{part}" if part else ""),
                conversation_id=conversation_id,
                token_ids=tuple(self.token_ids),
                max_new_tokens=room,
                stop_token_ids=stops,
                temperature=common.limits.temperature,
                seed=turn_seed(common.run_seed, common.step, self.prompt.id, self.index, turn) if common.limits.seeded else None,
                order=common.order,
                interruptible=common.interruptible,
            )
            with SPANS("turn as it is waited for", beside=True):
                result = await common.pool.generate(request)
            self._keep(request, result)
            if result.stop_reason != "interrupted":
                return tuple(self.token_ids[start:]), result.stop_reason
            if len(result.token_ids) == room:
                break  # it had nothing left to say
        return tuple(self.token_ids[start:]), "length"

    def _keep(self, request: TurnRequest, result: TurnResult) -> None:
        """The tokens of a turn, or of a part of it."""
        common = self.common
        result.check()
        if len(result.token_ids) > request.max_new_tokens:
            raise EngineFailed(f"{request.request_id}: asked for at most {request.max_new_tokens} tokens, got {len(result.token_ids)}")
        if common.version is not None and result.version != common.version:
            raise EngineFailed(f"{request.request_id}: sampled by policy version {result.version}, not {common.version}")
        if result.stop_reason == "interrupted" and not request.interruptible:
            raise EngineFailed(f"{request.request_id}: the engine interrupted a turn that has to be whole")
        if common.wants_routes:
            same_policy = not self.versions or self.versions[-1][0] == result.version
            self.routes = add_turn(self.routes, request, result, same_policy=same_policy)
        self.versions.append((result.version, len(result.token_ids)))
        self.token_ids += result.token_ids
        self.sampled += [True] * len(result.token_ids)
        self.logp += result.logp

    def _append(self, token_ids: Sequence[int]) -> None:
        """Tokens that were not sampled."""
        self.token_ids += token_ids
        self.sampled += [False] * len(token_ids)
        self.logp += [0.0] * len(token_ids)

    def _cut(self, conversation: Conversation, reason: str) -> Rollout:
        with self._task_errors("cut"):
            verdict = conversation.cut(reason)
        return self._finish(verdict, reason)

    def _finish(self, verdict: Verdict, stop_reason: str) -> Rollout:
        rollout = Rollout(
            prompt=self.prompt,
            index=self.index,
            token_ids=tuple(self.token_ids),
            sampled=tuple(self.sampled),
            logp=tuple(self.logp),
            versions=runs_of(self.versions),
            num_tool_calls=self.num_tool_calls,
            stop_reason=stop_reason,
            answer=verdict.answer,
            reward=verdict.reward,
            reward_parts=verdict.parts,
            labels=verdict.labels,
            routes=self.routes,
        )
        rollout.check()
        return rollout

    @contextmanager
    def _task_errors(self, where: str) -> Iterator[None]:
        try:
            yield
        except GptossError:
            raise  # it says already what is wrong
        except Exception as error:
            who = f"task {self.common.task.name}, prompt {self.prompt.id}, rollout {self.index}"
            raise RunFailed(f"{who}: {where} failed: {type(error).__name__}: {error}") from error
