"""The fused log-probs in bfloat16 on a GPU, against float64 on the same inputs, with GPT-OSS's vocabulary and hidden size.

    python3 -m pytest tests/gpu/test_logprob_gpu.py -q -p no:cacheprovider

Needs torch, triton and pytest.
"""

import pytest
import torch

from megatron_gptoss.logprob import tiles
from megatron_gptoss.logprob.api import selected_logprob

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

C, V = 2_880, 201_088


def inputs(n, vocabulary=V, spread=3.0, dtype=torch.bfloat16):
    """Logits of standard deviation `spread`; targets are drawn from the model, so that likely ones are among them."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_NC = torch.randn(n, C, generator=generator, device="cuda").to(dtype)
    weight_VC = (torch.randn(vocabulary, C, generator=generator, device="cuda") * (spread * C**-0.5)).to(dtype)
    target_N = torch.multinomial((hidden_NC @ weight_VC.t()).float().softmax(-1), 1, generator=generator).squeeze(1)
    return hidden_NC.requires_grad_(), weight_VC.requires_grad_(), target_N


def eager(hidden_NC, weight_VC, target_N, temperature):
    logit_NV = hidden_NC @ weight_VC.t()
    logp_NV = (logit_NV.to(torch.promote_types(logit_NV.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def with_gradients(outputs, leaves):
    mix_N = torch.linspace(-1, 2, len(outputs[0]), device="cuda", dtype=outputs[0].dtype)
    loss = (outputs[0] * mix_N).sum() + (outputs[1] * mix_N.flip(0)).sum()
    return [x.detach() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize(("n", "chunk", "temperature", "spread"), [(257, 64, 1.0, 3.0), (257, 1024, 0.7, 12.0), (40, 7, 1.0, 3.0)])
def test_errors_are_at_most_those_of_eager(n, chunk, temperature, spread):
    x = inputs(n, spread=spread)
    wide = [y.detach().double().requires_grad_() for y in x[:2]]
    exact = with_gradients(eager(*wide, x[2], temperature), wide)
    plain = with_gradients(eager(*x, temperature), x[:2])
    ours = with_gradients(selected_logprob(*x, temperature=temperature, chunk=chunk, backend="fused"), x[:2])
    for name, e, p, o in zip(("logp", "entropy", "dhidden", "dweight"), exact, plain, ours, strict=True):
        errors = [float((y.double() - e).norm() / e.norm()) for y in (o, p)]
        assert errors[0] <= (1.0 if name == "logp" else 1.1) * errors[1] + 1e-6, (name, errors)


@pytest.mark.parametrize("fewest", [1, 50_272, 10**9])
def test_every_way_of_cutting_agrees_in_float32(fewest, monkeypatch):
    """By vocabulary, by both, by tokens: sums of products in cuBLAS's float32, with tensor cores' short formats off."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(tiles.plan_tiles, "__defaults__", (fewest,))
    x = inputs(130, dtype=torch.float32)
    expected = with_gradients(eager(*x, 1.3), x[:2])
    ours = with_gradients(selected_logprob(*x, temperature=1.3, chunk=20, backend="fused"), x[:2])
    for name, e, o in zip(("logp", "entropy", "dhidden", "dweight"), expected, ours, strict=True):
        assert float((o - e).norm() / e.norm()) < 1e-5, name


@pytest.mark.parametrize("fewest", [1, 10**9])
def test_16_bit_sums_over_tiles_are_made_in_float32(fewest, monkeypatch):
    """100 tiles are as good as one. (Sums kept in bfloat16 would be an order of magnitude worse.)"""
    monkeypatch.setattr(tiles.plan_tiles, "__defaults__", (fewest,))
    x = inputs(200, vocabulary=25_600)
    wide = [y.detach().double().requires_grad_() for y in x[:2]]
    exact = with_gradients(eager(*wide, x[2], 1.0), wide)
    many, one = (with_gradients(selected_logprob(*x, chunk=chunk, backend="fused"), x[:2]) for chunk in (2, 200))
    for name, e, m, o in zip(("logp", "entropy", "dhidden", "dweight"), exact, many, one, strict=True):
        errors = [float((y.double() - e).norm() / e.norm()) for y in (m, o)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6, (name, errors)


def test_scoring_gives_the_bits_of_training_and_twice_the_same():
    x = inputs(300)
    first, second = (with_gradients(selected_logprob(*x, chunk=70, backend="fused"), x[:2]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        scored = selected_logprob(*x, chunk=70, backend="fused")
    assert all(torch.equal(a, b) for a, b in zip(first, scored, strict=False))


def test_memory_beyond_inputs_outputs_and_gradients():
    """The promise of api.py at 24,576 tokens: the buffer, [N, C] in float32, some numbers a token; with cuBLAS's workspace 2.5 GB."""
    n = 24_576
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_NC = torch.randn(n, C, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_VC = torch.randn(V, C, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target_N = torch.randint(0, V, (n,), generator=generator, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = with_gradients(selected_logprob(hidden_NC, weight_VC, target_N, backend="fused"), (hidden_NC, weight_VC))
    extra = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in results)
    assert extra <= 2.5e9
