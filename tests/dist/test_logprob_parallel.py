"""A vocabulary divided over two ranks gives one rank's log-probs, entropies and gradients, in float64 to 1e-12, with two collectives.

One spawn for all cases: imports take long.
"""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.logprob import tiles
from megatron_gptoss.logprob.api import selected_logprob

N, C, V = 14, 6, 300  # rank 1 holds ids from 150 on


@dataclass(frozen=True)
class Case:
    temperature: float = 1.0
    chunk: int = 5
    targets: str = "borders"
    spread: float = 1.0
    region: str = "copy"  # which of Megatron's regions stands before the head: copy, or the gather of sequence parallelism

    @property
    def target_N(self):
        ids = {
            "borders": [0, 1, 148, 149, 150, 151, 298, 299, 149, 150, 0, 299, 75, 225],
            "all on one rank": [150 + i for i in range(N)],
            "none": [],
        }
        return torch.tensor(ids[self.targets], dtype=torch.long)


CASES = [
    Case(),
    Case(temperature=0.7, chunk=1, region="gather"),
    Case(temperature=1.3, chunk=1000, targets="all on one rank"),
    Case(spread=50.0, chunk=3, region="gather"),
    Case(targets="none"),
]


def inputs(case):
    generator = torch.Generator().manual_seed(0)
    n = len(case.target_N)
    hidden_NC = case.spread * torch.randn(N, C, generator=generator, dtype=torch.float64)[:n]
    return hidden_NC.requires_grad_(), torch.randn(V, C, generator=generator, dtype=torch.float64).requires_grad_(), case.target_N


def loss_of(logp_N, entropy_N):
    mix_N = torch.linspace(-1, 2, len(logp_N), dtype=logp_N.dtype)
    return (logp_N * mix_N).sum() + (entropy_N * mix_N.flip(0)).sum()


def two_ranks(rank: int, folder: str) -> None:
    from megatron_gptoss.model import cpu

    cpu.install()
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

    torch.set_num_threads(1)
    tiles.plan_tiles.__defaults__ = (1,)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    group = dist.group.WORLD
    calls, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append(tuple(tensor.shape))
        return all_reduce(tensor, *args, **kwargs)

    found = []
    for case in CASES:
        hidden_NC, weight_VC, target_N = inputs(case)
        leaf = hidden_NC.detach()
        if case.region == "gather":  # this rank's tokens
            leaf = leaf[rank * N // 2 : (rank + 1) * N // 2].clone().requires_grad_()
            whole_NC = gather_from_sequence_parallel_region(leaf, group=group)
        else:
            leaf.requires_grad_()
            whole_NC = copy_to_tensor_model_parallel_region(leaf, group=group)
        own_VC = weight_VC.detach().chunk(2)[rank].clone().requires_grad_()
        dist.all_reduce = counting
        outputs = selected_logprob(whole_NC, own_VC, target_N, temperature=case.temperature, chunk=case.chunk, group=group)
        dist.all_reduce = all_reduce
        counted, calls[:] = list(calls), []
        loss_of(*outputs).backward()
        found.append({"outputs": [x.detach() for x in outputs], "dhidden": leaf.grad, "dweight": own_VC.grad, "collectives": counted})
    try:
        selected_logprob(*inputs(CASES[0])[:2], torch.full((N,), 2 * V), group=group)  # the whole vocabulary is now 2 V
    except ValueError as error:
        found.append(str(error))
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    mp.spawn(two_ranks, (str(folder),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_ranks_equal_one(found, number):
    case = CASES[number]
    hidden_NC, weight_VC, target_N = inputs(case)
    outputs = selected_logprob(hidden_NC, weight_VC, target_N, temperature=case.temperature)
    loss_of(*outputs).backward()
    close = {"atol": 1e-12 * case.spread, "rtol": 1e-12}
    for rank in found:
        torch.testing.assert_close(rank[number]["outputs"], list(outputs), **close)
    dweight = torch.cat([rank[number]["dweight"] for rank in found])
    torch.testing.assert_close(dweight, weight_VC.grad, **close)
    parts = [rank[number]["dhidden"] for rank in found]
    if case.region == "gather":
        torch.testing.assert_close(torch.cat(parts), hidden_NC.grad, **close)
    else:
        for part in parts:
            torch.testing.assert_close(part, hidden_NC.grad, **close)
    assert all(torch.equal(*pair) for pair in zip(*(rank[number]["outputs"] for rank in found), strict=True)), "ranks differ in bits"


def test_two_collectives_however_many_tiles(found):
    assert [rank[0]["collectives"] for rank in found] == [[(N,), (3, N)]] * 2


def test_ids_beyond_the_whole_vocabulary_are_refused(found):
    assert [rank[-1] for rank in found] == ["target ids run from 600 to 600; the vocabulary has 600"] * 2
