"""Dividing the experts over two ranks changes nothing: losses, gradients, exported weights. One spawn: imports take long."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.checkpoint.weight_map import export_hf
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.tiny_model import TINY, our_model, packed_batch, strong_tensors

LENGTHS = ([12, 9], [5, 14, 8])  # of each rank's pack: different token counts, so that a mean of means would show
NUM_TOKENS = sum(map(sum, LENGTHS)) - len(LENGTHS)


def loss_of_pack(model, which: int) -> torch.Tensor:
    """Summed next-token loss of one of the two packs."""
    from megatron_gptoss.logprob.reference import selected_logprob
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens, positions, cu_seqlens = packed_batch(LENGTHS[which], TINY.vocab_size, seed=which)

    def head(hidden_TC, weight_VC):
        return selected_logprob(hidden_TC[:-1], weight_VC, tokens[0, 1:])[0]

    packed = packed_params(cu_seqlens, max(LENGTHS[which]))
    return -model(input_ids=tokens, position_ids=positions, packed_seq_params=packed, head=head).sum()


def two_ranks(rank: int, folder: str) -> None:
    """Expert parallel size 2: each rank has its pack and half of the experts. Rank 0 leaves what was found in `folder`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_gptoss.parallel.groups import destroy_groups, init_groups

    torch.set_num_threads(1)
    shape = ParallelShape(world=2, expert=2)
    init_groups(shape, rank=rank, init_method=f"file://{folder}/meet", timeout_s=120, seed=0, backend="gloo")
    model = our_model(TINY, shape, dict(strong_tensors(TINY, 1)))
    exported = {name: tensor.clone() for name, tensor in export_hf(model, TINY)}

    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    wrapped.zero_grad_buffer()
    loss = loss_of_pack(wrapped, rank)
    (loss / NUM_TOKENS).backward()
    # What it is told of tokens it leaves alone: the trainer divides the loss by those of all ranks.
    model.config.finalize_model_grads_func([wrapped], torch.tensor(sum(LENGTHS[rank]) - 1))

    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = dict(export_hf(wrapped, TINY, value=whole_gradient(wrapped)))
    if rank == 0:
        torch.save({"exported": exported, "loss": total, "gradients": gradients}, f"{folder}/found.pt")
    dist.barrier()
    destroy_groups()


def whole_gradient(wrapped):
    """A parameter's gradient after DDP's reduce-scatter, of which each data-parallel rank holds a part of the buffer."""
    from megatron.core import parallel_state

    for buffer in wrapped.buffers:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return lambda p: p.main_grad


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(two_ranks, args=(str(folder),), nprocs=2)
    return torch.load(folder / "found.pt")


@pytest.fixture(scope="module")
def expected(one_rank):
    """The same two packs, one after the other, on one rank with all experts."""
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    loss = loss_of_pack(model, 0) + loss_of_pack(model, 1)
    loss.backward()
    return loss.detach(), {name: g / NUM_TOKENS for name, g in export_hf(model, TINY, value=lambda p: p.grad)}


def test_export_gathers_every_expert_bit_equal(found):
    tensors = dict(strong_tensors(TINY, 1))
    assert list(found["exported"]) == list(tensors)
    assert all(torch.equal(found["exported"][name], tensors[name]) for name in tensors)


def test_loss_equals_one_rank(found, expected):
    torch.testing.assert_close(found["loss"], expected[0], rtol=1e-5, atol=0)


def test_every_gradient_per_token_equals_one_rank(found, expected):
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        worst = (found["gradients"][name] - gradient).abs().max() / gradient.abs().max()
        assert worst < 1e-5, f"{name}: {worst:.1e} of its largest entry"
