"""Routes over ranks: every rank's routers take exactly the engine's experts for the tokens and layers they hold, and gradients are those of
one rank, although own choices are noisy, layers are recomputed and several microbatches are under way. One spawn: imports take long.

The loss reads the last hidden states of all tokens with fixed weights, so that it needs no divided vocabulary.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.tiny_model import TINY, packed_batch, strong_tensors

LAYERS, E, K = 3, 8, 2  # three layers, so that two stages are uneven
MODEL = TINY.model_copy(update={"num_hidden_layers": LAYERS, "num_local_experts": E, "num_experts_per_tok": K})
LENGTHS = ([9, 5], [13], [4, 4, 9], [7, 3])  # of four microbatches; two need padding under two ranks
SHAPES = {
    "EP2": ParallelShape(world=2, expert=2),
    "TP2": ParallelShape(world=2, tensor=2),
    "CP2": ParallelShape(world=2, context=2),
    "PP2": ParallelShape(world=2, pipeline=2),
}
RECOMPUTE = ("none", "full", "selective")
CASES = [(name, recompute) for name in SHAPES for recompute in RECOMPUTE]


def engine_routes(which: int):
    """What an engine might have returned for a microbatch: arbitrary experts."""
    from megatron_gptoss.model.replay import pack_routes

    g = torch.Generator().manual_seed(100 + which)
    rows = [torch.rand(n, LAYERS, E, generator=g).argsort(-1)[..., :K] for n in LENGTHS[which]]
    return pack_routes(rows, LENGTHS[which], layers=range(LAYERS), num_experts=E, top_k=K)


def build(shape: ParallelShape, recompute: str):
    from megatron_gptoss.checkpoint.weight_map import load_hf
    from megatron_gptoss.model.build import build_model
    from megatron_gptoss.model.router import inject_choice_noise

    model = build_model(MODEL, shape, recompute=recompute)
    load_hf(model, MODEL, strong_tensors(MODEL, 1))
    inject_choice_noise(model, 2.0, seed=dist.get_rank())
    return model.train()


def train(shape: ParallelShape, recompute: str) -> dict:
    """Forward and backward over all microbatches in this layout, routes replayed. Gradients are whole, under Hugging Face's names; `wrong`
    counts this rank's routes that differ from the engine's."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.model.gpt_oss import packed_params
    from megatron_gptoss.model.replay import replay, rows_of_rank
    from megatron_gptoss.model.router import router_layers

    model = build(shape, recompute)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    tensor, context = ps.get_tensor_model_parallel_rank(), ps.get_context_parallel_rank()
    mine = range(len(LENGTHS))[ps.get_data_parallel_rank() :: shape.data]
    counts = {"rows": 0, "replayed": 0, "wrong": 0, "losses": {}}

    def forward_step(todo, model):
        which = next(todo)
        tokens, positions, cu_seqlens = packed_batch(LENGTHS[which], MODEL.vocab_size, seed=which)
        T = tokens.numel()
        pad = -T % (shape.tensor * shape.context)
        if pad:
            tokens, positions = (torch.nn.functional.pad(x, (0, pad)) for x in (tokens, positions))
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + pad])
        shard = rows_of_rank(T + pad, context=(context, shape.context))
        rows = rows_of_rank(T + pad, context=(context, shape.context), sequence=(tensor, shape.tensor))
        routes = engine_routes(which).pad_to(T + pad).cut(layers=router_layers(wrapped), rows=rows)
        use_TC = torch.randn(T, MODEL.hidden_size, generator=torch.Generator().manual_seed(which))
        use_TC = torch.nn.functional.pad(use_TC, (0, 0, 0, pad))[shard]
        with replay(routes) as routing:
            out = model(
                input_ids=tokens[:, shard],
                position_ids=positions[:, shard],
                packed_seq_params=packed_params(cu_seqlens, max(LENGTHS[which])),
                head=lambda hidden_TC, _weight: (hidden_TC * use_TC).sum() / shape.tensor,  # the tensor ranks' gradients are summed
            )
        counts["rows"] += routing.num_replayed + routing.num_own
        counts["replayed"] += routing.num_replayed
        counts["wrong"] += int((routing.routes().experts_LTK != routes.experts_LTK).sum())

        def loss(value):
            counts["losses"][which] = value.item()
            return value, torch.tensor(min(T, shard.stop) - shard.start, dtype=torch.int), {}  # without padding

        return out, loss

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(mine), model=[wrapped], num_microbatches=len(mine), seq_length=0,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    gradients = {name: g.clone() for name, g in export_hf(wrapped, MODEL, value=lambda p: p.main_grad)}
    return {**counts, "gradients": gradients}


def router_alone(shape: ParallelShape) -> dict:
    """One router under sequence parallelism: each rank routes its half of the tokens. Its gradients, summed by finalize_model_grads."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_gptoss.model.build import megatron_config
    from megatron_gptoss.model.router import GptOssRouter

    config = megatron_config(MODEL, ParallelShape(world=1), dtype=torch.float32)
    config.sequence_parallel = shape.tensor > 1
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = GptOssRouter(config=config, pg_collection=groups)
    router.set_layer_number(1)
    g = torch.Generator().manual_seed(1)
    router.weight.data = torch.randn(E, MODEL.hidden_size, generator=g)
    router.bias.data = torch.randn(E, generator=g)
    hidden, upstream = torch.randn(10, 1, MODEL.hidden_size, generator=g), torch.randn(10, E, generator=g)
    rows = slice(None) if shape.tensor == 1 else slice(5 * groups.tp.rank(), 5 * groups.tp.rank() + 5)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), router)
    wrapped.zero_grad_buffer()
    probs, _ = wrapped(hidden[rows])
    (probs * upstream[rows]).sum().backward()
    before = router.weight.main_grad.clone()
    finalize_model_grads([wrapped])
    return {"before": before, "weight": router.weight.main_grad.clone(), "bias": router.bias.main_grad.clone()}


def two_ranks(rank: int, folder: str) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    found = {}
    for name, shape in SHAPES.items():
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
        for recompute in RECOMPUTE:
            found[name, recompute] = train(shape, recompute)
        if name == "TP2":
            found["router"] = router_alone(shape)
        dist.barrier()
        destroy_groups()
    torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(two_ranks, args=(str(folder),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def truth(one_rank):
    return SimpleNamespace(whole=train(one_rank, "none"), router=router_alone(one_rank))


def test_one_rank_replays_the_engines_routes(truth):
    total = sum(map(sum, LENGTHS))
    assert (truth.whole["rows"], truth.whole["replayed"], truth.whole["wrong"]) == (LAYERS * total, LAYERS * total, 0)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_row_is_the_engines_and_is_replayed_once(found, case):
    """Summed over ranks: routers x tokens, padding included."""
    shape = SHAPES[case[0]]
    multiple = shape.tensor * shape.context
    padded = sum(-(-sum(lengths) // multiple) * multiple for lengths in LENGTHS)
    assert sum(rank[case]["rows"] for rank in found) == sum(rank[case]["replayed"] for rank in found) == LAYERS * padded
    assert all(rank[case]["wrong"] == 0 for rank in found)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_gradient_equals_one_rank(found, truth, case):
    theirs = truth.whole["gradients"]
    for name, gradient in theirs.items():
        if name == "lm_head.weight":
            continue  # the loss does not pass through it
        assert gradient.abs().max() > 0, name
        deviation = float((found[0][case]["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        assert deviation < 1e-5, f"{name}: {deviation:.1e} of its largest entry"


def test_router_gradients_are_summed_over_tensor_parallel_ranks(found, truth):
    ours = [rank["router"] for rank in found]
    for name in ("weight", "bias"):
        assert torch.equal(ours[0][name], ours[1][name])
        torch.testing.assert_close(ours[0][name], truth.router[name], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours[0]["before"], truth.router["weight"], rtol=1e-2), "a rank alone has a part"
    torch.testing.assert_close(ours[0]["before"] + ours[1]["before"], truth.router["weight"], rtol=1e-5, atol=1e-6)
