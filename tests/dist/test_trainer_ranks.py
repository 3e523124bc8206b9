"""Two ranks of one trainer: a value that is not finite on one of them is refused by both, and both name the rank and its samples."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.training import samples, trainer


def two_ranks(rank: int, folder: str) -> None:
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from megatron_gptoss.trainer.how import Update

    torch.set_num_threads(1)
    shape = ParallelShape(world=2, expert=2)
    init_groups(shape, rank=rank, init_method=f"file://{folder}/meet", timeout_s=120, seed=0, backend="gloo")
    t = trainer(shape)
    mine = [replace(s, name=f"rank{rank}/{s.name}") for s in samples(4, seed=rank)]
    spoilt = [*mine[:3], replace(mine[3], advantage=float("nan"))] if rank == 1 else mine
    before = t.fingerprint()["weights"]
    how = Update(policy=RlConfig(), label="step-1")
    refused = t.update([[make_microbatch(spoilt[:2]), make_microbatch(spoilt[2:])]], how)
    unchanged = t.fingerprint()["weights"] == before
    fine = t.update([[make_microbatch(mine[:2]), make_microbatch(mine[2:])]], how)
    torch.save({"refused": refused, "unchanged": unchanged, "fine": fine}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    destroy_groups()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(two_ranks, (str(folder),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_the_fault_of_one_rank_is_refused_and_named_by_both(found):
    for rank in found:
        assert rank["refused"].skipped
        assert rank["unchanged"]
        assert "microbatch 1 of rank 1 (rank1/s2, rank1/s3)" in rank["refused"].problem
    assert not any(rank["fine"].skipped for rank in found)


def test_both_ranks_report_the_same_step(found):
    one, two = (rank["fine"] for rank in found)
    assert one == two
    assert one.num_tokens == sum(s.num_trained for seed in (0, 1) for s in samples(4, seed=seed))
