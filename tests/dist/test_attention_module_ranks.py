"""SinkAttention over two context-parallel ranks: contiguous shards of one stream together give what one rank gives for all of it, and their
gradients of the sinks add up to its gradient."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.unit.test_attention_module import SINKS, D, H, K, config, groups, random

T = 24
CASES = [(layer, layout) for layer in (1, 2) for layout in ("thd", "sbhd")]  # windowed and full


def tensors():
    """q, k, v and the output's gradient, for the whole stream."""
    return [2 * random(T, n, D, seed=n) for n in (H, K, K)] + [random(T, H * D, seed=9)]


def run(layer, layout, rows, world, context):
    """[out, dq, dk, dv, dsink] for the given rows of the stream."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_gptoss.attention.module import SinkAttention

    module = SinkAttention(config(context_parallel_size=context), layer, pg_collection=world)
    with torch.no_grad():
        module.softmax_offset.copy_(SINKS)
    *inputs, dout = (x[rows].clone() for x in tensors())
    inputs = [x.requires_grad_() for x in inputs]
    if layout == "thd":  # bounds are the whole stream's; the second sequence lies on both ranks
        cu = torch.tensor([0, 5, 19, T], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=14, max_seqlen_kv=14)
        out = module(*inputs, None, packed_seq_params=packed)
    else:
        out = module(*(x.unsqueeze(1) for x in inputs), None).squeeze(1)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in inputs), module.softmax_offset.grad]


def shard(rank: int, folder: str) -> None:
    from megatron_gptoss.model import cpu

    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meet", timeout=timedelta(seconds=120))
    world = SimpleNamespace(tp=groups().tp, cp=dist.group.WORLD)
    rows = slice(rank * T // 2, (rank + 1) * T // 2)
    torch.save({case: run(*case, rows, world, 2) for case in CASES}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(shard, (str(folder),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_contiguous_shards_equal_the_whole(one_rank, shards, case):
    whole = run(*case, slice(None), groups(), 1)
    for i in range(4):  # out, dq, dk, dv
        torch.testing.assert_close(torch.cat([s[case][i] for s in shards]), whole[i], atol=1e-12, rtol=1e-12)
    parts = [s[case][4] for s in shards]
    torch.testing.assert_close(sum(parts), whole[4], atol=1e-12, rtol=1e-12)
    assert not any(torch.allclose(part, whole[4]) for part in parts), "each is a part: a reduction that averages would be wrong"
