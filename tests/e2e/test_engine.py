"""Real engines: vLLM in a Ray actor, against the Hugging Face model in float32 on the same tokens.

One engine serves most tests, because a start takes half a minute; the tests that kill engines come last. Sinks are never representable in
bfloat16 here: a trained one is not either, and vLLM's CPU kernel would round them.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.rollout.engine import WeightsRefused
from megatron_gptoss.rollout.handle import EngineHandle, start_engine
from megatron_gptoss.rollout.pool import EnginePool, InlinePolicy, PoolLimits
from megatron_gptoss.rollout.vllm_settings import EngineSettings
from megatron_gptoss.sync.verify import NO_WEIGHTS, digest
from megatron_gptoss.sync.wire import to_bytes
from megatron_gptoss.types import TurnRequest, TurnResult
from tests.helpers.runs import words_of

WINDOW, VOCABULARY, MAX_LEN = 32, 512, 512
PARITY = 1e-5  # nats; ten times below what a run allows. Rounding of two float32 implementations gives 2e-6 to 4e-6


def tiny_config() -> GptOssConfig:
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_parameters={**yarn, "rope_theta": 150000.0, "original_max_position_embeddings": 4096},
        eos_token_id=11,  # must be ignored: only a request's stop tokens end a turn
        pad_token_id=0,
        architectures=["GptOssForCausalLM"],
    )


def tiny_policy(seed: int) -> GptOssForCausalLM:
    """Random weights, large enough that sinks, windows and routing matter."""
    model = GptOssForCausalLM(tiny_config()).float().eval()
    model.set_attn_implementation("eager")
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=g)
            if name.endswith("sinks"):
                parameter.copy_(2 * noise)
                assert not torch.equal(parameter, parameter.bfloat16().float())
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.05 if "bias" in name else 0.08))
    return model


def buckets_of(model: GptOssForCausalLM, num_buckets: int = 3) -> list[list[tuple[str, torch.Tensor]]]:
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return [named[at::num_buckets] for at in range(num_buckets)]


def wire(buckets: list[list[tuple[str, torch.Tensor]]]) -> list[bytes]:
    return [to_bytes(bucket) for bucket in buckets]


def digest_of(model: GptOssForCausalLM) -> int:
    return digest(model.named_parameters())


@torch.no_grad()
def gap(model: GptOssForCausalLM, prompt: tuple[int, ...], turn: TurnResult) -> float:
    """Largest difference between the engine's log-probs and the model's, nats."""
    logits = model(torch.tensor([prompt + turn.token_ids])).logits[0, len(prompt) - 1 : -1]
    ours = logits.log_softmax(-1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
    return float((ours - torch.tensor(turn.logp)).abs().max())


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    r = random.Random(f"{seed}/{length}")
    return tuple(r.randrange(VOCABULARY) for _ in range(length))


class Ids:
    """Request ids are unique over a run."""

    count = 0


def ask(
    prompt: tuple[int, ...], tokens: int = 24, stop: tuple[int, ...] = (), seed: int | None = None, temperature: float = 1.0
) -> TurnRequest:
    Ids.count += 1
    return TurnRequest(f"r{Ids.count}", "c", prompt, tokens, stop, temperature, seed)


@dataclass
class Bench:
    """What the tests share: one event loop, the model folder, two policies, and one engine that holds A."""

    loop: asyncio.AbstractEventLoop
    folder: Path
    a: GptOssForCausalLM
    b: GptOssForCausalLM
    engine: EngineHandle

    def run(self, story: Coroutine[Any, Any, Any], timeout_s: float = 300) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(story, timeout_s))

    def settings(self, name: str, **changes: Any) -> EngineSettings:
        base = {"model_dir": str(self.folder / "model"), "dtype": "float32", "max_model_len": MAX_LEN, "max_running": 16}
        return EngineSettings(**(base | {"log_path": str(self.folder / f"{name}.log"), "kv_cache_gib": 0.25} | changes))

    async def push(self, model: GptOssForCausalLM, version: int) -> None:
        held = await self.engine.update_weights(version, wire(buckets_of(model)))
        assert (held.version, held.num_tensors, held.digest) == (version, len(list(model.named_parameters())), digest_of(model))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("engine")
    tiny_config().save_pretrained(folder / "model")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    bench = Bench(loop, folder, tiny_policy(1), tiny_policy(2), None)  # type: ignore[arg-type]
    bench.engine = start_engine(bench.settings("engine"), "engine")
    try:
        bench.run(bench.engine.start(), 300)
        yield bench
    finally:
        bench.engine.kill()
        ray.shutdown()
        loop.close()


def test_nothing_is_sampled_before_weights_arrive(bench: Bench) -> None:
    with pytest.raises(WeightsRefused, match="no whole policy"):
        bench.run(bench.engine.generate(ask(make_prompt(8))))


def test_log_probs_equal_the_model_s_with_sinks_that_bfloat16_cannot_hold(bench: Bench) -> None:
    bench.run(bench.push(bench.a, 0))
    prompts = [make_prompt(n) for n in (1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 76, 200)]

    async def sample() -> list[TurnResult]:
        return await asyncio.gather(*(bench.engine.generate(ask(prompt, 40)) for prompt in prompts))

    turns = bench.run(sample())
    assert all(len(turn.token_ids) == 40 and turn.stop_reason == "length" and turn.version == 0 for turn in turns)
    assert max(gap(bench.a, prompt, turn) for prompt, turn in zip(prompts, turns, strict=True)) < PARITY

    without, rounded = copy.deepcopy(bench.a), copy.deepcopy(bench.a)
    for model, change in ((without, lambda s: s.fill_(-1e4)), (rounded, lambda s: s.copy_(s.bfloat16()))):
        for layer in model.model.layers:
            change(layer.self_attn.sinks.data)
    assert max(gap(without, prompt, turn) for prompt, turn in zip(prompts, turns, strict=True)) > 1e-2
    # What the CPU kernel alone would give: far outside the bar.
    assert max(gap(rounded, prompt, turn) for prompt, turn in zip(prompts, turns, strict=True)) > 10 * PARITY


@torch.no_grad()
def test_temperature_is_part_of_the_log_probs(bench: Bench) -> None:
    prompt = make_prompt(20)
    turn = bench.run(bench.engine.generate(ask(prompt, 30, temperature=0.5)))
    logits = bench.a(torch.tensor([prompt + turn.token_ids])).logits[0, len(prompt) - 1 : -1]
    ours = (logits / 0.5).log_softmax(-1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(ours, torch.tensor(turn.logp), atol=2 * PARITY, rtol=0)  # 1/temperature scales the rounding


def test_pushing_a_b_a_leaves_no_trace_and_no_stale_prefix(bench: Bench) -> None:
    """The same long prompt every time: a prefix cached under other weights would be found, and would be wrong."""
    prompt = make_prompt(100)
    policies = {"a": bench.a, "b": bench.b}
    for version, name in enumerate("abababa", start=1):
        bench.run(bench.push(policies[name], version))
        turn = bench.run(bench.engine.generate(ask(prompt)))
        other = policies["b" if name == "a" else "a"]
        assert turn.version == version == bench.run(bench.engine.version())
        assert gap(policies[name], prompt, turn) < PARITY and gap(other, prompt, turn) > 1e-2


def test_an_update_waits_for_running_turns_and_every_turn_is_of_one_version(bench: Bench) -> None:
    async def story() -> None:
        await bench.push(bench.a, 10)
        early = [asyncio.create_task(bench.engine.generate(ask(make_prompt(30, n), 200))) for n in range(4)]
        await asyncio.sleep(0.2)
        update = asyncio.create_task(bench.push(bench.b, 11))
        await asyncio.sleep(0.05)
        late = [asyncio.create_task(bench.engine.generate(ask(make_prompt(30, n)))) for n in range(4)]
        await update
        for n in range(4):
            first, second = await early[n], await late[n]
            assert (first.version, second.version) == (10, 11) and len(first.token_ids) == 200
            assert gap(bench.a, make_prompt(30, n), first) < PARITY and gap(bench.b, make_prompt(30, n), second) < PARITY
        await bench.push(bench.a, 12)

    bench.run(story())


def test_only_stop_tokens_end_a_turn_and_they_are_part_of_it(bench: Bench) -> None:
    prompt = make_prompt(40)
    every_other = tuple(range(0, VOCABULARY, 2))
    for _ in range(5):
        turn = bench.run(bench.engine.generate(ask(prompt, 60, every_other)))
        assert turn.stop_reason == "stop" and turn.token_ids[-1] % 2 == 0 and all(token % 2 for token in turn.token_ids[:-1])
        assert gap(bench.a, prompt, turn) < PARITY
    # The folder's end-of-sequence token does not: at 3000 tokens of a nearly flat distribution it comes up about 6 times.

    async def long_turns() -> list[TurnResult]:
        return await asyncio.gather(*(bench.engine.generate(ask(prompt, 400)) for _ in range(8)))

    turns = bench.run(long_turns())
    assert all(len(turn.token_ids) == 400 and turn.stop_reason == "length" for turn in turns)
    assert any(tiny_config().eos_token_id in turn.token_ids for turn in turns)


def test_each_request_has_its_own_limit_and_a_bad_one_hurts_nobody(bench: Bench) -> None:
    async def story() -> None:
        limits = [1, 2, 7, 30]
        turns = await asyncio.gather(*(bench.engine.generate(ask(make_prompt(12), limit)) for limit in limits))
        assert [len(turn.token_ids) for turn in turns] == limits
        for bad in (ask(make_prompt(500), 13), ask((), 5), ask(make_prompt(5), 0)):
            with pytest.raises(ValueError, match="max_model_len = 512"):
                await bench.engine.generate(bad)
        await bench.engine.probe()

    bench.run(story())


def test_an_update_interrupts_turns_and_the_rest_is_of_the_new_policy_alone(bench: Bench) -> None:
    """Each part's log-probs are those of its policy, with the whole prefix read again: no keys and values of the other one are left."""

    async def story() -> None:
        await bench.push(bench.a, 14)
        asked = [replace(ask(make_prompt(30, n), 300), interruptible=n != 2) for n in range(6)]
        early = [asyncio.create_task(bench.engine.generate(request)) for request in asked]
        await asyncio.sleep(0.3)
        await bench.push(bench.b, 15)
        parts = await asyncio.gather(*early)
        for n, (request, first) in enumerate(zip(asked, parts, strict=True)):
            assert first.version == 14 and gap(bench.a, request.token_ids, first) < PARITY
            if n == 2:
                assert first.stop_reason == "length" and len(first.token_ids) == 300, "it had to be whole"
                continue
            assert first.stop_reason == "interrupted" and 0 < len(first.token_ids) < 300
            rest = await bench.engine.generate(ask(request.token_ids + first.token_ids, 300 - len(first.token_ids)))
            assert rest.version == 15 and gap(bench.b, request.token_ids + first.token_ids, rest) < PARITY
        await bench.push(bench.a, 16)

    bench.run(story())


def test_what_was_begun_earlier_is_sampled_first(bench: Bench) -> None:
    """The engine takes 16 at once. Of 64 that come latest first, those of a lower order are done earlier, on average: a few that arrive
    before the others find a free place, whatever their order."""

    async def story() -> None:
        done: list[int] = []

        async def one(order: int) -> None:
            await bench.engine.generate(replace(ask(make_prompt(8, order), 80), order=order))
            done.append(order)

        # The first fill the engine and are long, so that all others lie in it when it chooses again.
        filling = [asyncio.create_task(bench.engine.generate(ask(make_prompt(8, n), 450))) for n in range(16)]
        await asyncio.sleep(0.3)
        await asyncio.gather(*filling, *(one(order) for order in [3] * 16 + [2] * 16 + [1] * 16 + [0] * 16))
        place = [fmean(at for at, of in enumerate(done) if of == order) for order in range(4)]
        assert place == sorted(place), done

    bench.run(story())


def test_an_aborted_turn_returns_what_it_has(bench: Bench) -> None:
    async def story() -> None:
        doomed, other = ask(make_prompt(10), 450), ask(make_prompt(10), 300)
        turns = [asyncio.create_task(bench.engine.generate(request)) for request in (doomed, other)]
        await asyncio.sleep(0.3)
        await bench.engine.abort(doomed.request_id)
        first, second = await asyncio.gather(*turns)
        assert first.stop_reason == "abort" and len(first.token_ids) < 450
        assert second.stop_reason == "length" and len(second.token_ids) == 300
        assert not first.token_ids or gap(bench.a, doomed.token_ids, first) < PARITY

    bench.run(story())


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list], list]:
    return lambda buckets: [[(n, change(t) if n == name else t) for n, t in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda buckets: [*buckets, [("model.layers.0.self_attn.sink", torch.zeros(4))]], "sink"),
        (lambda buckets: [*buckets, [("nothing.of.ours", torch.zeros(4))]], "nothing"),
        (with_tensor("model.layers.1.self_attn.sinks", lambda t: t[:1]), "narrow|sinks|start"),
        (with_tensor("model.layers.1.mlp.experts.down_proj_bias", lambda t: t[:1]), "down_proj_bias"),
        (with_tensor("model.norm.weight", lambda t: t[:64]), "Size"),
        (lambda buckets: buckets[:-1], "not a whole update"),
        (lambda buckets: [*buckets, buckets[0][:1]], "too rarely or too often"),
        (lambda buckets: [], "not a whole update"),
    ],
    ids=["unknown-in-layer", "unknown", "short-sinks", "broadcast-bias", "short-norm", "missing-bucket", "tensor-twice", "empty"],
)
def test_a_spoilt_update_is_refused_and_nothing_is_served_until_a_whole_one(bench: Bench, spoil: Callable, message: str) -> None:
    async def story() -> None:
        with pytest.raises(WeightsRefused, match=message):
            await bench.engine.update_weights(20, wire(spoil(buckets_of(bench.b))))
        assert await bench.engine.version() == NO_WEIGHTS
        with pytest.raises(WeightsRefused):
            await bench.engine.generate(ask(make_prompt(8)))
        await bench.push(bench.a, 21)
        prompt = make_prompt(50)
        assert gap(bench.a, prompt, await bench.engine.generate(ask(prompt))) < PARITY

    bench.run(story())


def test_what_the_engine_says_is_in_its_log_only(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.run(bench.engine.generate(ask(make_prompt(8))))
    assert "vllm" in Path(bench.engine.log_path).read_text().lower()
    assert "vllm" not in "".join(capfd.readouterr()).lower()


async def sample_all(pool: EnginePool, requests: list[TurnRequest], at_once: bool) -> list[TurnResult]:
    if at_once:
        return await asyncio.gather(*(pool.generate(request) for request in requests))
    return [await pool.generate(request) for request in requests]


def victims(pid: int) -> dict[str, psutil.Process]:
    """The actor and vLLM's engine core, its child."""
    core = next(child for child in psutil.Process(pid).children(recursive=True) if "spawn_main" in words_of(child))
    return {"actor": psutil.Process(pid), "core": core}


def test_turns_survive_both_ways_of_dying_bit_for_bit_and_no_process_is_left(bench: Bench) -> None:
    """The actor of the shared engine is killed first; deterministic engines follow, of which the first loses its engine core.

    Deterministic means that neither the order nor the company of requests matters, nor a restart.
    """

    def make_engine(index: int, attempt: int) -> EngineHandle:
        if attempt == 0:
            return bench.engine
        return start_engine(bench.settings(f"pool-{attempt}", deterministic=True), f"engine-{index}.{attempt}")

    def requests(tokens: int = 100) -> list[TurnRequest]:
        return [ask(make_prompt(5 + 13 * n), tokens, (3,), seed=n) for n in range(8)]

    async def story() -> None:
        seen: list[psutil.Process] = []
        # The shared engine runs already, and its handle may be started once only.
        limits = PoolLimits(
            16, start_timeout_s=240, turn_timeout_s=100, probe_every_s=5, probe_timeout_s=60, max_restarts=2, restart_window_s=3600
        )
        pool = EnginePool(make_engine, 1, limits)
        pool.slots[0].running = True

        async def kill_while_sampling(victim: str, asked: list[TurnRequest]) -> list[TurnResult]:
            pid = pool.slots[0].engine.pid
            assert pid is not None
            family, redispatched = victims(pid), pool.counts.redispatched_turns
            seen.extend([family["actor"], *family["actor"].children(recursive=True)])
            together = asyncio.create_task(sample_all(pool, asked, at_once=True))
            await asyncio.sleep(0.4)
            os.kill(family[victim].pid, signal.SIGKILL)
            turns = await together
            assert pool.counts.redispatched_turns > redispatched
            return turns

        try:
            await pool.publish(InlinePolicy(5, ray.put(wire(buckets_of(bench.b))), digest_of(bench.b)))
            asked = requests(tokens=400)
            for request, turn in zip(asked, await kill_while_sampling("actor", asked), strict=True):
                assert turn.version == 5 and gap(bench.b, request.token_ids, turn) < PARITY

            alone = await sample_all(pool, requests(), at_once=False)
            assert await sample_all(pool, requests(), at_once=True) == alone
            assert (await sample_all(pool, requests()[::-1], at_once=True))[::-1] == alone
            assert await kill_while_sampling("core", requests()) == alone
            assert pool.counts.restarts == 2 and pool.slots[0].engine.name == "engine-0.2"

            pid = pool.slots[0].engine.pid
            assert pid is not None
            seen.extend([psutil.Process(pid), *psutil.Process(pid).children(recursive=True)])
            with pytest.raises(EngineFailed, match=r"digest .* confirms version 6 with digest"):
                await pool.publish(InlinePolicy(6, ray.put(wire(buckets_of(bench.a))), digest_of(bench.a) ^ 1))
        finally:
            await pool.close()
        assert len(seen) >= 6 and not psutil.wait_procs(seen, timeout=5)[1]

    bench.run(story(), 400)
