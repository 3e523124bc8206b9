"""Attention with sinks against its definition, written out densely in float64."""

import math

import pytest
import torch

from megatron_gptoss.attention.api import attend
from tests.helpers.tiny_model import packed_batch

H, K, D = 4, 2, 16
SINK_H = torch.tensor([-6.0, -1.5, 2.0, 6.0], dtype=torch.float64)


def inputs(T, seed=0, dtype=torch.float64, dim=D):
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(T, heads, dim, generator=generator, dtype=torch.float64).to(dtype) for heads in (H, K, K)]


def dense(q_THD, k_TKD, v_TKD, sink_H, cu_seqlens, window):
    """One head, one query, one softmax over visible keys and the sink at a time."""
    out_THD, lse_TH = torch.zeros_like(q_THD), torch.zeros(q_THD.shape[:2], dtype=q_THD.dtype)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for t in range(begin, end):
            first = begin if window is None else max(begin, t - window + 1)
            for h in range(H):
                keys, values = k_TKD[first : t + 1, h // (H // K)], v_TKD[first : t + 1, h // (H // K)]
                scores = keys @ q_THD[t, h] / math.sqrt(D)
                logits = scores if sink_H is None else torch.cat([scores, sink_H[h : h + 1]])
                out_THD[t, h] = logits.softmax(0)[: len(scores)] @ values
                lse_TH[t, h] = logits.logsumexp(0)
    return out_THD, lse_TH


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("lengths", [[13], [7, 7, 7], [5, 7, 6], [1, 3, 17, 2, 9]])  # one, equal (no padding), one bucket, several
def test_equals_the_dense_definition(lengths, with_sinks, window):
    q, k, v = inputs(sum(lengths))
    cu_seqlens = packed_batch(lengths, 2, 0)[2]
    sinks = SINK_H if with_sinks else None
    out, lse = attend(q, k, v, sinks, cu_seqlens=cu_seqlens, window=window)
    expected_out, expected_lse = dense(q, k, v, sinks, cu_seqlens, window)
    torch.testing.assert_close(out, expected_out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def test_float32_stays_within_its_rounding_of_float64():
    q, k, v = inputs(40, dtype=torch.float32)
    out, lse = attend(q, k, v, SINK_H.float())
    exact_out, exact_lse = attend(q.double(), k.double(), v.double(), SINK_H)
    assert out.dtype == lse.dtype == torch.float32
    eps = torch.finfo(torch.float32).eps
    # scores reach about 30: their rounding is eps * 30, and it enters exp() as a relative error
    assert (out - exact_out).abs().max() < 100 * eps * v.abs().max()
    assert (lse - exact_lse).abs().max() < 100 * eps


def test_scores_far_from_zero_do_not_overflow():
    q, k, v = inputs(6)
    out, lse = attend(1e3 * q, 1e3 * k, v, SINK_H)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("bounds", [[0, 8], [0, 3, 7], [0, 1, 5, 8]])  # no padding, one bucket, two buckets
def test_gradients_in_all_inputs_through_both_outputs(bounds, window):
    q, k, v = (x.requires_grad_() for x in inputs(bounds[-1], dim=4))
    sinks = SINK_H.clone().requires_grad_()
    cu_seqlens = torch.tensor(bounds)

    def run(*x):
        # one tensor: gradcheck passes over an output that has lost its graph
        return torch.cat([y.flatten() for y in attend(*x, cu_seqlens=cu_seqlens, window=window)])

    assert torch.autograd.gradcheck(run, (q, k, v, sinks), fast_mode=False)


def test_sink_gradient_worked_by_hand():
    """O = sum_j exp(s_j - lse') v_j with lse' = log(sum_j exp(s_j) + exp(sink)), so dL/dsink = -sum_i exp(sink - lse'_i) (dO_i . O_i)."""
    q, k, v = inputs(9)
    sinks = SINK_H.clone().requires_grad_()
    out_THD, lse_TH = attend(q, k, v, sinks)
    dout_THD = torch.randn(out_THD.shape, generator=torch.Generator().manual_seed(5), dtype=out_THD.dtype)
    out_THD.backward(dout_THD)
    share_TH = torch.exp(SINK_H - lse_TH)
    expected_H = -(share_TH * (dout_THD * out_THD).sum(-1)).sum(0).detach()
    torch.testing.assert_close(sinks.grad, expected_H, atol=1e-12, rtol=1e-12)


def test_a_sink_far_below_the_scores_is_no_sink_and_far_above_takes_everything():
    q, k, v = inputs(9)
    without, _ = attend(q, k, v, None)
    torch.testing.assert_close(attend(q, k, v, torch.full((H,), -80.0, dtype=q.dtype))[0], without, atol=1e-12, rtol=0)
    assert attend(q, k, v, torch.full((H,), 90.0, dtype=q.dtype))[0].abs().max() < 1e-12


def test_a_key_exactly_window_back_is_invisible_and_the_next_one_visible():
    q, k, v = inputs(20)
    window, query = 6, 15
    before, _ = attend(q, k, v, SINK_H, window=window)
    for distance, visible in [(window, False), (window - 1, True), (0, True), (-1, False)]:
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[query - distance] += 1
        changed_v[query - distance] += 1
        after, _ = attend(q, changed_k, changed_v, SINK_H, window=window)
        assert (not torch.equal(after[query], before[query])) == visible, distance
