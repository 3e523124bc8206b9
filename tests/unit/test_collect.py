"""Laws of collecting rollouts. In: a pool that plays a script instead of sampling."""

import asyncio
import random
import re
import threading
import time
from dataclasses import replace

import pytest

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.harmony import Message
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.errors import ConfigError, EngineFailed, RunFailed
from megatron_gptoss.rollout.collect import TASK_THREADS, CollectLimits, collect, turn_seed
from megatron_gptoss.rollout.versions import continued_turns, token_versions
from megatron_gptoss.tasks.arithmetic import Arithmetic, calculate
from megatron_gptoss.tasks.base import Verdict
from megatron_gptoss.types import Prompt, TurnRequest, TurnResult, VersionRun

TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))
LIMITS = CollectLimits(max_turns=5, max_turn_tokens=28, max_sequence_tokens=200, temperature=1.0, seeded=False)
CALL = '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"expression":"%s"}<|call|>'
FINAL = "<|channel|>final<|message|>%s<|return|>"


def ids_of(text: str) -> tuple[int, ...]:
    parts = re.split(r"(<\|[a-z]+\|>)", text)
    return tuple(i for n, part in enumerate(parts) for i in ([TINY.special(part)] if n % 2 else TINY.encode(part)))


def solve(text: str) -> str:
    """What a policy that has learned the task says next, given the whole conversation."""
    problem = re.search(r"user<\|message\|>\((\d+[+-]\d+)\)([+*-]\d)", text)
    results = re.findall(r"functions.calc to=assistant<\|channel\|>commentary<\|message\|>(-?\d+|error)<", text)
    assert problem
    return [lambda: CALL % problem[1], lambda: CALL % (results[0] + problem[2]), lambda: FINAL % results[-1]][min(len(results), 2)]()


class ScriptedPool:
    """Says what `speak` answers to the text so far, after a delay that scrambles the order. Log-probs differ from turn to turn."""

    def __init__(self, speak=solve, version=3, delays=0.0):
        self.speak, self.version, self.rng, self.delays = speak, version, random.Random(0), delays
        self.requests: list[TurnRequest] = []
        self.results: dict[str, TurnResult] = {}
        self.alive = 0

    async def generate(self, request: TurnRequest) -> TurnResult:
        self.requests.append(request)
        self.alive += 1
        try:
            await asyncio.sleep(self.rng.random() * self.delays)
            said = self.speak(TINY.decode(request.token_ids))
        finally:
            self.alive -= 1
        if isinstance(said, Exception):
            raise said
        if isinstance(said, TurnResult):
            return replace(said, version=self.version)
        ids, reason = ids_of(said), "length"
        for n, token in enumerate(ids):
            if token in request.stop_token_ids:
                ids, reason = ids[: n + 1], "stop"
                break
        if len(ids) > request.max_new_tokens:
            ids, reason = ids[: request.max_new_tokens], "length"
        first = len(self.requests)
        result = TurnResult(ids, tuple(-float(first + n) for n in range(len(ids))), reason, self.version)
        self.results[request.request_id] = result
        return result


def run(pool, prompts=None, group_size=1, task=None, limits=LIMITS, **more):
    task = task or Arithmetic(0)
    prompts = task.prompts("train", 0, 1) if prompts is None else prompts
    more = {"run_seed": 0, "step": 0} | more
    return asyncio.run(collect(prompts, group_size, pool, task, TINY, limits, **more))  # type: ignore[arg-type]


def one(pool, **more):
    return run(pool, **more)[0].rollouts[0]


# ---------------------------------------------------------------- the way of one conversation


def test_a_right_conversation_is_the_recipes_and_holds_what_was_sampled():
    pool = ScriptedPool()
    prompt = Prompt("p", "arithmetic", "(37+58)*4", "380")
    rollout = one(pool, prompts=[prompt])
    assert (len(rollout.token_ids), sum(rollout.sampled)) == (76, 32)
    assert (rollout.reward, rollout.stop_reason, rollout.num_tool_calls, rollout.answer) == (1.0, "final", 2, "380")
    assert rollout.labels == ("called-both", "right")
    assert rollout.versions == (VersionRun(3, 32),)
    # Trained == sampled: the sampled tokens, in order, are the engine's, with the engine's log-probs.
    results = [pool.results[r.request_id] for r in pool.requests]
    assert [t for t, s in zip(rollout.token_ids, rollout.sampled, strict=True) if s] == [t for r in results for t in r.token_ids]
    assert [v for v, s in zip(rollout.logp, rollout.sampled, strict=True) if s] == [v for r in results for v in r.logp]
    # Append-only: each request is a beginning of the rollout.
    for request in pool.requests:
        assert rollout.token_ids[: len(request.token_ids)] == request.token_ids
        assert TINY.decode(request.token_ids).endswith("<|start|>assistant")


def test_sampled_ids_are_kept_where_their_text_has_other_ids():
    """A model may sample "final" as five letters. Tokenizing its text again would give another id, and train what was not sampled."""
    odd = (*ids_of("<|channel|>"), *(TINY.encode(c)[0] for c in "final"), *ids_of("<|message|>4<|return|>"))
    assert odd != ids_of("<|channel|>final<|message|>4<|return|>")
    said = TurnResult(odd, tuple(-0.5 for _ in odd), "stop", 0)
    rollout = one(ScriptedPool(lambda text: said))
    assert rollout.token_ids[-len(odd) :] == odd
    assert rollout.stop_reason == "final"


@pytest.mark.parametrize(
    ("speak", "stop_reason", "labels", "sampled"),
    [
        (lambda text: FINAL % "5", "final", ("no-call",), 5),
        (lambda text: "<|channel|>final<|message|>5<|end|>more", "malformed", ("no-call", "malformed"), 5),
        (lambda text: "<|channel|>final<|start|>", "malformed", ("no-call", "malformed"), 3),
        (lambda text: "<|channel|>final<|message|>" + "5" * 40, "length", ("no-call",), 28),
        (lambda text: "<|channel|>final<|message|>" + "5" * 24 + "<|return|>", "final", ("no-call",), 28),
        (lambda text: "<|channel|>final<|message|>" + "5" * 25 + "<|return|>", "length", ("no-call",), 28),
        (lambda text: CALL % "1+1", "max_turns", ("overcall",), 5 * 11),
    ],
)
def test_how_conversations_end(speak, stop_reason, labels, sampled):
    rollout = one(ScriptedPool(speak))
    assert (rollout.stop_reason, rollout.labels, rollout.reward) == (stop_reason, labels, 0.0)
    assert sum(rollout.sampled) == sampled
    assert rollout.sampled[-1]  # nothing is appended that nobody reads


def test_a_call_in_the_last_turn_is_not_run():
    rollout = one(ScriptedPool(lambda text: CALL % "1+1"))
    assert rollout.num_tool_calls == 4
    assert rollout.versions == (VersionRun(3, 5 * 11),)


def test_an_aborted_turn_ends_the_conversation():
    rollout = one(ScriptedPool(lambda text: TurnResult((9, 9), (-1.0, -1.0), "abort", 0)))
    assert (rollout.stop_reason, sum(rollout.sampled)) == ("aborted", 2)


class UpdatingPool(ScriptedPool):
    """Before the tokens at `cuts` (of all that it samples) the policy changes, and the turn is interrupted where it may be."""

    def __init__(self, cuts: set[int], **more) -> None:
        super().__init__(**more)
        self.cuts, self.sampled = cuts, 0
        self.told: list[TurnResult] = []

    async def generate(self, request: TurnRequest) -> TurnResult:
        said = re.sub(r"^.*assistant", "", TINY.decode(request.token_ids), flags=re.DOTALL)
        start = request.token_ids[: len(request.token_ids) - len(ids_of(said))]  # the turn's beginning may have been sampled already
        whole = await super().generate(replace(request, token_ids=start, max_new_tokens=request.max_new_tokens + len(ids_of(said))))
        rest = whole.token_ids[len(ids_of(said)) :]
        reason, version, taken = whole.stop_reason, self.version, len(rest)
        for n in range(len(rest)):
            if self.sampled + n in self.cuts:
                assert request.interruptible
                self.cuts.discard(self.sampled + n)
                self.version, taken, reason = self.version + 1, n, "interrupted"
                break
        logp = tuple(-float(self.sampled + n) for n in range(taken))
        self.sampled += taken
        self.told.append(TurnResult(rest[:taken], logp, reason, version))
        return self.told[-1]


@pytest.mark.parametrize("cuts", [set(), {0}, {5}, {5, 6, 7}, {0, 12, 13, 31}, {1, 2, 3, 12, 25, 26}, set(range(32))])
def test_a_turn_that_updates_interrupt_goes_on_and_every_token_keeps_its_log_prob_and_its_policy(cuts):
    prompt = Prompt("p", "arithmetic", "(37+58)*4", "380")
    whole = one(ScriptedPool(), prompts=[prompt])
    pool = UpdatingPool(set(cuts))
    rollout = one(pool, prompts=[prompt])
    assert (rollout.token_ids, rollout.sampled, rollout.reward) == (whole.token_ids, whole.sampled, 1.0), "as if nothing had happened"
    assert [v for v, flag in zip(rollout.logp, rollout.sampled, strict=True) if flag] == [-float(n) for n in range(32)]
    assert list(token_versions(rollout)) == [3 + sum(cut <= n for cut in cuts) for n in range(32)]
    # Every part is asked for with all that was sampled before it, and with what is left of the turn's limit.
    for request in pool.requests:
        assert rollout.token_ids[: len(request.token_ids)] == request.token_ids
    asked = [request.request_id for request in pool.requests]
    assert len(set(asked)) == len(asked) == 3 + len(cuts) and len({request.conversation_id for request in pool.requests}) == 1


def test_continued_turns_are_those_of_two_policies():
    prompt = Prompt("p", "arithmetic", "(37+58)*4", "380")
    turns = [len(ids_of(CALL % "37+58")), len(ids_of(CALL % "95*4"))]
    for cuts, continued in (({0}, 0), ({turns[0]}, 0), ({1, 2}, 1), ({1, turns[0] + 1}, 2), ({1, sum(turns), sum(turns) + 1}, 2)):
        assert continued_turns(one(UpdatingPool(cuts), prompts=[prompt])) == continued


def test_an_interruption_takes_nothing_from_the_turns_limit():
    """28 tokens are allowed: the stop token as the 28th ends the turn, and without it the turn is too long, wherever it was interrupted."""
    for cut in (1, 14, 27):
        enough = UpdatingPool({cut}, speak=lambda text: "<|channel|>final<|message|>" + "5" * 24 + "<|return|>")
        assert one(enough).stop_reason == "final"
        long = UpdatingPool({cut}, speak=lambda text: "<|channel|>final<|message|>" + "5" * 25 + "<|return|>")
        rollout = one(long)
        assert (rollout.stop_reason, sum(rollout.sampled)) == ("length", 28)
    full = TurnResult((9,) * 28, (-1.0,) * 28, "interrupted", 0)  # nothing is left to ask for
    assert one(ScriptedPool(lambda text: full)).stop_reason == "length"


def test_what_has_to_be_whole_is_not_interrupted():
    """A turn of one policy, with a seed, or with its routes."""
    for more in ({"version": 3}, {"limits": replace(LIMITS, seeded=True)}):
        pool = ScriptedPool()
        one(pool, **more)
        assert not any(request.interruptible for request in pool.requests)
        said = TurnResult((9,), (-1.0,), "interrupted", 3)
        with pytest.raises(EngineFailed, match="interrupted a turn that has to be whole"):
            one(ScriptedPool(lambda text, said=said: said), **more)
    pool = ScriptedPool()
    with pytest.raises(EngineFailed, match="returned no routes"):
        one(pool, routes=True)
    assert not pool.requests[0].interruptible


@pytest.mark.parametrize("limit", range(24, 77))
def test_no_conversation_outgrows_its_limit(limit):
    """At every limit up to the 76 tokens a right solution needs. Token 76 is the <|return|>, so 76 suffices and 75 does not."""
    prompt = Prompt("p", "arithmetic", "(37+58)*4", "380")
    rollout = one(ScriptedPool(), prompts=[prompt], limits=replace(LIMITS, max_sequence_tokens=limit))
    assert len(rollout.token_ids) <= limit
    assert rollout.sampled[-1]
    assert rollout.stop_reason == ("final" if limit == 76 else "context")


def test_a_prompt_without_room_says_what_to_set():
    with pytest.raises(ConfigError, match=r"prompt arithmetic/train/0 .* has 23 tokens .* rollout.max_sequence_tokens = 23 .* at least 51"):
        one(ScriptedPool(), limits=replace(LIMITS, max_sequence_tokens=23))


# ---------------------------------------------------------------- many at once


def test_order_does_not_depend_on_who_finishes_first():
    task, progress = Arithmetic(1), []
    prompts = task.prompts("train", 0, 6)
    groups = run(ScriptedPool(delays=0.01), prompts, 4, task, progress=lambda done, total: progress.append((done, total)))
    assert [g.prompt for g in groups] == prompts
    assert all([r.index for r in g.rollouts] == [0, 1, 2, 3] for g in groups)
    assert all(r.prompt == g.prompt and r.reward == 1.0 for g in groups for r in g.rollouts)
    assert progress == [(n, 24) for n in range(1, 25)]


def test_conversations_run_at_once():
    pool, most = ScriptedPool(delays=0.01), 0
    speak = pool.speak

    def watch(text):
        nonlocal most
        most = max(most, pool.alive)
        return speak(text)

    pool.speak = watch
    run(pool, Arithmetic(1).prompts("train", 0, 4), 8)
    assert most > 16  # of 32


def test_ids_are_unique_and_seeds_are_their_own():
    pool, task = ScriptedPool(delays=0.01), Arithmetic(1)
    prompts = task.prompts("train", 0, 3)
    seeded = replace(LIMITS, seeded=True)
    run(pool, prompts, 4, task, seeded, run_seed=7, step=2)
    first = {r.seed for r in pool.requests}
    assert len(first) == len(pool.requests) == 36
    assert all(seed is not None and 0 <= seed < 2**63 for seed in first)
    run(pool, list(reversed(prompts)), 4, task, seeded, run_seed=7, step=2)
    assert {r.seed for r in pool.requests[36:]} == first  # the same step again, in another order: the same seeds
    assert len({r.request_id for r in pool.requests}) == 72  # but ids of their own, also when a step is collected twice
    assert len({r.conversation_id for r in pool.requests}) == 24
    run(pool, prompts, 4, task, seeded, run_seed=7, step=3)
    assert not first & {r.seed for r in pool.requests[72:]}
    run(pool, prompts, 4, task, LIMITS)
    assert {r.seed for r in pool.requests[108:]} == {None}


def test_seed_value():
    """Kept from the first version: a deterministic run must sample the same after an upgrade."""
    assert turn_seed(0, 1, "arithmetic/train/17", 2, 3) == 2002095526589589552
    assert len({turn_seed(a, b, c, d, e) for a in (0, 1) for b in (0, 1) for c in ("x", "y") for d in (0, 1) for e in (0, 1)}) == 32


def test_two_prompts_with_one_id_are_refused():
    with pytest.raises(ValueError, match="same id"):
        run(ScriptedPool(), Arithmetic(0).prompts("train", 0, 1) * 2)


def test_no_prompts_no_groups():
    assert run(ScriptedPool(), []) == []


# ---------------------------------------------------------------- what fails


def test_a_failing_pool_ends_the_step_and_leaves_nothing_running():
    class HalfDeadPool(ScriptedPool):
        async def generate(self, request):
            if len(self.requests) == 20:
                raise EngineFailed("engine 1 died")
            return await super().generate(request)

    async def go():
        pool, start = HalfDeadPool(delays=60.0), time.monotonic()
        with pytest.raises(EngineFailed, match="engine 1 died"):
            await collect(Arithmetic(1).prompts("train", 0, 4), 8, pool, Arithmetic(1), TINY, LIMITS, run_seed=0, step=0)
        assert pool.alive == 0
        assert len(asyncio.all_tasks()) == 1
        assert time.monotonic() - start < 10.0  # the other turns were cancelled, not waited for

    asyncio.run(go())


def test_a_cancelled_step_leaves_nothing_running():
    async def go():
        pool, start = ScriptedPool(delays=60.0), time.monotonic()
        step = asyncio.create_task(collect(Arithmetic(1).prompts("train", 0, 2), 4, pool, Arithmetic(1), TINY, LIMITS, run_seed=0, step=0))
        await asyncio.sleep(0.05)
        assert pool.alive == 8
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert pool.alive == 0
        assert len(asyncio.all_tasks()) == 1
        assert time.monotonic() - start < 10.0

    asyncio.run(go())


def test_a_turn_of_another_policy_is_refused():
    assert [run.version for run in one(ScriptedPool(version=4), version=4).versions] == [4]
    with pytest.raises(EngineFailed, match=r"sampled by policy version 3, not 4"):
        one(ScriptedPool(version=3), version=4)


def test_an_engine_that_answers_too_much_is_refused():
    said = TurnResult((9,) * 29, (-1.0,) * 29, "length", 0)
    with pytest.raises(EngineFailed, match=r"at most 28 tokens, got 29"):
        one(ScriptedPool(lambda text: said))


class OddTask(Arithmetic):
    """Arithmetic whose replies are the test's."""

    def __init__(self, reply):
        super().__init__(0)
        self.reply = reply

    def begin(self, prompt):
        talk = super().begin(prompt)
        talk.reply = lambda turn: self.reply(turn)  # type: ignore[method-assign]
        return talk


def test_an_error_of_a_task_names_prompt_and_task():
    def broken(turn):
        raise ZeroDivisionError("oh")

    with pytest.raises(RunFailed, match=r"task arithmetic, prompt arithmetic/train/0, rollout 0: reply failed: ZeroDivisionError: oh"):
        one(ScriptedPool(), task=OddTask(broken))
    nameless = Message("tool", "4", "commentary", "assistant")
    with pytest.raises(RunFailed, match=r"reply failed: ValueError: a tool message needs author_name"):
        one(ScriptedPool(), task=OddTask(lambda turn: [nameless]))

    def expected(turn):
        raise EngineFailed("already clear")

    with pytest.raises(EngineFailed, match=r"^already clear$"):
        one(ScriptedPool(), task=OddTask(expected))


def test_a_task_that_never_ends_is_cut_at_the_last_turn():
    def again(turn):
        return [Message("tool", calculate("1+1"), "commentary", "assistant", author_name="functions.calc")]

    rollout = one(ScriptedPool(lambda text: FINAL % "5"), task=OddTask(again))
    assert (rollout.stop_reason, sum(rollout.sampled), rollout.num_tool_calls) == ("max_turns", 5 * 5, 0)


def test_slow_replies_do_not_hold_each_other_up():
    names = set()

    def slow(turn):
        names.add(threading.current_thread().name)
        time.sleep(0.2)
        return Verdict(1.0, (), None, (), "final")

    start = time.monotonic()
    task = OddTask(slow)
    run(ScriptedPool(), task.prompts("train", 0, 2), 8, task)
    assert time.monotonic() - start < 16 * 0.2 / 2
    assert threading.main_thread().name not in names


def test_replies_of_all_groups_together_are_bounded_and_those_not_begun_end_with_their_conversations():
    """Where rollouts run ahead, each group is a call of its own, and many are on their way."""
    running, most, begun, lock, go = 0, 0, 0, threading.Lock(), threading.Event()

    def slow(turn):
        nonlocal running, most, begun
        with lock:
            running, begun = running + 1, begun + 1
            most = max(most, running)
        go.wait(20)
        with lock:
            running -= 1
        return Verdict(1.0, (), None, (), "final")

    async def story():
        task = OddTask(slow)
        prompts = task.prompts("train", 0, 6)
        groups = [
            asyncio.create_task(collect([prompt], 8, ScriptedPool(), task, TINY, LIMITS, run_seed=0, step=0))  # type: ignore[arg-type]
            for prompt in prompts
        ]
        while begun < TASK_THREADS:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert most == TASK_THREADS
        for group in groups[2:]:
            group.cancel()
        await asyncio.gather(*groups[2:], return_exceptions=True)
        go.set()
        assert [len(found[0].rollouts) for found in await asyncio.gather(*groups[:2])] == [8, 8]
        assert begun == TASK_THREADS, "the first two groups' replies, and no cancelled one's"

    asyncio.run(story())
