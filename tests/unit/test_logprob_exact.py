"""Laws of chunked log-probs and entropies in float64, for every backend that a CPU can run.

The file runs twice: with the backend `reference`, and once more in a process of its own with `fused`, whose kernels then run in Triton's
interpreter (TRITON_INTERPRET must be set before triton is imported).
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gptoss.errors import MachineError
from megatron_gptoss.logprob import tiles
from megatron_gptoss.logprob.api import selected_logprob

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKEND = "fused" if INTERPRETED else "reference"
only_outside = pytest.mark.skipif(INTERPRETED, reason="runs once, not once more in the interpreter's process")

F64 = torch.float64
N, C, V = 13, 6, 300


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Tiles and kernel blocks of a size that cuts a vocabulary of 300."""
    monkeypatch.setattr(tiles.plan_tiles, "__defaults__", (1,))
    if INTERPRETED:
        from megatron_gptoss.logprob import fused_kernels

        monkeypatch.setattr(fused_kernels, "BLOCK", 128)


def inputs(n=N, vocabulary=V, spread=1.0, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    hidden_NC = spread * torch.randn(n, C, generator=generator, dtype=F64)
    weight_VC = torch.randn(vocabulary, C, generator=generator, dtype=F64)
    target_N = torch.randint(0, vocabulary, (n,), generator=generator)
    return hidden_NC.to(dtype).requires_grad_(), weight_VC.to(dtype).requires_grad_(), target_N


def run(*arguments, **options):
    return selected_logprob(*arguments, backend=BACKEND, **options)


def plain(hidden_NC, weight_VC, target_N, temperature=1.0):
    """The definition, for autograd."""
    logp_NV = (hidden_NC @ weight_VC.t() / temperature).log_softmax(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def assert_same_gradients(ours, theirs, leaves):
    """Through the log-prob alone, the entropy alone, and both with different weights."""
    mix_N = torch.linspace(-1, 2, len(ours[0]), dtype=ours[0].dtype)
    for weights in ((mix_N, 0 * mix_N), (0 * mix_N, mix_N), (mix_N, mix_N.flip(0))):
        gradients = [
            torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), leaves, retain_graph=True)
            for outputs in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.7] if INTERPRETED else [1.0, 0.7])
@pytest.mark.parametrize("chunk", [5, 1024] if INTERPRETED else [1, 5, 13, 1024])
def test_values_and_gradients_equal_the_formula_for_every_chunk(chunk, temperature):
    x = inputs()
    ours, theirs = run(*x, temperature=temperature, chunk=chunk), plain(*x, temperature)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert_same_gradients(ours, theirs, x[:2])


@pytest.mark.parametrize(("chunk", "fewest", "shape"), [(4, 300, (4, 1)), (4, 150, (2, 3)), (4, 1, (1, 4))])
def test_cut_by_tokens_by_vocabulary_or_by_both(chunk, fewest, shape, monkeypatch):
    monkeypatch.setattr(tiles.plan_tiles, "__defaults__", (fewest,))
    plan = tiles.plan_tiles(N, V, chunk)
    assert (len(plan.rows), len(plan.columns)) == shape
    x = inputs()
    assert_same_gradients(run(*x, temperature=1.3, chunk=chunk), plain(*x, 1.3), x[:2])


def test_targets_at_the_borders_of_tiles_and_blocks(monkeypatch):
    """13 tokens in a buffer of 6: columns are cut at 44 (300 - 2 * 128) and 172; blocks of 64 columns begin at each."""
    if INTERPRETED:
        from megatron_gptoss.logprob import fused_kernels

        monkeypatch.setattr(fused_kernels, "BLOCK", 64)
    target_N = torch.tensor([0, 43, 44, 45, 107, 108, 171, 172, 173, 235, 236, 298, 299])
    plan = tiles.plan_tiles(N, V, 6)
    assert [c.start for c in plan.columns] == [0, 44, 172]
    hidden_NC, weight_VC, _ = inputs()
    ours, theirs = run(hidden_NC, weight_VC, target_N, chunk=6), plain(hidden_NC, weight_VC, target_N)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert_same_gradients(ours, theirs, (hidden_NC, weight_VC))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_huge_logits_lose_nothing_but_their_own_rounding(shift):
    """Logits of +-1e4 with a spread of hundreds: some log-probs are thousands below 0, some entropies nearly 0. A shift of all logits of a
    token changes nothing."""
    hidden_NC, weight_VC, target_N = inputs(spread=100.0)
    wide = torch.cat([hidden_NC, torch.ones(N, 1, dtype=F64)], 1)
    shifted = torch.cat([weight_VC, torch.full((V, 1), shift, dtype=F64)], 1)
    ours, theirs = run(wide, shifted, target_N, chunk=4), plain(wide, shifted, target_N)
    assert float(theirs[0].detach().min()) < -500
    assert all(bool(torch.isfinite(x).all()) for x in ours)
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-12)  # 1e4 has a last bit of 2e-12
    for a, e in zip(ours, theirs, strict=True):
        found = [torch.autograd.grad(x.sum(), (wide, shifted), retain_graph=True) for x in (a, e)]
        torch.testing.assert_close(*found, atol=1e-7, rtol=1e-9)  # entries are sums of terms of 1e4 times 1e2


def test_a_distribution_that_is_certain_has_neither_entropy_nor_gradient():
    hidden_NC = torch.ones(2, 1, dtype=F64, requires_grad=True)
    weight_VC = torch.tensor([[900.0], [0.0], [-900.0]], dtype=F64, requires_grad=True)
    logp, entropy = run(hidden_NC, weight_VC, torch.tensor([0, 2]), chunk=1)
    assert logp.tolist() == [0.0, -1800.0] and entropy.tolist() == [0.0, 0.0]
    (logp[0] + entropy.sum()).backward()
    assert not hidden_NC.grad.any() and not weight_VC.grad.any()


def test_equal_logits_give_uniform_entropy():
    logp, entropy = run(torch.zeros(3, C), torch.randn(V, C), torch.tensor([0, 1, 2]), chunk=2)
    torch.testing.assert_close(logp, torch.full((3,), -math.log(V)))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(V)))


def test_no_targets_give_zero_gradients_not_missing_ones():
    hidden_NC, weight_VC, target_N = inputs()
    logp, entropy = run(hidden_NC[:0], weight_VC, target_N[:0])
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert torch.equal(weight_VC.grad, torch.zeros_like(weight_VC))
    assert torch.equal(hidden_NC.grad, torch.zeros_like(hidden_NC))


@pytest.mark.parametrize("chunk", [4, 1024])
def test_scoring_gives_the_bits_of_training_and_a_second_backward_those_of_the_first(chunk):
    x = inputs()
    trained = run(*x, chunk=chunk)
    with torch.no_grad():
        scored = run(*x, chunk=chunk)
    assert all(torch.equal(a, b) for a, b in zip(trained, scored, strict=True))
    first, second = (torch.autograd.grad(trained[0].sum() + trained[1].sum(), x[:2], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@only_outside
@pytest.mark.parametrize("which", [0, 1])
def test_one_input_alone_may_be_trained(which):
    x = list(inputs())
    leaf = x[which]
    x[1 - which] = x[1 - which].detach()
    found = [torch.autograd.grad(f(*x)[0].sum(), leaf)[0] for f in (lambda *x: run(*x, chunk=5), plain)]
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


def test_views_equal_contiguous_inputs_and_inputs_are_never_written():
    hidden_NC, weight_VC, target_N = inputs()
    before = hidden_NC.detach().clone(), weight_VC.detach().clone()
    found = []
    for h, w in ((hidden_NC, weight_VC), (hidden_NC.t().contiguous().t(), weight_VC.t().contiguous().t())):
        outputs = run(h, w, target_N, chunk=5)
        found.append((*outputs, *torch.autograd.grad(outputs[0].sum(), (hidden_NC, weight_VC))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(before[0], hidden_NC) and torch.equal(before[1], weight_VC)


class Watch(TorchDispatchMode):
    """The most bytes that anything an operation returned holds, and how many matrix products had `n` rows and not C columns: logits."""

    def __init__(self, n, c):
        super().__init__()
        self.n, self.c, self.bytes, self.products = n, c, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size(), x.untyped_storage().nbytes())
                self.products += func is torch.ops.aten.mm.out and x.shape[0] == self.n and x.shape[1] != self.c
        return out


@pytest.mark.parametrize(("fewest", "rows"), [(1, 16), (10**9, 4)])
def test_never_more_than_a_chunk_of_logits_and_the_last_tile_is_not_computed_twice(fewest, rows, monkeypatch):
    monkeypatch.setattr(tiles.plan_tiles, "__defaults__", (fewest,))
    generator = torch.Generator().manual_seed(0)
    n, c, vocabulary, chunk = 16, 2, 512, 4
    hidden_NC = torch.randn(n, c, generator=generator, dtype=F64).requires_grad_()
    weight_VC = torch.randn(vocabulary, c, generator=generator, dtype=F64).requires_grad_()
    target_N = torch.randint(0, vocabulary, (n,), generator=generator)
    saved = []
    with Watch(rows, c) as forward, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        logp, entropy = run(hidden_NC, weight_VC, target_N, chunk=chunk)
    assert max(saved) <= vocabulary * c, "logits were kept for backward"
    with Watch(rows, c) as backward:
        (logp.sum() + entropy.sum()).backward()
    assert (forward.bytes, backward.bytes) == (chunk * vocabulary * 8, chunk * vocabulary * 8)
    assert (forward.products, backward.products) == (4, 3), "four tiles; backward finds the last one in the buffer"


def test_16_bit_inputs_give_float32_results_and_gradients_of_their_own_dtype():
    for dtype in (torch.bfloat16, torch.float16):
        x = inputs(dtype=dtype)
        outputs = run(*x, chunk=5)
        assert [y.dtype for y in outputs] == [torch.float32] * 2
        assert [g.dtype for g in torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), x[:2])] == [dtype] * 2


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_bfloat16_is_closer_to_float64_than_eager_bfloat16(spread):
    """Eager: a bfloat16 product, float32 log-softmax, autograd. Mean errors; log-probs gain, entropies and gradients lose nothing.

    (Triton's interpreter cuts off where a GPU rounds to bfloat16, so there the gradients have the usual twice the error of eager.)"""
    n = 40 if INTERPRETED else 200
    x = inputs(n=n, spread=spread, dtype=torch.bfloat16)
    exact = plain(x[0].double(), x[1].double(), x[2])
    logp_NV = (x[0] @ x[1].t()).float().log_softmax(-1)
    eager = logp_NV.gather(1, x[2][:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)
    ours = run(*x, chunk=n // 3)
    for name, limit, k in (("logp", 1.0, 0), ("entropy", 1.05, 1)):
        errors = [float((y[k].double() - exact[k]).detach().abs().mean()) for y in (ours, eager)]
        assert errors[0] <= limit * errors[1], (name, errors)
    mix_N = torch.linspace(-1, 1, n)
    true, mine, theirs = (torch.autograd.grad((y[0] * mix_N).sum() + y[1].sum(), x[:2], retain_graph=True) for y in (exact, ours, eager))
    for name, t, m, e in zip(("dhidden", "dweight"), true, mine, theirs, strict=True):
        errors = [float((g.double() - t.double()).norm()) for g in (m, e)]
        assert errors[0] <= (2.0 if INTERPRETED else 1.1) * errors[1], (name, errors)


@only_outside
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_VC": torch.zeros(V, C + 1)}, "do not fit"),
        ({"target_N": torch.zeros(4, dtype=torch.long)}, "do not fit"),
        ({"weight_VC": torch.zeros(V, C, dtype=torch.bfloat16)}, "a dtype"),
        ({"target_N": torch.tensor([0, 1, V])}, "from 0 to 300; the vocabulary has 300"),
        ({"target_N": torch.tensor([-1, 1, 2])}, "from -1 to 2"),
        ({"target_N": torch.zeros(3)}, "ids are integers"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"chunk": 0}, "chunk = 0"),
        ({"backend": "magic"}, "one of reference, fused"),
    ],
)
def test_contradicting_arguments_are_named(change, message):
    arguments = {"hidden_NC": torch.zeros(3, C), "weight_VC": torch.zeros(V, C), "target_N": torch.tensor([0, 1, 2]), **change}
    with pytest.raises(ValueError, match=message):
        selected_logprob(**arguments)


@only_outside
def test_fused_without_a_gpu_says_what_is_missing():
    with pytest.raises(MachineError, match=r"logprob backend 'fused' cannot run here: .*(CUDA GPU|triton is not installed)"):
        selected_logprob(*inputs(), backend="fused")


@only_outside
def test_every_law_holds_for_the_fused_kernels_in_their_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
