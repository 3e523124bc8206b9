"""Routes of a real engine, from vLLM to the trainer's routers: conversations of two turns, sampled side by side and over cached prefixes,
and a trainer whose choice of experts is noisy in every layout. One engine, one spawn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import DiagnoseConfig, ModelConfig, RlConfig, TrainerConfig
from megatron_gptoss.parallel.packing import pack
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rollout.handle import EngineHandle, start_engine
from megatron_gptoss.rollout.routes import add_turn
from megatron_gptoss.rollout.vllm_settings import EngineSettings
from megatron_gptoss.sync.wire import to_bytes
from megatron_gptoss.types import Sample, TokenRoutes, TurnRequest
from tests.dist.test_router_replay_trainer import check
from tests.helpers.gradients import whole_gradients
from tests.helpers.routes import rows_of
from tests.helpers.tiny_model import strong_tensors

MODEL = ModelConfig(
    num_hidden_layers=3, hidden_size=128, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    num_local_experts=8, num_experts_per_tok=2, vocab_size=160, sliding_window=32,
)  # fmt: skip
LAYOUTS = {
    "EP1": ParallelShape(world=1),
    "EP2": ParallelShape(world=2, expert=2),
    "PP2": ParallelShape(world=2, pipeline=2),
    "CP2": ParallelShape(world=2, context=2),
}
TURN, TOOL = 30, 7  # tokens sampled in each turn, tokens of a tool's answer between them


def weights() -> list[tuple[str, torch.Tensor]]:
    return [(name, 0.5 * x if "norm" not in name else x) for name, x in strong_tensors(MODEL, 4)]


def ids(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, MODEL.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


async def talk(engine: EngineHandle, name: str, prompt: tuple[int, ...]) -> Sample:
    """Two assistant turns with a tool's words between them."""
    tokens, flags, logp, routes = prompt, [False] * len(prompt), [0.0] * len(prompt), None
    for turn in range(2):
        request = TurnRequest(f"{name}/{turn}", name, tokens, TURN, (), 1.0)
        result = await engine.generate(request)
        routes = add_turn(routes, request, result)
        words = ids(TOOL, 5) if turn == 0 else ()
        tokens = (*tokens, *result.token_ids, *words)
        flags += [True] * len(result.token_ids) + [False] * len(words)
        logp += [*result.logp, *(0.0 for _ in words)]
    return Sample(name, tokens, tuple(flags), tuple(logp), advantage=1.0 if len(prompt) == 40 else -0.5, routes=routes)


async def story(engine: EngineHandle) -> list[Sample]:
    await engine.start()
    await engine.update_weights(1, [to_bytes(weights())])
    prompts = [ids(n, n) for n in (3, 40, 70)]
    at_once = await asyncio.gather(*(talk(engine, f"c{i}", prompt) for i, prompt in enumerate(prompts)))
    again = [await talk(engine, f"again{i}", prompt) for i, prompt in enumerate(prompts[1:])]  # their prompts are cached by now
    return [*at_once, *again]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sample]]:
    folder = tmp_path_factory.mktemp("routes")
    (folder / "model").mkdir()
    write_hf_config(MODEL, folder / "model" / "config.json", dtype="float32")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)
    settings = EngineSettings(
        model_dir=str(folder / "model"), dtype="float32", max_model_len=256, max_running=8, log_path=str(folder / "engine.log"),
        kv_cache_gib=0.1, experts_to_tell=MODEL.num_local_experts,
    )  # fmt: skip
    engine = start_engine(settings, "engine")
    try:
        yield asyncio.run(asyncio.wait_for(story(engine), 300))
    finally:
        engine.kill()
        ray.shutdown()


def step(shape: ParallelShape, rank: int, batch: list[Sample]) -> dict:
    from megatron_gptoss.model.router import GptOssRouter
    from megatron_gptoss.trainer.how import Update
    from megatron_gptoss.trainer.step import Trainer

    def trainer(noise: float) -> Trainer:
        optimizer = RlConfig(lr=1e-3, decay="constant", warmup_steps=0)
        diagnose = DiagnoseConfig(routing_noise=noise)
        made = Trainer(MODEL, TrainerConfig(), shape, optimizer, total_updates=4, diagnose=diagnose, seed=3)
        made.load_hf(weights())
        made.weights_changed()
        return made

    seen = []
    plain = GptOssRouter.route

    def route(self, hidden):
        found = plain(self, hidden)
        seen.append((self.layer, found[1]))
        return found

    mine = pack(batch, ranks=shape.data, tokens_per_microbatch=256)[shape.data_index(rank)]
    GptOssRouter.route = route
    found, noisy = {}, trainer(2.0)
    found["in_scoring"] = check(noisy, mine, seen, lambda: noisy.score(mine, router_replay="engine"), passes=1)
    replayed = Update(policy=RlConfig(router_replay="engine"))
    found["in_update"] = check(noisy, mine, seen, lambda: found.update(replayed=noisy.update([mine], replayed)), passes=1)
    GptOssRouter.route = plain
    found["own"] = trainer(2.0).update([mine], Update(policy=RlConfig()))
    found["quiet"] = trainer(0.0).update([mine], replayed)
    found["routers"] = {name: float(g.abs().max()) for name, g in whole_gradients(noisy).items() if ".router." in name}
    if shape.world == 1:
        scored = trainer(0.0).score(mine, router_replay="scored")
        found["chosen"] = [(s.routes.experts_LTK, b.routes.experts_LTK) for s, b in zip(scored, mine, strict=True)]
    return found


def world(rank: int, folder: str) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    batch = torch.load(f"{folder}/samples.pt", weights_only=False)
    for name, shape in LAYOUTS.items():
        if rank < shape.world:
            init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
            torch.save(step(shape, rank, batch), f"{folder}/{name}-rank{rank}.pt")
            dist.barrier()
            destroy_groups()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, sampled: list[Sample]) -> dict[str, list[dict]]:
    folder: Path = tmp_path_factory.mktemp("worlds")
    torch.save(sampled, folder / "samples.pt")
    mp.spawn(world, args=(str(folder),), nprocs=2, join=True)  # pyright: ignore[reportPrivateImportUsage]
    load = lambda name, rank: torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False)  # noqa: E731
    return {name: [load(name, rank) for rank in range(shape.world)] for name, shape in LAYOUTS.items()}


def test_every_row_but_the_last_token_s_comes_with_a_conversation(sampled: list[Sample]) -> None:
    for sample in sampled:
        routes = sample.routes
        assert isinstance(routes, TokenRoutes) and routes.num_tokens == len(sample.token_ids) - 1
        assert bool(rows_of(routes).any(-1).all()), "no row is missing, cached prefixes included"
        assert routes.num_rerouted == 0, "a later turn tells of cached tokens what an earlier one told"


def test_they_are_what_the_model_chooses(found: dict[str, list[dict]]) -> None:
    """In float32 and without noise the trainer's routers choose the same sets; a tie may be rounded apart."""
    for ours, engine in found["EP1"][0]["chosen"]:
        told = engine.any(-1)
        same = (ours[:, : engine.shape[1]].sort(-1).values == engine.sort(-1).values).all(-1)[told]
        assert same.float().mean() > 0.995 and len(same) > 300


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trainer_s_experts_are_the_engine_s(found: dict[str, list[dict]], sampled: list[Sample], layout: str) -> None:
    told = MODEL.num_hidden_layers * sum(len(s.token_ids) - 1 for s in sampled)
    for phase in ("in_scoring", "in_update"):
        assert [rank[phase].wrong for rank in found[layout]] == [0] * len(found[layout])
        assert sum(rank[phase].right for rank in found[layout]) == told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_parts_them_without_replay_and_not_with_it_and_routers_learn(found: dict[str, list[dict]], layout: str) -> None:
    for rank in found[layout]:
        assert rank["replayed"].logp_abs_max < 1e-4 and rank["replayed"].k3 < 1e-8
        assert rank["own"].k3 > 1e-2
        assert rank["replayed"].k3 == pytest.approx(rank["quiet"].k3, abs=1e-9)
        assert len(rank["routers"]) == 2 * MODEL.num_hidden_layers and min(rank["routers"].values()) > 0
        measured = {m.name: m.value for m in rank["replayed"].measures}
        assert measured["router/missing_rows"] == MODEL.num_hidden_layers * 5
