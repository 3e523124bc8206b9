"""The grouped experts on a GPU in bfloat16: their error budget, bits, memory, and that the host never waits for them.

    python3 -m pytest tests/gpu/test_experts_gpu.py -q -p no:cacheprovider

Needs torch, triton and pytest. The budget: for the output and every gradient err(grouped) <= 2 * err(loop) + rounding, both against the
loop in float64 on the same bfloat16 inputs; as relative error of the norm and of the largest entry.
"""

import pytest
import torch

from megatron_gptoss.model import expert_grouped, expert_reference
from megatron_gptoss.model.rows import find_rows, from_experts, to_experts, weight_of_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, BF16, LIMIT = "cuda", torch.bfloat16, 7.0
NAMES = ("y", "x", "router", "w1", "b1", "w2", "b2")
MIB = 2**20


@pytest.fixture(autouse=True)
def can_run():
    assert expert_grouped.missing(torch.device(DEVICE), BF16, 2880, 2880) is None


def routing(T, E, K, empty=0, seed=0):
    """[T, E] bool, K true in a row, uneven; the first `empty` experts have no token."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E - empty, generator=g) + torch.randn(E - empty, generator=g)
    return torch.zeros(T, E, dtype=torch.bool).scatter(1, empty + logits.topk(K).indices, True).to(DEVICE)


def leaves_of(chosen, C, I, seed=0):
    """x, router weights (float32), w1, b1, w2, b2; pre-activations of size 4, so that both clamps bind for some."""
    T, E = chosen.shape
    g = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=g, device=DEVICE)).to(BF16).requires_grad_()

    router = torch.rand(T, E, generator=g, device=DEVICE) * chosen
    router = (router / router.sum(1, keepdim=True).clamp(min=1e-9)).requires_grad_()
    return (draw(T, C), router, draw(E, 2 * I, C, scale=3 * C**-0.5), draw(E, 2 * I, scale=3.0), draw(E, C, I, scale=I**-0.5), draw(E, C))


def layer(kind, leaves, chosen, K):
    """Tokens in, tokens out."""
    from megatron_gptoss.model import expert_kernels

    x, router, *parameters = leaves
    rows = find_rows(chosen, K)
    backend = expert_kernels if kind == "grouped" else expert_reference
    x_NC, weight_N, counts = to_experts(x, rows, backend), weight_of_rows(router, rows), chosen.sum(0)
    if kind == "grouped":
        y_NC = expert_grouped.experts(x_NC, weight_N, counts.cumsum(0).to(torch.int32), *parameters, LIMIT)
    else:
        y_NC = expert_reference.experts(x_NC, weight_N, counts.tolist(), *parameters, LIMIT)
    return from_experts(y_NC, rows, backend)


def with_gradients(kind, leaves, chosen, K):
    out = layer(kind, leaves, chosen, K)
    g = torch.Generator(DEVICE).manual_seed(5)
    cotangent = torch.randn(out.shape, generator=g, device=DEVICE, dtype=torch.float32).to(BF16).to(out.dtype)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, cotangent)), strict=True))


@pytest.mark.parametrize(
    ("T", "E", "K", "C", "I", "empty"),
    [(777, 8, 2, 320, 192, 0), (300, 5, 2, 72, 80, 2), (1, 32, 4, 256, 256, 0), (2000, 128, 4, 64, 64, 60), (900, 4, 1, 2880, 2880, 3)],
)
def test_errors_are_within_the_budget(T, E, K, C, I, empty):
    chosen = routing(T, E, K, empty)
    leaves = leaves_of(chosen, C, I)
    exact = with_gradients("loop", [x.detach().double().requires_grad_() for x in leaves], chosen, K)
    ours, eager = (with_gradients(kind, leaves, chosen, K) for kind in ("grouped", "loop"))
    eps = torch.finfo(BF16).eps
    for name, right in exact.items():
        assert torch.isfinite(ours[name]).all(), name
        (norm, largest), (their_norm, their_largest) = (
            (float((x[name].double() - right).norm()), float((x[name].double() - right).abs().max())) for x in (ours, eager)
        )
        assert norm <= 2 * their_norm + eps / 4 * float(right.norm()), (name, norm, their_norm)
        assert largest <= 2 * their_largest + eps / 2 * float(right.abs().max()), (name, largest, their_largest)


def test_no_tokens():
    chosen = torch.zeros(0, 8, dtype=torch.bool, device=DEVICE)
    leaves = leaves_of(chosen, 64, 64)
    found = with_gradients("grouped", leaves, chosen, 2)
    assert found["y"].shape == (0, 64) and not any(found[name].any() for name in ("w1", "b1", "w2", "b2"))


def test_the_same_bits_every_time():
    chosen = routing(8192, 32, 4)
    leaves = leaves_of(chosen, 512, 512)
    first = with_gradients("grouped", leaves, chosen, 4)
    for _ in range(5):
        again = with_gradients("grouped", leaves, chosen, 4)
        assert all(torch.equal(first[name], again[name]) for name in NAMES)


def test_the_host_never_waits():
    chosen = routing(4096, 32, 4)
    leaves = leaves_of(chosen, 512, 512)
    with_gradients("grouped", leaves, chosen, 4)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients("grouped", leaves, chosen, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_what_it_says():
    """Forward N (3 I + C) numbers at most, of which N (2 I + C) stay; backward N 4 I more and the gradients. 96 MiB for all else."""
    T, E, K, C, I = 8192, 32, 4, 1024, 1024
    chosen = routing(T, E, K)
    x, router, *parameters = leaves_of(chosen, C, I)
    rows = find_rows(chosen, K)
    x_NC = x.detach()[rows.token_N].requires_grad_()
    weight_N = weight_of_rows(router.detach(), rows).requires_grad_()
    offs, row = chosen.sum(0).cumsum(0).to(torch.int32), T * K * 2  # bytes of a column

    def run():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        out = expert_grouped.experts(x_NC, weight_N, offs, *parameters, LIMIT)
        peak_forward, kept = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
        dout = torch.ones_like(out)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(out, (x_NC, weight_N, *parameters), dout)
        return peak_forward, kept, torch.cuda.max_memory_allocated() - start, sum(g.nbytes for g in gradients)

    run()
    peak_forward, kept, peak_backward, gradients = run()
    assert peak_forward <= row * (3 * I + C) + 96 * MIB
    assert kept <= row * (2 * I + C) + 4 * MIB
    assert peak_backward <= row * 4 * I + gradients + 96 * MIB


def test_scoring_keeps_nothing_and_lets_go_early():
    """Without gradients h is gone before the output is made: N 3 I numbers at most, and the output stays."""
    T, E, K, C, I = 8192, 32, 4, 1024, 1024
    chosen = routing(T, E, K)
    x, router, *parameters = leaves_of(chosen, C, I)
    rows = find_rows(chosen, K)
    x_NC, weight_N = x.detach()[rows.token_N], weight_of_rows(router.detach(), rows)
    offs, row = chosen.sum(0).cumsum(0).to(torch.int32), T * K * 2
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            out = expert_grouped.experts(x_NC, weight_N, offs, *parameters, LIMIT)
            peak, kept = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
            del out
    assert peak <= row * max(3 * I, I + C) + 96 * MIB
    assert kept <= row * C + 4 * MIB
