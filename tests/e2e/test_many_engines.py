"""Two real engines under fire: conversations that call a tool, and engines that are killed and frozen meanwhile.

The first tests share two engines and the real `collect`; the last one is a whole `gptoss train`, whose engines are killed at moments that a
seed draws. GPTOSS_TEST_KILLS sets how many (3 when it is not set; 10 took eleven minutes on two busy cores).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import ray
import torch

from megatron_gptoss.checkpoint.convert import convert
from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.data.harmony import Message, ParsedTurn
from megatron_gptoss.loop.event_loop import EventLoop
from megatron_gptoss.obs.run_dir import find_weights
from megatron_gptoss.rollout.collect import CollectLimits, collect
from megatron_gptoss.rollout.handle import EngineHandle, start_engine
from megatron_gptoss.rollout.pool import EnginePool, InlinePolicy, PoolLimits
from megatron_gptoss.rollout.vllm_settings import EngineSettings
from megatron_gptoss.sync.verify import digest
from megatron_gptoss.sync.wire import to_bytes
from megatron_gptoss.tasks.arithmetic import Arithmetic
from megatron_gptoss.tasks.base import Conversation, Verdict
from megatron_gptoss.types import Prompt, RolloutGroup
from tests.helpers.checkpoints import tensors_of
from tests.helpers.runs import CONFIGS, alive, finished, gptoss, metrics, tree, wait_for, words_of
from tests.helpers.tiny_model import hugging_face_model

VERSION = 4
PROMPTS, GROUP = 16, 4
PROBE_EVERY_S, PROBE_TIMEOUT_S, TURN_TIMEOUT_S = 1.0, 20.0, 600.0
SLACK_S = 15.0  # a busy machine
PARITY = 1e-4  # nats, as a run asks for


@dataclass
class Counted:
    """A conversation of the task that counts how often it was begun and how often it ended."""

    inner: Conversation
    counts: dict[str, int]

    def opening(self) -> Sequence[Message]:
        return self.inner.opening()

    def reply(self, turn: ParsedTurn) -> Sequence[Message] | Verdict:
        answer = self.inner.reply(turn)
        self.counts["ended"] += isinstance(answer, Verdict)
        self.counts["tool answers"] += not isinstance(answer, Verdict)
        return answer

    def cut(self, reason: str) -> Verdict:
        self.counts["ended"] += 1
        return self.inner.cut(reason)


class CountedArithmetic(Arithmetic):
    def __init__(self) -> None:
        super().__init__(seed=0)
        self.counts = {"begun": 0, "ended": 0, "tool answers": 0}

    def begin(self, prompt: Prompt) -> Conversation:  # type: ignore[override]
        self.counts["begun"] += 1
        return Counted(super().begin(prompt), self.counts)


@dataclass
class House:
    """Two engines that hold a policy which speaks Harmony, and what is needed to ask them."""

    loop: EventLoop
    pool: EnginePool
    model: torch.nn.Module  # Hugging Face's, with the same weights
    seen: list[psutil.Process] = field(default_factory=list)

    def processes(self, index: int) -> tuple[psutil.Process, psutil.Process]:
        """An engine's actor and its engine core."""
        pid = self.pool.slots[index].engine.pid
        assert pid is not None
        actor = psutil.Process(pid)
        (core,) = [child for child in actor.children() if "spawn_main" in words_of(child)]
        self.seen += [actor, *actor.children(recursive=True)]
        return actor, core

    async def restarted(self, times: int) -> float:
        """When that many restarts have begun; the clock's time."""
        while self.pool.counts.restarts < times:
            await asyncio.sleep(0.05)
        return time.monotonic()

    async def collect(self, at: int = -1, deed: Callable[[], None] = lambda: None) -> list[RolloutGroup]:
        """64 conversations, `deed` when `at` of them are done; each exactly once, by the policy that is published."""
        config, task = load(*parse_flags(CONFIGS)).config, CountedArithmetic()
        limits = CollectLimits(max_turns=5, max_turn_tokens=28, max_sequence_tokens=200, temperature=1.0, seeded=False)
        prompts = task.prompts("train", 0, PROMPTS)

        def progress(done: int, total: int) -> None:
            assert total == PROMPTS * GROUP
            if done == at:
                deed()

        from megatron_gptoss.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config)
        groups = await collect(
            prompts, GROUP, self.pool, task, tokenizer, limits, run_seed=0, step=1, version=VERSION, progress=progress
        )  # fmt: skip
        assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts]
        assert all([rollout.index for rollout in group.rollouts] == list(range(GROUP)) for group in groups)
        assert task.counts["begun"] == task.counts["ended"] == PROMPTS * GROUP
        assert task.counts["tool answers"] > PROMPTS, "the policy calls its tool"
        assert all(slot.turns == 0 and not slot.calls for slot in self.pool.slots) and not self.pool.waiting
        return groups

    @torch.no_grad()
    def check_tokens(self, groups: Sequence[RolloutGroup]) -> None:
        """What was sampled is what the weights sample in this very context: nothing was lost or repeated in between."""
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            ids = torch.tensor(rollout.token_ids)
            logp = self.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            sampled = torch.tensor(rollout.sampled)[1:]
            assert float((logp - torch.tensor(rollout.logp)[1:])[sampled].abs().max()) < PARITY


@pytest.fixture(scope="module")
def house(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("many")
    config = load(*parse_flags(CONFIGS)).config
    convert(find_weights(warm).path, folder / "hf", "hf")
    tensors = {name: tensor.float() for name, tensor in tensors_of(folder / "hf").items()}
    model = hugging_face_model(config.model, tensors, folder / "reference")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)

    def make(index: int, attempt: int) -> EngineHandle:
        name = f"engine-{index}.{attempt}"
        settings = EngineSettings(str(folder / "hf"), "float32", 200, 4, str(folder / f"{name}.log"), kv_cache_gib=0.25)
        return start_engine(settings, name)

    # Few at once, so that an engine's death always finds turns that wait in the pool, in the engine, and in the model.
    limits = PoolLimits(8, 900.0, TURN_TIMEOUT_S, PROBE_EVERY_S, PROBE_TIMEOUT_S, max_restarts=10, restart_window_s=3600.0)
    with EventLoop() as loop:
        pool = EnginePool(make, 2, limits)
        try:
            loop.run(pool.publish(InlinePolicy(VERSION, ray.put([to_bytes(tensors.items())]), digest(tensors.items()))))
            yield House(loop, pool, model)
        finally:
            loop.run(pool.close())
            ray.shutdown()


def test_an_engine_that_is_killed_in_the_middle_costs_no_conversation(house: House) -> None:
    actor, _ = house.processes(0)
    restarts, redispatched = house.pool.counts.restarts, house.pool.counts.redispatched_turns
    groups = house.loop.run(house.collect(at=16, deed=actor.kill))
    house.loop.run(house.pool.start())  # the other engine may have done all turns before this one's remains are swept up
    assert house.pool.counts.restarts == restarts + 1
    assert redispatched < house.pool.counts.redispatched_turns <= redispatched + 8, "those in flight on it, and no other"
    house.check_tokens(groups)


def test_an_engine_that_is_frozen_in_the_middle_is_found_within_the_deadline(house: House) -> None:
    """Its turns have ten minutes, and none would ever miss them."""

    async def story() -> tuple[list[RolloutGroup], float]:
        await house.pool.start()  # all serve again
        actor, _ = house.processes(1)
        began: list[float] = []
        restarts = house.pool.counts.restarts

        def freeze() -> None:
            began.append(time.monotonic())
            actor.suspend()

        work = asyncio.create_task(house.collect(at=16, deed=freeze))
        found = await house.restarted(restarts + 1)
        return await work, found - began[0]

    groups, seconds = house.loop.run(story())
    assert seconds < PROBE_EVERY_S + PROBE_TIMEOUT_S + SLACK_S < TURN_TIMEOUT_S
    assert "did not answer a health probe within 20 s" in house.pool.counts.causes[-1]
    house.check_tokens(groups)


def test_an_engine_core_that_freezes_while_nothing_is_asked_is_found_too(house: House) -> None:
    async def story() -> tuple[list[RolloutGroup], float]:
        await house.pool.start()
        _, core = house.processes(0)
        restarts = house.pool.counts.restarts
        core.suspend()
        began = time.monotonic()
        found = await house.restarted(restarts + 1)
        groups = await house.collect()  # by the other one, or both
        await house.pool.start()
        return groups, found - began

    groups, seconds = house.loop.run(story())
    assert seconds < PROBE_EVERY_S + PROBE_TIMEOUT_S + SLACK_S
    assert "did not answer a health probe" in house.pool.counts.causes[-1]
    assert [slot.version for slot in house.pool.slots] == [VERSION, VERSION], "the new one holds the weights"
    house.check_tokens(groups)
    assert not alive(house.seen), "nothing is left of the engines that were replaced"


def engines(driver: int) -> list[psutil.Process]:
    """The actors, oldest first."""
    return sorted((p for p in tree(driver) if words_of(p).startswith("ray::Engine")), key=lambda p: p.create_time())


@pytest.mark.timeout(1800)
def test_kills_at_random_moments_cost_no_step(warm: Path, tmp_path: Path) -> None:
    """At the start of the run, between a step's rollouts and the end of its weight update, in its rollouts, and while an engine that was
    killed before is coming back: actors and engine cores, of which every one is replaced."""
    kills, rng = int(os.environ.get("GPTOSS_TEST_KILLS", "3")), random.Random(2)
    moments = ["start", "update", "rollouts"] + [rng.choice(["rollouts", "update", "coming back"]) for _ in range(kills - 3)]
    steps = len(moments) + 1  # a death of the last step's end would not be noticed any more
    driver = gptoss(
        "train", *CONFIGS, f"--run.steps={steps}", "--run.save_every=0", "--run.eval_every=0", "--run.final_eval_prompts=4",
        "--rl.sequences_per_step=64", "--rollout.group_size=4", "--rl.drop_uniform_groups=false", "--rollout.num_engines=2",
        "--rollout.max_running=4", "--rollout.max_restarts=100", "--rollout.start_timeout_s=900.0", "--rollout.probe_every_s=1.0",
        "--run.id=k", "--init", str(warm), cwd=tmp_path, background=True,
    )  # fmt: skip
    run = tmp_path / "runs" / "demo-k"
    killed: list[psutil.Process] = []
    family: list[psutil.Process] = []

    def over() -> bool:
        family.extend(p for p in tree(driver.pid) if p not in family)
        return driver.poll() is not None

    def kill_one(among: Sequence[psutil.Process]) -> None:
        victims = [p for p in among if p not in killed and p.is_running()]
        actor = rng.choice(victims)
        cores = [child for child in actor.children() if "spawn_main" in words_of(child)]
        (rng.choice([actor, *cores])).send_signal(signal.SIGKILL)
        killed.append(actor)

    try:
        for step, moment in enumerate(moments):
            if moment == "start":
                wait_for(lambda: over() or len(engines(driver.pid)) == 2, "the engines' first start", timeout=600)
                time.sleep(rng.uniform(0.0, 15.0))
                kill_one(engines(driver.pid))
                continue
            wait_for(lambda: over() or finished(run, step - 1), f"the step before step {step}", timeout=900)  # noqa: B023
            assert driver.poll() is None, (tmp_path / "terminal.txt").read_text()
            if moment == "update":
                wait_for(lambda: over() or (run / "rollouts" / f"step-{step}.jsonl").exists(), f"step {step}'s rollouts", timeout=900)  # noqa: B023
                time.sleep(rng.uniform(0.0, 2.0))
            else:
                time.sleep(rng.uniform(0.0, 2.0))
            kill_one(engines(driver.pid))
            if moment == "coming back":
                before = set(engines(driver.pid)) | set(killed)
                wait_for(lambda: over() or set(engines(driver.pid)) - before, "the engine's successor", timeout=300)  # noqa: B023
                time.sleep(rng.uniform(0.0, 10.0))
                kill_one([p for p in engines(driver.pid) if p not in before])
        wait_for(over, "the end of the run", timeout=900)
    finally:
        driver.kill()
    text = (tmp_path / "terminal.txt").read_text()
    assert driver.returncode == 0, text
    rows = metrics(run)
    assert sorted(rows) == list(range(steps + 1)) and rows[steps]["policy/version"] == steps
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows.values()) == len(killed) >= kills
    assert text.count("an engine was restarted") == len(killed)
    for step in range(1, steps + 1):
        archive = [json.loads(line) for line in (run / "rollouts" / f"step-{step}.jsonl").read_text().splitlines()]
        assert len({(row["prompt_id"], row["index"]) for row in archive}) == len(archive) == 64, "none twice, none lost"
        assert rows[step]["mismatch/logp_abs_max"] < PARITY, "every engine held the step's weights"
    wait_for(lambda: not alive(family), f"the end of {alive(family)}", timeout=20)
