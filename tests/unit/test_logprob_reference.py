"""Chunked log-probs and entropies: equal to the plain formula, whatever the chunk, in values and gradients."""

import math

import pytest
import torch

from megatron_gptoss.logprob.reference import selected_logprob

N, C, V = 13, 6, 17


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden_NC = torch.randn(N, C, generator=generator, dtype=torch.float64).requires_grad_()
    weight_VC = torch.randn(V, C, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden_NC, weight_VC, torch.randint(0, V, (N,), generator=generator)


def by_hand(hidden_NC, weight_VC, target_N, temperature):
    logp, entropy = [], []
    for row, target in zip(hidden_NC, target_N, strict=True):
        p = (row @ weight_VC.t() / temperature).exp()
        p = p / p.sum()
        logp.append(p[target].log())
        entropy.append(-(p * p.log()).sum())
    return torch.stack(logp), torch.stack(entropy)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 13, 1024])
def test_values_and_gradients_equal_the_formula_for_every_chunk(chunk, temperature):
    hidden_NC, weight_VC, target_N = inputs()
    outputs = selected_logprob(hidden_NC, weight_VC, target_N, temperature=temperature, chunk=chunk)
    expected = by_hand(hidden_NC, weight_VC, target_N, temperature)
    mix_N = torch.linspace(-1, 2, N, dtype=torch.float64)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
        gradients = torch.autograd.grad((ours * mix_N).sum(), (hidden_NC, weight_VC), retain_graph=True)
        expected_gradients = torch.autograd.grad((theirs * mix_N).sum(), (hidden_NC, weight_VC), retain_graph=True)
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-12, rtol=1e-12)


def test_equal_logits_give_uniform_entropy():
    logp, entropy = selected_logprob(torch.zeros(3, C), torch.randn(V, C), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(logp, torch.full((3,), -math.log(V)))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(V)))


def test_no_targets_give_zero_gradients_not_missing_ones():
    hidden_NC, weight_VC, target_N = inputs()
    logp, entropy = selected_logprob(hidden_NC[:0], weight_VC, target_N[:0])
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert torch.equal(weight_VC.grad, torch.zeros_like(weight_VC))


def test_never_more_than_a_chunk_of_logits(monkeypatch):
    from megatron_gptoss.logprob import reference

    seen, one_chunk = [], reference._one_chunk

    def spy(hidden_NC, *rest):
        seen.append(len(hidden_NC))
        return one_chunk(hidden_NC, *rest)

    monkeypatch.setattr(reference, "_one_chunk", spy)
    hidden_NC, weight_VC, target_N = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        logp, _ = selected_logprob(hidden_NC, weight_VC, target_N, chunk=4)
    assert not [shape for shape in saved if shape[-1:] == (V,)], "logits were kept for backward"
    logp.sum().backward()
    assert seen == [4, 4, 4, 1, 1, 4, 4, 4], "each chunk once forward and once again, last first, backward"


def test_bfloat16_inputs_give_float32_results():
    hidden_NC, weight_VC, target_N = inputs()
    logp, entropy = selected_logprob(hidden_NC.bfloat16(), weight_VC.bfloat16(), target_N)
    assert logp.dtype == entropy.dtype == torch.float32


def test_contradicting_shapes_are_named():
    with pytest.raises(ValueError, match="do not fit"):
        selected_logprob(torch.zeros(3, C), torch.zeros(V, C + 1), torch.zeros(3, dtype=torch.long))
