"""One engine of two processes that divide the model (a CPU stands for GPUs): the same numbers as one process, and no process that is
forgotten, neither by a probe nor by death.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import ray
import torch

from megatron_gptoss.rollout.engine import WeightsRefused
from megatron_gptoss.rollout.handle import start_engine
from megatron_gptoss.rollout.vllm_settings import EngineSettings
from tests.e2e.test_engine import MAX_LEN, PARITY, Bench, ask, buckets_of, gap, make_prompt, tiny_config, tiny_policy, wire, with_tensor
from tests.helpers.runs import words_of


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("divided")
    tiny_config().save_pretrained(folder / "model")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)
    loop = asyncio.new_event_loop()
    settings = EngineSettings(
        str(folder / "model"), "float32", MAX_LEN, 16, str(folder / "engine.log"), kv_cache_gib=0.25, tensor_parallel=2, num_cpus=2.0
    )
    bench = Bench(loop, folder, tiny_policy(1), tiny_policy(2), start_engine(settings, "divided"))
    try:
        bench.run(bench.engine.start(), 400)
        yield bench
    finally:
        bench.engine.kill()
        ray.shutdown()
        loop.close()


def family(bench: Bench) -> dict[str, psutil.Process]:
    """The actor, its engine core, and the workers, which are the core's children."""
    assert bench.engine.pid is not None
    actor = psutil.Process(bench.engine.pid)
    (core,) = [child for child in actor.children() if "spawn_main" in words_of(child)]
    first, second = sorted((child for child in core.children() if "spawn_main" in words_of(child)), key=lambda p: p.pid)
    return {"actor": actor, "core": core, "first worker": first, "second worker": second}


def test_each_worker_holds_its_share_of_the_same_weights_and_computes_the_model(bench: Bench) -> None:
    """`push` compares version, number of tensors and digest; the engine itself refuses when its workers disagree about them."""
    for version, policy in enumerate((bench.a, bench.b, bench.a)):
        other = bench.a if policy is bench.b else bench.b
        bench.run(bench.push(policy, version))

        async def sample() -> list:
            return await asyncio.gather(*(bench.engine.generate(ask(make_prompt(n), 40)) for n in (1, 31, 32, 76, 200)))

        for n, turn in zip((1, 31, 32, 76, 200), bench.run(sample()), strict=True):
            assert gap(policy, make_prompt(n), turn) < PARITY and gap(other, make_prompt(n), turn) > 1e-2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.self_attn.sinks", lambda t: torch.cat([t, t])),
        ("model.layers.1.self_attn.sinks", lambda t: t[:3]),
        ("model.layers.0.mlp.experts.gate_up_proj", lambda t: torch.cat([t, t], dim=2)),
        ("model.layers.0.mlp.experts.down_proj_bias", lambda t: t[:1]),
    ],
    ids=["long-sinks", "short-sinks", "wide-experts", "broadcast-bias"],
)
def test_a_share_of_a_misshapen_tensor_is_refused(bench: Bench, name: str, change) -> None:
    """A worker cuts its share out of what comes, so that a tensor too large would fit."""
    with pytest.raises(WeightsRefused):
        bench.run(bench.engine.update_weights(20, wire(with_tensor(name, change)(buckets_of(bench.b)))))
    bench.run(bench.push(bench.a, 21))


@pytest.mark.parametrize("who", ["actor", "core", "first worker", "second worker"])
def test_a_probe_waits_for_every_process(bench: Bench, who: str) -> None:
    async def story() -> None:
        await bench.engine.probe()
        frozen = family(bench)[who]
        frozen.suspend()
        try:
            question = asyncio.create_task(bench.engine.probe())
            await asyncio.sleep(3.0)
            assert not question.done()
        finally:
            frozen.resume()
        await question

    bench.run(story())


def test_nothing_of_a_killed_actor_is_left_not_even_what_was_frozen(bench: Bench) -> None:
    processes = family(bench)
    processes["second worker"].suspend()
    processes["core"].suspend()
    os.kill(processes["actor"].pid, signal.SIGKILL)
    assert not psutil.wait_procs(list(processes.values()), timeout=20)[1]
