"""Every attention backend of this machine in bfloat16, against the float64 reference on the same bfloat16 inputs.

The budget: for the output and every gradient err(backend) <= 2 * err(eager) + rounding, where eager is a plain PyTorch softmax attention in
bfloat16; as relative error of the norm and of the largest entry. Sinks go from -6 to 6: with sinks of 0, one that ignores them may pass.

    python3 -m pytest tests/gpu -q -p no:cacheprovider          all of it; -k triton, -k flash, -k "window_128 and te"

Needs torch, triton and pytest; flash-attn-4, Transformer Engine and Megatron-Core where they are installed.
"""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from megatron_gptoss.attention.api import attend_layout, find_backend
from megatron_gptoss.attention.layout import Layout
from megatron_gptoss.errors import MachineError
from tests.unit.test_attention_exact import bounds_of, visible

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16
EPS = torch.finfo(BF16).eps  # between 1 and the next number: rounding is off by EPS / 2 at most and EPS / 4 or less in the mean
NAMES = ("out", "dq", "dk", "dv", "dsink")
PACKED = (311, 1, 290, 77, 640, 128, 5, 298, 550, 260, 300, 430)  # 300 in the mean, no multiple of a tile


@dataclass(frozen=True)
class Case:
    name: str
    bounds: tuple[int, ...]
    window: int | None = None
    H: int = 16
    K: int = 2
    D: int = 64
    offset: int = 0
    first_key: int = 0
    causal: bool = True
    sinks: bool = True
    through_lse: bool = False  # also a gradient through the log-sum-exp
    size: float = 1.0  # of q and k; scores have about its square
    flash: bool = True  # each new shape of problem costs flash-attn-4 some compilation
    te: bool = False

    @property
    def layout(self):
        return Layout(self.bounds, self.offset, self.first_key, self.causal, torch.device(DEVICE))


CASES = [
    Case("full", (0, 1024), H=64, K=8, te=True),
    Case("window_128", (0, 1024), 128, H=64, K=8, te=True),
    Case("full_odd", (0, 777), through_lse=True),
    Case("window_1", (0, 333), 1, H=8, K=1),
    Case("window_127", (0, 777), 127, H=8, K=1),
    Case("window_128_odd", (0, 777), 128, H=8, K=1, through_lse=True),
    Case("window_129", (0, 777), 129, H=8, K=1),
    Case("window_300", (0, 777), 300),
    Case("one_head_per_kv", (0, 500), H=8, K=8),
    Case("one_head_per_kv_window", (0, 500), 128, H=8, K=8, flash=False),
    Case("two_heads_per_kv", (0, 500), H=8, K=4, flash=False),
    Case("two_heads_per_kv_window", (0, 500), 128, H=8, K=4),
    Case("head_dim_128", (0, 600), D=128),
    Case("head_dim_128_window", (0, 600), 128, D=128, flash=False),
    Case("packed", bounds_of(PACKED)),
    Case("packed_window", bounds_of(PACKED), 128, through_lse=True),
    Case("packed_with_empty", bounds_of((40, 0, 1, 0, 300)), 128),
    Case("no_sinks", (0, 777), sinks=False),
    Case("no_sinks_packed_window", bounds_of(PACKED), 128, sinks=False, flash=False),
    Case("halo", (0, 90, 90, 600), 128, offset=127, first_key=40),
    Case("halo_of_one", (0, 600), 128, offset=127, first_key=40),
    Case("halo_of_an_ended_sequence", (0, 0, 300), 128, offset=127, first_key=90),
    Case("later_queries", (0, 300), offset=211),
    Case("queries_before_all_keys", (0, 500), offset=-200, through_lse=True),
    Case("ring_chunk", (0, 300), offset=211, causal=False),
    Case("shorter_ring_chunk", (0, 300), offset=-123, causal=False, flash=False),
    Case("strong_scores", (0, 512), size=3.0),
    # long enough that one program does several tiles, the last ones past the end
    Case("window_128_long", (0, 4300), 128, H=64, K=8),
    Case("window_128_long_packed", (0, 1000, 1001, 2500, 4300), 128, H=64, K=8, flash=False),
    Case("head_dim_128_one_head_per_kv_long", (0, 4300), 128, H=8, K=8, D=128, flash=False),
    Case("head_dim_32", (0, 600), 128, D=32, flash=False),
    Case("head_dim_16", (0, 600), D=16, flash=False),
]
BY_NAME = {case.name: case for case in CASES}


def runs(case, backend):
    return {"reference": True, "triton": True, "flash": case.flash, "te": case.te}[backend]


EVERY = [(case.name, backend) for case in CASES for backend in ("reference", "triton", "flash", "te") if runs(case, backend)]


def find(backend, q, deterministic=False):
    try:
        return find_backend(backend, q, deterministic=deterministic)
    except MachineError as error:
        pytest.skip(str(error))


@cache
def inputs(name):
    """q, k, v, sinks, dout, dlse; bfloat16 but for sinks and dlse, which are float32."""
    case = BY_NAME[name]
    generator = torch.Generator(DEVICE).manual_seed(len(name))
    layout = case.layout

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE)

    q, k = case.size * normal(layout.num_queries, case.H, case.D), case.size * normal(layout.num_keys, case.K, case.D)
    v, dout = normal(layout.num_keys, case.K, case.D), normal(layout.num_queries, case.H, case.D)
    sinks = torch.linspace(-6, 6, case.H, device=DEVICE) if case.sinks else None
    dlse = normal(layout.num_queries, case.H) if case.through_lse else None
    return *(x.to(BF16) for x in (q, k, v)), sinks, dout.to(BF16), dlse


def by_autograd(forward, name, dtype=None):
    """[out, lse, dq, dk, dv, dsink or None] of forward(q, k, v, sinks) -> (out, lse)."""
    q, k, v, sinks, dout, dlse = (None if x is None else x.clone().to(dtype or x.dtype) for x in inputs(name))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out, lse = forward(q, k, v, sinks)
    results, cotangents = ([out, lse], [dout, dlse]) if dlse is not None else ([out], [dout])
    gradients = torch.autograd.grad(results, leaves, cotangents)
    return [out.detach(), lse.detach(), *gradients] + [None] * (sinks is None)


def ours(name, backend, deterministic=False, dtype=None):
    case = BY_NAME[name]

    def forward(q, k, v, sinks):
        return attend_layout(
            q, k, v, sinks, case.layout, window=case.window, scale=None, backend=backend, deterministic=deterministic
        )  # fmt: skip

    return by_autograd(forward, name, dtype)


@cache
def exact(name):
    return ours(name, find_backend("reference", inputs(name)[0].double()), dtype=torch.float64)


@cache
def eager(name):
    """Softmax attention as one writes it down, in the dtype of its inputs."""
    case = BY_NAME[name]
    seen_TU = visible(case.layout, case.window if case.causal else None).to(DEVICE)

    def forward(q, k, v, sinks):
        k, v = (x.repeat_interleave(case.H // case.K, 1) for x in (k, v))
        logit_HTU = (torch.einsum("thd,uhd->htu", q, k) * case.D**-0.5).masked_fill(~seen_TU, float("-inf"))
        if sinks is not None:
            logit_HTU = torch.cat([logit_HTU, sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
        weight_HTU = logit_HTU.softmax(-1)[..., : len(k)]
        return torch.einsum("htu,uhd->thd", weight_HTU, v), logit_HTU.float().logsumexp(-1).T

    return by_autograd(forward, name)


def errors(found, true):
    """Relative error of the norm and of the largest entry, of each of NAMES."""
    for name, a, e in zip(NAMES, [found[0], *found[2:]], [true[0], *true[2:]], strict=True):
        if e is not None:
            difference = a.double() - e
            tiny = torch.finfo(torch.float64).tiny
            yield name, float(difference.norm() / (e.norm() + tiny)), float(difference.abs().max() / (e.abs().max() + tiny))


@pytest.mark.parametrize(("name", "backend"), EVERY, ids=[f"{name}-{backend}" for name, backend in EVERY])
def test_error_is_within_twice_that_of_eager(name, backend):
    found = ours(name, find(backend, inputs(name)[0]))
    true = exact(name)
    assert all(x is None or bool(torch.isfinite(x).all()) for x in found)
    assert float((found[1].double() - true[1]).abs().max()) < 1e-3  # bfloat16 products are exact in float32: only summation rounds
    missed = []
    for (which, norm, largest), (_, eager_norm, eager_largest) in zip(errors(found, true), errors(eager(name), true), strict=True):
        print(f"{name} {backend} {which}: {norm:.2e} (eager {eager_norm:.2e}), largest {largest:.2e} (eager {eager_largest:.2e})")
        if norm > 2 * eager_norm + EPS / 4 or largest > 2 * eager_largest + EPS / 2:
            missed.append((which, norm, eager_norm, largest, eager_largest))
    assert missed == []


@pytest.mark.parametrize("name", ["full", "window_128"])
def test_the_budget_would_catch_ignored_sinks(name):
    """A control: attention without the sinks, and gradients of it, are far outside what the test above allows."""
    case, (q, k, v, _, dout, _) = BY_NAME[name], inputs(name)
    without = find_backend("reference", q)
    out, lse = without.forward(q, k, v, None, case.layout, case.window, case.D**-0.5)
    dq, dk, dv, _ = without.backward(dout, None, q, k, v, None, out, lse, case.layout, case.window, case.D**-0.5, True)
    found = [out, lse, dq, dk, dv, torch.zeros(case.H, device=DEVICE)]
    for (which, norm, _), (_, eager_norm, _) in zip(errors(found, exact(name)), errors(eager(name), exact(name)), strict=True):
        assert norm > 5 * (2 * eager_norm + EPS / 4), (which, norm, eager_norm)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("backend", ["triton", "flash", "te"])
def test_scores_of_100_stay_finite(backend, window):
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, dout = (torch.randn(640, heads, 64, generator=generator, device=DEVICE) for heads in (16, 2, 2, 16))
    q, k = 5 * q, 5 * k  # q.k / 8 has a standard deviation of 25, so it reaches 100 both ways
    assert ((q[:, 0] @ k[:, 0].T) / 8).abs().max() > 100
    leaves = [*(x.to(BF16).requires_grad_() for x in (q, k, v)), torch.linspace(-100, 100, 16, device=DEVICE, requires_grad=True)]
    chosen = find(backend, leaves[0])
    out, lse = attend_layout(
        *leaves, Layout((0, 640), device=torch.device(DEVICE)), window=window, scale=None, backend=chosen, deterministic=False
    )
    gradients = torch.autograd.grad(out, leaves, dout.to(BF16))
    assert all(bool(torch.isfinite(x).all()) for x in (out, lse, *gradients))


@pytest.mark.parametrize("lengths", [(5000,), (2000, 1, 2999)], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_deterministic_means_the_same_bits(backend, window, lengths):
    """Long enough that blocks race for the same rows, heads enough to fill the GPU several times."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    T = sum(lengths)
    q, k, v, dout = (torch.randn(T, heads, 64, generator=generator, device=DEVICE).to(BF16) for heads in (64, 8, 8, 64))
    sinks, layout = torch.linspace(-6, 6, 64, device=DEVICE), Layout(bounds_of(lengths), device=torch.device(DEVICE))
    chosen = find(backend, q, deterministic=True)
    runs = []
    for _ in range(3):
        out, lse = chosen.forward(q, k, v, sinks, layout, window, 0.125)
        runs.append((out, lse, *chosen.backward(dout, None, q, k, v, sinks, out, lse, layout, window, 0.125, True)))
    for again in runs[1:]:
        assert [name for name, a, b in zip(("out", "lse", *NAMES[1:]), runs[0], again, strict=True) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("name", ["full_odd", "window_128_odd", "packed_window", "queries_before_all_keys"])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_inputs_are_never_written(backend, name):
    case, given = BY_NAME[name], inputs(name)
    before = [x.clone() for x in given]
    chosen = find(backend, given[0])
    q, k, v, sinks, dout, dlse = given
    out, lse = chosen.forward(q, k, v, sinks, case.layout, case.window, 0.125)
    kept = out.clone(), lse.clone()
    chosen.backward(dout, dlse, q, k, v, sinks, out, lse, case.layout, case.window, 0.125, False)
    assert all(torch.equal(a, b) for a, b in zip((*before, *kept), (*given, out, lse), strict=True))


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_views_of_a_fused_projection_equal_contiguous_inputs(backend, window):
    H, K, D, T = 16, 2, 64, 500
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv = torch.randn(T, K, H // K + 2, D, generator=generator, device=DEVICE).to(BF16)
    dout = torch.randn(T, H, D, generator=generator, device=DEVICE).to(BF16)
    views = [x.flatten(1, 2) for x in qkv.split([H // K, 1, 1], 2)]
    sinks, layout = torch.linspace(-6, 6, H, device=DEVICE), Layout((0, 200, T), device=torch.device(DEVICE))
    chosen = find(backend, qkv, deterministic=True)
    results = []
    for x in (views, [y.contiguous() for y in views]):
        out, lse = chosen.forward(*x, sinks, layout, window, 0.125)
        results.append((out, lse, *chosen.backward(dout, None, *x, sinks, out, lse, layout, window, 0.125, True)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("lengths", [(32768,), (16384, 16384)], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 128])
def test_our_kernels_hold_nothing_large(window, lengths):
    """Beside the outputs, forward needs nothing, and backward delta [T, H] in float32, a 32nd of dq, and partial sums for the sinks."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    T, H, K, D = sum(lengths), 64, 8, 64
    q, k, v, dout = (torch.randn(T, heads, D, generator=generator, device=DEVICE, dtype=BF16) for heads in (H, K, K, H))
    sinks, layout = torch.linspace(-6, 6, H, device=DEVICE), Layout(bounds_of(lengths), device=torch.device(DEVICE))
    chosen = find("triton", q)

    def extra_bytes(run):
        """What `run` held at its peak beyond its results."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results), results

    def forward():
        return chosen.forward(q, k, v, sinks, layout, window, 0.125)

    def backward():
        return chosen.backward(dout, None, q, k, v, sinks, *outputs, layout, window, 0.125, False)

    outputs = forward()  # also makes the layout's tables, which all layers share
    backward()
    forward_extra, outputs = extra_bytes(forward)
    backward_extra, _ = extra_bytes(backward)
    print(f"window {window}: extra bytes forward {forward_extra:,}, backward {backward_extra:,}")
    assert forward_extra < 2**20
    assert backward_extra < 2 * outputs[1].nbytes + 2**20


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_our_module_and_transformer_engines_take_each_others_parameters(backend, window):
    """SinkAttention beside TransformerEngine's DotProductAttention: state dicts both ways, and the same outputs within the budget."""
    pytest.importorskip("megatron.core")
    te = pytest.importorskip("transformer_engine.pytorch")
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gptoss.attention.module import AttentionOptions, SinkAttention

    s, b, H, K, D = 512, 2, 16, 2, 64
    find(backend, torch.empty(1, H, D, dtype=BF16, device=DEVICE))
    config = TransformerConfig(
        num_layers=1, hidden_size=H * D, num_attention_heads=H, num_query_groups=K, kv_channels=D, attention_dropout=0.0,
        softmax_type="learnable", window_size=None if window is None else (window - 1, 0), params_dtype=BF16,
    )  # fmt: skip
    config.sink_attention = AttentionOptions(backend=backend, backend_windowed=backend)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    mine = SinkAttention(config, 1, pg_collection=SimpleNamespace(tp=alone, cp=None)).to(DEVICE)  # pyright: ignore[reportArgumentType]
    theirs = te.DotProductAttention(
        H, D, num_gqa_groups=K, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal", softmax_type="learnable",
        window_size=(-1 if window is None else window - 1, 0),
    ).to(DEVICE)  # fmt: skip
    with torch.no_grad():
        theirs.softmax_offset.copy_(torch.linspace(-6, 6, H))
    mine.load_state_dict(theirs.state_dict())
    assert torch.equal(mine.softmax_offset.float(), theirs.softmax_offset.to(BF16).float())
    theirs.load_state_dict(mine.state_dict(), strict=False)  # theirs has _extra_state as well
    assert torch.equal(theirs.softmax_offset.float(), mine.softmax_offset.float())

    generator = torch.Generator(DEVICE).manual_seed(0)
    *given, dout = (torch.randn(s, b, n, D, generator=generator, device=DEVICE).to(BF16) for n in (H, K, K, H))

    def results(attention, sinks, dtype=BF16):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        out = attention(*leaves).view(s, b, H, D)
        return [out, *torch.autograd.grad(out, (*leaves, sinks), dout.to(dtype))]

    sinks = mine.softmax_offset.detach().double().requires_grad_()
    layout = Layout((0, s, 2 * s), device=torch.device(DEVICE))

    def in_float64(*sbhd):
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in sbhd)
        reference = find_backend("reference", q)
        out, _ = attend_layout(q, k, v, sinks, layout, window=window, scale=None, backend=reference, deterministic=True)
        return out.unflatten(0, (b, s)).transpose(0, 1).contiguous()

    found = results(mine, mine.softmax_offset), results(theirs, theirs.softmax_offset)
    for name, a, t, e in zip(NAMES, *found, results(in_float64, sinks, torch.float64), strict=True):
        e = e.detach()
        error, their_error = (float((x.detach().double() - e).norm() / e.norm()) for x in (a, t))
        print(f"{name}: ours {error:.2e}, Transformer Engine {their_error:.2e}")
        assert error <= 2 * their_error + EPS / 4, name
