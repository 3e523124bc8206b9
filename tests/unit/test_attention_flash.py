"""How the flash backend calls flash-attn-4, on a CPU: a stand-in that keeps the library's documented conventions takes the kernels' place.

What the kernels compute is tests/gpu's business. Here: windows, alignment, packed tables, keys that belong to nobody, queries without keys.
"""

import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_gptoss.attention import flash, reference
from megatron_gptoss.attention.layout import Layout
from tests.unit.test_attention_exact import LAYOUTS, assert_same, cotangents, inputs


class Library:
    """`_flash_attn_fwd` and `_flash_attn_bwd` of flash_attn/cute/interface.py: a batch of one, or packed sequences with tables; causal and
    windows aligned at the last query and key; window bounds inclusive, without the token itself; lse [.., H, T]."""

    def __init__(self):
        self.deterministic = None

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, causal, learnable_sink, return_lse, **rest):
        assert return_lse and (learnable_sink is None or learnable_sink.dtype == torch.float32)
        sink = None if learnable_sink is None else learnable_sink.double()
        packed = q.ndim == 3
        q, k, v = (x if packed else x[0] for x in (q, k, v))
        out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan, dtype=q.dtype)
        for rows, columns, layout, window in self.sequences(q, k, causal, **rest):
            out[rows], part = reference.forward(q[rows], k[columns], v[columns], sink, layout, window, softmax_scale)
            lse[:, rows] = part.T
        return (out, lse, None, None, None) if packed else (out[None], lse[None], None, None, None)

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, dq, dk, dv, dlse, **rest):
        self.deterministic = deterministic
        assert lse.is_contiguous() and dout.is_contiguous() and (dlse is None or dlse.is_contiguous())
        packed = q.ndim == 3
        q, k, v, out, dout, lse, dlse, dq, dk, dv = (
            x if packed or x is None else x[0] for x in (q, k, v, out, dout, lse, dlse, dq, dk, dv)
        )
        dk.zero_(), dv.zero_()  # keys of a sequence without queries
        for rows, columns, layout, window in self.sequences(q, k, causal, **rest):
            of_lse = None if dlse is None else dlse.T[rows]
            known = (q[rows], k[columns], v[columns], None, out[rows], lse.T[rows], layout, window, softmax_scale, deterministic)
            dq[rows], dk[columns], dv[columns], _ = reference.backward(dout[rows], of_lse, *known)

    def sequences(
        self,
        q,
        k,
        causal,
        window_size_left=None,
        window_size_right=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=0,
        max_seqlen_k=0,
    ):
        assert window_size_left is None or (window_size_right == 0 and window_size_left < 2**31)
        if cu_seqlens_q is None:
            tables = [[0, len(q)], [0, len(k)]]
        else:
            assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
            tables = [cu_seqlens_q.tolist(), cu_seqlens_k.tolist()]
            assert [t[0] for t in tables] == [0, 0] and [t[-1] for t in tables] == [len(q), len(k)]
            assert [max_seqlen_q, max_seqlen_k] == [max(b - a for a, b in pairwise(t)) for t in tables]
        for (q0, q1), (k0, k1) in zip(*(pairwise(t) for t in tables), strict=True):
            if q1 > q0:
                assert not causal or k1 - k0 >= q1 - q0, "the kernels misread a query that sees no key"
                layout = Layout((0, q1 - q0), offset=k1 - k0 - (q1 - q0), causal=causal)
                yield slice(q0, q1), slice(k0, k1), layout, None if window_size_left is None else window_size_left + 1


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(flash, "_interface", lambda: library)

    def sink_gradient(dout, dlse, out, lse, sink):
        delta = (dout * out).sum(-1) - (0.0 if dlse is None else dlse)
        return reference.sink_gradient(sink, lse, delta)

    monkeypatch.setitem(sys.modules, "megatron_gptoss.attention.triton_backward", SimpleNamespace(sink_gradient=sink_gradient))
    return library


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 128, 2**40])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_out_as_the_reference(library, name, window, with_sinks):
    layout = LAYOUTS[name]
    q, k, v, sink = (x.detach() for x in inputs(layout.num_queries, layout.num_keys))
    sink = sink.float() if with_sinks else None
    dout, dlse = cotangents(q)
    found = []
    for backend in (flash, reference):
        out, lse = backend.forward(q, k, v, sink, layout, window, 0.25)
        known = (q, k, v, sink, out, lse.to(q.dtype), layout, window, 0.25, True)
        found.append((out, lse.to(q.dtype), *backend.backward(dout, dlse, *known), *backend.backward(dout, None, *known)))
    for place, (a, e) in enumerate(zip(*found, strict=True)):
        if e is None:
            assert a is None
        elif e.dtype == torch.float32:  # dsink, in its own dtype
            torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)
        else:
            assert_same(a, e, place)


def test_determinism_is_handed_on(library):
    q, k, v, sink = (x.detach() for x in inputs(4))
    out, lse = flash.forward(q, k, v, sink, Layout((0, 4)), None, 1.0)
    for deterministic in (True, False):
        flash.backward(out, None, q, k, v, sink, out, lse, Layout((0, 4)), None, 1.0, deterministic)
        assert library.deterministic == deterministic


def test_no_tokens_and_an_expanded_cotangent(library):
    q, k, v, sink = (x.detach() for x in inputs(0))
    layout = Layout((0, 0))
    out, lse = flash.forward(q, k, v, sink, layout, 128, 1.0)
    gradients = flash.backward(out, lse, q, k, v, sink, out, lse, layout, 128, 1.0, True)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, sink)]

    q, k, v, sink = (x.detach() for x in inputs(4))
    layout = Layout((0, 4))
    out, lse = flash.forward(q, k, v, sink, layout, None, 1.0)
    ones = torch.ones((), dtype=q.dtype).expand_as(out)  # what out.sum().backward() hands over
    dq, *_ = flash.backward(ones, None, q, k, v, sink, out, lse, layout, None, 1.0, True)
    assert_same(dq, reference.backward(ones, None, q, k, v, sink, out, lse, layout, None, 1.0, True)[0], "dq")


def test_a_sink_far_above_all_scores_has_all_the_weight(library, monkeypatch):
    """Upstream's exp(sink - highest score) is infinite from 88 nats on, and so is the log-sum-exp it gives."""
    q, k, v, sink = (x.detach() for x in inputs(4))
    sink[0] = 200.0
    plain = library._flash_attn_fwd

    def overflowing(*args, **kwargs):
        out, lse, *rest = plain(*args, **kwargs)
        lse[..., 0, :] = math.inf
        return (out, lse, *rest)

    monkeypatch.setattr(library, "_flash_attn_fwd", overflowing)
    out, lse = flash.forward(q, k, v, sink, Layout((0, 4)), None, 1.0)
    true_out, true_lse = reference.forward(q, k, v, sink, Layout((0, 4)), None, 1.0)
    assert_same(out, true_out, "out")
    torch.testing.assert_close(lse, true_lse.to(lse.dtype))
