"""The model with TransformerEngine's norms and matrices beside the local one, in bfloat16 on a GPU: outputs, every gradient, one training
step, and checkpoints and weights both ways.

    python3 -m pytest tests/gpu/test_te_layers_gpu.py -q -p no:cacheprovider

Needs torch, Megatron-Core, TransformerEngine and pytest; a second GPU for tensor parallelism. The budget: for the logits and every gradient
err(te) <= 2 * err(local) + rounding, both in bfloat16 against the local model in float32 with the same weights, as relative error of the
norm over a few batches. All experts are chosen for every token: a router that rounds otherwise must not choose otherwise.
"""

import pytest
import torch
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.tiny_model import packed_batch, strong_tensors
from tests.helpers.training import MILD, samples, trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available():
    pytest.importorskip("transformer_engine.pytorch")

BF16 = torch.bfloat16
ROUNDING = torch.finfo(BF16).eps / 2
MODEL = MILD.model_copy(update={"num_hidden_layers": 3, "hidden_size": 128, "num_experts_per_tok": MILD.num_local_experts})
LENGTHS = [61, 40, 5, 83, 2, 65]  # T = 256 in all, no sequence a multiple of anything
SEEDS = (1, 2, 3, 4)


def weights() -> dict[str, torch.Tensor]:
    """Exact in bfloat16, so that both dtypes begin with the same ones."""
    return {name: (0.5 * x if "norm" not in name else x).to(BF16).float() for name, x in strong_tensors(MODEL, seed=3)}


def measure(shape: ParallelShape, transformer: str, dtype: torch.dtype, seed: int, recompute: str = "none") -> dict[str, torch.Tensor]:
    """Logits (of this tensor-parallel rank's ids) of one pack, and the gradient of every parameter of their sum with random factors."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_gptoss.checkpoint.weight_map import export_hf, load_hf
    from megatron_gptoss.model.build import build_model
    from megatron_gptoss.model.gpt_oss import packed_params

    model = build_model(MODEL, shape, dtype=dtype, transformer=transformer, recompute=recompute).train()
    load_hf(model, MODEL, weights().items())
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.zero_grad_buffer()
    tokens, positions, cu_seqlens = (x.cuda() for x in packed_batch(LENGTHS, MODEL.vocab_size, seed=seed))
    logits_TV = wrapped(input_ids=tokens, position_ids=positions, packed_seq_params=packed_params(cu_seqlens, max(LENGTHS)))[0]
    factors_TV = torch.randn(len(tokens[0]), MODEL.vocab_size, generator=torch.Generator().manual_seed(seed)) / len(tokens[0])
    mine_TV = factors_TV.cuda().chunk(shape.tensor, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    (logits_TV.float() * mine_TV).sum().backward()
    model.config.finalize_model_grads_func([wrapped], None)
    found = {name: gradient.float().clone() for name, gradient in export_hf(wrapped, MODEL, value=lambda p: p.main_grad)}
    return {"logits": logits_TV.detach().float(), **found}


def errors(shape: ParallelShape, transformer: str, truths: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Relative error of each tensor's norm, over all seeds together."""
    found = [measure(shape, transformer, BF16, seed) for seed in SEEDS]

    def relative(name: str) -> float:
        off = sum(float((ours[name] - truth[name]).square().sum()) for ours, truth in zip(found, truths, strict=True))
        return (off / sum(float(truth[name].square().sum()) for truth in truths)) ** 0.5

    return {name: relative(name) for name in truths[0]}


def within_budget(shape: ParallelShape) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    truths = [measure(shape, "local", torch.float32, seed) for seed in SEEDS]
    local, te = (errors(shape, transformer, truths) for transformer in ("local", "te"))
    for name in truths[0]:
        assert truths[0][name].abs().max() > 0, f"{name} is not tested"
        print(f"{name}: local {local[name]:.1e}, te {te[name]:.1e}")
    over = [name for name in local if te[name] > 2 * local[name] + ROUNDING]
    assert not over, {name: (local[name], te[name]) for name in over}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    shape = ParallelShape(world=1)
    meeting = tmp_path_factory.mktemp("groups") / "meet"
    init_groups(shape, rank=0, init_method=f"file://{meeting}", timeout_s=60, seed=0, backend="nccl")
    yield shape
    destroy_groups()


def test_layers_are_transformer_engines_and_nothing_else_is(alone):
    te = pytest.importorskip("transformer_engine.pytorch")
    from megatron_gptoss.model.build import build_model

    model = build_model(MODEL, alone, dtype=BF16, transformer="te")
    theirs = {name for name, module in model.named_modules() if isinstance(module, (te.Linear, te.RMSNorm))}
    parts = ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm")
    of_layers = {f"decoder.layers.{i}.{part}" for i in range(MODEL.num_hidden_layers) for part in parts}
    assert theirs == {*of_layers, "decoder.final_layernorm"}


def test_logits_and_every_gradient_err_no_more_than_the_local_layers(alone):
    within_budget(alone)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_changes_no_bit_of_a_layers_gradients(alone, recompute):
    kept, again = (measure(alone, "te", BF16, 1, recompute=kind) for kind in ("none", recompute))
    assert all(torch.equal(kept[name], again[name]) for name in kept if ".layers." in name or name == "logits")


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_weights_and_checkpoints_move_both_ways(alone, tmp_path, states):
    """A run saved with one kind of layers goes on with the other: same weights and moments, same checkpoint keys. With float32 states the
    optimizer is torch's AdamW, though TransformerEngine's is installed; with bfloat16 states it is ours."""
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.checkpoint.training_state import load_training_state, save_training_state
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.parallel.packing import pack
    from megatron_gptoss.trainer.how import Update

    (batches,) = pack(samples(6, seed=5, longest=31), ranks=1, tokens_per_microbatch=64)
    how = Update(policy=RlConfig())
    after = {}
    for transformer in ("local", "te"):
        one = trainer(alone, model=MODEL, dtype="bfloat16", transformer=transformer, optimizer_states=states)
        first = one.update([batches], how)
        path = tmp_path / transformer
        save_training_state(path, config=MODEL, progress=Progress(1, 1, 0), model=one.model, optimizer=one.optimizer, schedule=one.schedule)
        changed = "te" if transformer == "local" else "local"
        other = trainer(alone, model=MODEL, dtype="bfloat16", transformer=changed, optimizer_states=states, seed=4)
        load_training_state(path, model=other.model, optimizer=other.optimizer, schedule=other.schedule)
        other.weights_changed()
        theirs = dict(export_hf(other.module, MODEL))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in export_hf(one.module, MODEL))
        after[transformer] = (first.grad_norm, one.update([batches], how).grad_norm, other.update([batches], how).grad_norm)
    (local, *seconds), (te, *others) = after["local"], after["te"]
    assert te == pytest.approx(local, rel=20 * ROUNDING), "gradients pass three layers, about ten rounded steps each"
    assert seconds[1] == pytest.approx(seconds[0], rel=20 * ROUNDING), "a lost moment or master weight would show"
    assert others[1] == pytest.approx(others[0], rel=20 * ROUNDING)


def tensor_rank(rank: int, folder: str) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.cuda.set_device(rank)
    shape = ParallelShape(world=2, tensor=2)
    init_groups(shape, rank=rank, init_method=f"file://{folder}/meet", timeout_s=120, seed=0, backend="nccl")
    within_budget(shape)
    destroy_groups()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_tensor_parallel_ranks_err_no_more_than_the_local_layers(tmp_path):
    mp.spawn(tensor_rank, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
