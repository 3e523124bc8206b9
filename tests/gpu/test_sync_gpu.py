"""The digest's kernel against its twin, on a real GPU. tools/bench_sync.py has the rest: there trainer and engine are real too."""

from __future__ import annotations

import pytest
import torch

from megatron_gptoss.sync.verify import weighted_sum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("words", [0, 1, 4095, 4096, 4097, 65536 * 3 + 5, 2**27 + 1])
def test_the_kernel_sums_what_its_twin_sums(words: int) -> None:
    from megatron_gptoss.sync.digest_kernel import add_weighted_sum

    g = torch.Generator("cuda").manual_seed(words)
    data = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device="cuda", generator=g)
    into = torch.full((3,), 11, dtype=torch.int64, device="cuda")
    add_weighted_sum(data, into[1])
    assert torch.equal(into, torch.stack([into[0], weighted_sum(data) + 11, into[0]])) and into[0] == 11


def test_the_kernel_reads_memory_at_half_of_its_speed_at_least() -> None:
    from megatron_gptoss.sync.digest_kernel import add_weighted_sum

    data, into = torch.zeros(2**28, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    add_weighted_sum(data, into)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        add_weighted_sum(data, into)
    end.record()
    torch.cuda.synchronize()
    gib_per_s = 10 / (start.elapsed_time(end) / 1000)
    print(f"{gib_per_s:.0f} GiB/s")
    assert gib_per_s > 100  # generous: an H200 reads 20 times as much
