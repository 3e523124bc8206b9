"""Laws of attention with sinks in float64, for every backend that a CPU can run.

The file runs twice: with the backend `reference`, and once more in a process of its own with `triton`, whose kernels then run in Triton's
interpreter (TRITON_INTERPRET must be set before triton is imported).
"""

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_gptoss.attention.api import attend, attend_layout, find_backend
from megatron_gptoss.attention.layout import Layout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKEND = "triton" if INTERPRETED else "reference"
only_outside = pytest.mark.skipif(INTERPRETED, reason="runs once, not once more in the interpreter's process")

F64 = torch.float64
T = 193 if INTERPRETED else 257  # no multiple of any tile; the interpreter is slow


def bounds_of(lengths):
    return tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())


PACKED = bounds_of([5, 1, 0, 130, T - 136])  # one token, none, longer than a window of 128 and shorter
LAYOUTS = {
    "dense": Layout((0, T)),
    "packed": Layout(PACKED),
    "halo": Layout((0, 90), offset=127),
    "halo begins late": Layout((0, 30, 30, 90), offset=127, first_key=100),
    "halo of an ended sequence": Layout((0, 0, 60), offset=127, first_key=90),
    "queries before all keys": Layout((0, 60, 150), offset=-70),
    "no keys": Layout((0, 5), offset=-5),
    "ring chunk": Layout((0, 70), offset=60, causal=False),
    "shorter ring chunk": Layout((0, 70), offset=-30, causal=False),
}


def inputs(queries, keys=None, H=4, K=2, D=16, seed=0, dtype=F64):
    """q, k, v and sinks from -6 to 6. Scores reach about 10, so the largest sinks take most of some softmaxes and the smallest nothing."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = [(queries, H, D), (keys, K, D), (keys, K, D)]
    q, k, v = (1.5 * torch.randn(shape, generator=generator, dtype=F64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, torch.linspace(-6, 6, H, dtype=F64))]


def cotangents(q, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(q.shape, generator=generator, dtype=F64), torch.randn(q.shape[:2], generator=generator, dtype=F64)


def visible(layout, window):
    """[T, U], from the words of Layout's docstring."""
    seen = torch.zeros(layout.num_queries, layout.num_keys, dtype=torch.bool)
    if not layout.causal:
        return ~seen
    for s, (begin, end) in enumerate(pairwise(layout.bounds)):
        first = layout.first_key if s == 0 else max(begin + layout.offset, 0)
        for i in range(begin, end):
            place = i + layout.offset
            if place >= 0:
                seen[i, max(first, 0 if window is None else place - window + 1) : place + 1] = True
    return seen


def eager(q_THD, k_UKD, v_UKD, sink_H, seen_TU, scale):
    """One softmax over the scores and a sink column, for autograd; also the scores, so that their gradient can be read."""
    group = q_THD.shape[1] // k_UKD.shape[1]
    k_UHD, v_UHD = (x.repeat_interleave(group, 1) for x in (k_UKD, v_UKD))
    score_HTU = scale * torch.einsum("thd,uhd->htu", q_THD, k_UHD)
    logit_HTU = score_HTU.masked_fill(~seen_TU, -1e300)  # -inf makes autograd answer NaN where a row sees nothing
    if sink_H is not None:
        logit_HTU = torch.cat([logit_HTU, sink_H[:, None, None].expand(-1, len(q_THD), 1)], -1)
    lse_HT = logit_HTU.logsumexp(-1)
    weight_HTU = (logit_HTU - lse_HT[..., None]).exp()[..., : len(k_UKD)].masked_fill(~seen_TU, 0.0)
    return torch.einsum("htu,uhd->thd", weight_HTU, v_UHD), lse_HT.T, score_HTU, weight_HTU


def run(q, k, v, sink, layout, window=None, scale=None, backend=BACKEND):
    return attend_layout(q, k, v, sink, layout, window=window, scale=scale, backend=find_backend(backend, q), deterministic=True)


def gradients(outputs, dout, dlse, of):
    """Of the two outputs in the inputs `of`; zeros where an input does not matter."""
    used, cotangent = zip(*((x, g) for x, g in zip(outputs, (dout, dlse), strict=True) if g is not None), strict=True)
    return torch.autograd.grad(used, of, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True)


def assert_same(actual, expected, name):
    """To 1e-12 of the largest entry, with -inf in the same places."""
    infinite = torch.isinf(expected)
    assert actual.shape == expected.shape, name
    assert torch.equal(actual[infinite], expected[infinite]), name
    if not infinite.all():
        error = float((actual - expected).detach()[~infinite].abs().max())
        assert error <= 1e-12 * max(1.0, float(expected.detach()[~infinite].abs().max())), (name, error)


def layouts_and_windows():
    """A ring's chunk has no window. In the slow interpreter each layout meets two windows, and each window several layouts."""
    windows = [1, 127, 128, 129, 160]
    for place, (name, layout) in enumerate(LAYOUTS.items()):
        yield name, None
        if layout.causal:
            few = (windows[place % 5], windows[(place + 2) % 5])
            yield from ((name, window) for window in (few if INTERPRETED else windows))


@pytest.mark.parametrize(("name", "window"), layouts_and_windows())
def test_outputs_and_gradients_equal_plain_autograd(name, window):
    layout = LAYOUTS[name]
    place = list(LAYOUTS).index(name)
    # 1, 2, 8 and 3 query heads per kv head; kernels need not take every head dim
    H, K, D = [(2, 2, 16), (4, 2, 16 if INTERPRETED else 24), (8, 1, 16), (3, 1, 32)][place % 4]
    q, k, v, sink = inputs(layout.num_queries, layout.num_keys, H, K, D, seed=place)
    dout, dlse = cotangents(q)
    expected = eager(q, k, v, sink, visible(layout, window), D**-0.5)[:2]
    actual = run(q, k, v, sink, layout, window)
    assert_same(actual[0], expected[0], "out")
    assert_same(actual[1], expected[1], "lse")
    rounds = [("out and lse", dout, dlse), ("out", dout, None)]
    for which, *cotangent in rounds if window in (None, 128) else rounds[:1]:
        found = (gradients(outputs, *cotangent, (q, k, v, sink)) for outputs in (actual, expected))
        for gradient, a, e in zip(("dq", "dk", "dv", "dsink"), *found, strict=True):
            assert_same(a, e, f"{gradient} through {which}")


@pytest.mark.parametrize("name", ["dense", "packed", "queries before all keys", "no keys"])
def test_without_a_sink_it_is_the_plain_softmax(name):
    layout = LAYOUTS[name]
    q, k, v, _ = inputs(layout.num_queries, layout.num_keys)
    dout, _ = cotangents(q)
    out, lse = run(q, k, v, None, layout, 128)
    seen = visible(layout, 128)
    expected_out, expected_lse, *_ = eager(q, k, v, None, seen, 0.25)
    blind = ~seen.any(-1)
    assert_same(out, expected_out, "out")
    assert_same(lse, expected_lse.masked_fill(blind[:, None], -math.inf), "lse")
    for a, e in zip(*(gradients((x, None), dout, None, (q, k, v)) for x in (out, expected_out)), strict=True):
        assert_same(a, e, "gradient")


@pytest.mark.parametrize(("bounds", "offset", "window"), [((0, 7), 0, None), ((0, 1, 1, 6), 3, 3), ((0, 6), -2, 2)])
def test_finite_differences_agree(bounds, offset, window):
    layout = Layout(bounds, offset)
    x = inputs(layout.num_queries, layout.num_keys, H=2, K=1, D=16 if INTERPRETED else 4)

    def flat(*x):
        # one tensor: gradcheck passes over an output that has lost its graph
        return torch.cat([y.flatten() for y in run(*x, layout, window)])

    assert torch.autograd.gradcheck(flat, x, fast_mode=INTERPRETED)


def test_the_sink_takes_what_the_scores_lose():
    """A softmax row's gradients sum to 0 over its scores and the sink, so dsink = -sum_ij dS_ij: a second road to it, without any formula.
    The formula that is often printed, -sum_i p_i (sum_j P_ij dS_ij), lands elsewhere: what belongs there is dP_ij."""
    q, k, v, sink = inputs(100)
    dout, _ = cotangents(q)
    expected_out, expected_lse, score_HTU, weight_HTU = eager(q, k, v, sink, visible(Layout((0, 100)), None), 0.25)
    (dscore_HTU,) = gradients((expected_out, expected_lse), dout, None, (score_HTU,))
    out, lse = run(q, k, v, sink, Layout((0, 100)))
    (dsink,) = gradients((out, lse), dout, None, (sink,))
    assert_same(dsink, -dscore_HTU.sum((1, 2)), "dsink")

    share_HT = (sink[:, None] - lse.T).exp()
    wrong = -(share_HT * (weight_HTU * dscore_HTU).sum(-1)).sum(-1)
    assert (wrong - dsink).abs().max() > 0.1 * dsink.abs().max()
    dweight_HTU = torch.einsum("thd,uhd->htu", dout, v.repeat_interleave(2, 1))
    right = -(share_HT * (weight_HTU * dweight_HTU).sum(-1)).sum(-1)
    assert_same(right, dsink, "dsink from dP")


def test_the_gradient_of_lse_is_the_share_of_each_logit():
    q, k, v, sink = inputs(60)
    _, lse = run(q, k, v, sink, Layout((0, 60)))
    dq, _, dv, dsink = gradients((None, lse), None, torch.ones_like(lse), (q, k, v, sink))
    assert_same(dsink, (sink - lse).exp().sum(0), "dsink")
    assert not dv.any()
    # scale * sum_j P_ij k_j is the attention output with keys for values
    assert_same(dq, 0.25 * run(q, k, k, sink, Layout((0, 60)))[0], "dq")


@pytest.mark.parametrize("window", [None, 3, 130])
def test_packed_equals_one_at_a_time(window):
    bounds = bounds_of([5, 1, 0, 40])
    q, k, v, sink = inputs(46)
    dout, dlse = cotangents(q)
    packed = attend(q, k, v, sink, cu_seqlens=torch.tensor(bounds), window=window, backend=BACKEND)
    whole = gradients(packed, dout, dlse, (q, k, v, sink))
    dsink = torch.zeros_like(sink)
    for begin, end in pairwise(sorted(set(bounds))):
        part = slice(begin, end)
        x = [y[part].detach().requires_grad_() for y in (q, k, v)]
        alone = attend(*x, sink, window=window, backend=BACKEND)
        dq, dk, dv, dsink_part = gradients(alone, dout[part], dlse[part], (*x, sink))
        dsink += dsink_part
        for a, e in zip((*packed, *whole[:3]), (*alone, dq, dk, dv), strict=True):
            assert_same(a[part], e, (begin, end))
    assert_same(whole[3], dsink, "dsink")


@pytest.mark.parametrize("window", [70, 71, 2**30])
def test_a_window_over_everything_is_no_window(window):
    q, k, v, sink = inputs(70)
    dout, dlse = cotangents(q)
    outputs = [run(q, k, v, sink, Layout((0, 70)), w) for w in (window, None)]
    for a, e in zip(*((*x, *gradients(x, dout, dlse, (q, k, v, sink))) for x in outputs), strict=True):
        assert_same(a, e, window)


def test_the_window_counts_the_token_itself():
    """Window 1 sees the token alone: O = v sigmoid(score - sink). A window of 128 sees the key 127 back and not the one 128 back."""
    q, k, v, sink = (x.detach() for x in inputs(200))
    out, lse = attend(q, k, v, sink, window=1, backend=BACKEND)
    score_TH = 0.25 * (q * k.repeat_interleave(2, 1)).sum(-1)
    assert_same(lse, torch.logaddexp(score_TH, sink), "lse")
    assert_same(out, v.repeat_interleave(2, 1) * torch.sigmoid(score_TH - sink)[..., None], "out")
    before, _ = attend(q, k, v, sink, window=128, backend=BACKEND)
    for distance, seen in [(127, True), (128, False)]:
        changed = v.clone()
        changed[190 - distance] += 1.0
        after, _ = attend(q, k, changed, sink, window=128, backend=BACKEND)
        assert bool((after[190] != before[190]).any()) == seen, distance


@pytest.mark.parametrize("window", [None, 128])
def test_views_of_a_fused_projection_equal_contiguous_inputs(window):
    H, K, D = 4, 2, 16
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(70, K, H // K + 2, D, generator=generator, dtype=F64, requires_grad=True)  # as Megatron lays it out

    def parts():
        q, k, v = qkv.split([H // K, 1, 1], 2)
        return q.flatten(1, 2), k.squeeze(2), v.squeeze(2)

    assert not parts()[1].is_contiguous()
    dout, dlse = cotangents(torch.empty(70, H, D))
    spread = torch.stack([dout, dout], -1)[..., 0]  # a cotangent whose last stride is not 1
    results = []
    for prepare, cotangent in [(lambda x: x, spread), (lambda x: x.contiguous(), dout)]:
        outputs = run(*(prepare(x) for x in parts()), inputs(1)[3].detach(), Layout((0, 30, 70)), window)
        results.append((*outputs, *gradients(outputs, cotangent, dlse.T.contiguous().T, (qkv,))))
    for a, e in zip(*results, strict=True):
        assert torch.equal(a, e)


def test_inputs_are_never_written():
    x = inputs(50)
    dout, dlse = cotangents(x[0])
    before = [y.detach().clone() for y in (*x, dout, dlse)]
    for layout in (Layout((0, 50)), Layout((0, 20, 50))):
        for window in (None, 16):
            outputs = run(*x, layout, window)
            gradients(outputs, dout, dlse, x)
    assert all(torch.equal(a, b) for a, b in zip(before, (*x, dout, dlse), strict=True))


def test_the_scale_multiplies_the_scores():
    q, k, v, sink = inputs(40)
    for a, e in zip(attend(q, k, v, sink, scale=0.7, backend=BACKEND), attend(q * (0.7 / 0.25), k, v, sink, backend=BACKEND), strict=True):
        assert_same(a, e, "scale")


@pytest.mark.parametrize("window", [None, 128])
def test_one_token(window):
    q, k, v, sink = inputs(1)
    out, lse = attend(q, k, v, sink, window=window, backend=BACKEND)
    score_TH = 0.25 * (q * k.repeat_interleave(2, 1)).sum(-1)
    assert_same(lse, torch.logaddexp(score_TH, sink[None]), "lse")
    assert_same(out, v.repeat_interleave(2, 1) * torch.sigmoid(score_TH - sink)[..., None], "out")


@pytest.mark.parametrize("window", [None, 128])
def test_no_tokens(window):
    q, k, v, sink = inputs(0)
    for cu_seqlens in (None, torch.tensor([0, 0]), torch.tensor([0, 0, 0])):
        outputs = attend(q, k, v, sink, cu_seqlens=cu_seqlens, window=window, backend=BACKEND)
        assert [x.shape for x in outputs] == [q.shape, q.shape[:2]]
        dsink = gradients(outputs, *(torch.ones_like(x) for x in outputs), (q, k, v, sink))[3]
        assert torch.equal(dsink, torch.zeros(4, dtype=F64))


def test_dtypes_of_outputs_and_gradients():
    """out, dq, dk, dv as their inputs, lse float32, dsink as the sink, whatever its own float type."""
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, _ = inputs(20, dtype=dtype)
        sink = torch.zeros(4, dtype=torch.float32 if dtype == torch.bfloat16 else torch.bfloat16, requires_grad=True)
        out, lse = attend(q, k, v, sink, backend=BACKEND)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert [x.dtype for x in gradients((out, lse), out, lse, (q, k, v, sink))] == [dtype] * 3 + [sink.dtype]


def test_deterministic_twice():
    x = inputs(70)
    dout, dlse = cotangents(x[0])
    first, second = ((*y, *gradients(y, dout, dlse, x)) for y in (run(*x, Layout((0, 30, 70)), 16) for _ in range(2)))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", ["dense", "packed", "halo"])
def test_several_tiles_in_a_row_are_the_same_tiles(layout, monkeypatch):
    """On a long stream one program of a windowed kernel does up to 16 tiles, the last ones perhaps past the end."""
    if not INTERPRETED:
        pytest.skip("the Triton kernels' matter")
    from megatron_gptoss.attention import triton_forward

    layout = LAYOUTS[layout]
    q, k, v, sink = inputs(layout.num_queries, layout.num_keys)
    dout, dlse = cotangents(q)
    one_by_one = run(q, k, v, sink, layout, 128)
    expected = gradients(one_by_one, dout, dlse, (q, k, v, sink))
    monkeypatch.setattr(triton_forward, "ENOUGH_PROGRAMS", 1)
    assert triton_forward.FORWARD_WINDOW.run_for(8) > 1
    in_a_row = run(q, k, v, sink, layout, 128)
    for actual, wanted in zip(in_a_row, one_by_one, strict=True):
        assert torch.equal(actual, wanted)
    for actual, wanted in zip(gradients(in_a_row, dout, dlse, (q, k, v)), expected[:3], strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("window", [None, 40])
def test_sinks_need_not_lie_side_by_side(window):
    q, k, v, sink = inputs(60)
    layout = Layout((0, 20, 60))
    strided = torch.stack([sink.detach(), torch.full_like(sink, 99.0)], 1)[:, 0].requires_grad_()
    dout, dlse = cotangents(q)
    outputs, expected = run(q, k, v, strided, layout, window), run(q, k, v, sink, layout, window)
    for actual, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(gradients(outputs, dout, dlse, (strided,))[0], gradients(expected, dout, dlse, (sink,))[0])


def test_autocast_changes_nothing():
    q, k, v, sink = inputs(60, dtype=torch.float32)
    layout, (dout, dlse) = Layout((0, 20, 60)), (x.float() for x in cotangents(inputs(60)[0]))
    plain = run(q, k, v, sink, layout, 16)
    expected = [*plain, *gradients(plain, dout, dlse, (q, k, v, sink))]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run(q, k, v, sink, layout, 16)
        found = [*outputs, *gradients(outputs, dout, dlse, (q, k, v, sink))]
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, wanted)


def test_inference_mode():
    """Its tensors count no versions; a call there must not spoil a later one outside."""
    q, k, v, sink = (x.detach() for x in inputs(20))
    cu_seqlens = torch.tensor([0, 7, 20])
    expected = attend(q, k, v, sink, cu_seqlens=cu_seqlens, window=5, backend=BACKEND)
    with torch.inference_mode():
        inside = attend(q, k, v, sink, cu_seqlens=torch.tensor([0, 7, 20]), window=5, backend=BACKEND)
    for actual, wanted in zip(inside, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_cotangents_of_any_strides():
    """The gradient of a sum over heads is expanded: its head stride is 0."""
    q, k, v, sink = inputs(40)
    layout = Layout((0, 40))
    out_THD, _ = run(q, k, v, sink, layout, 16)
    expected = torch.autograd.grad(out_THD, (q, k, v, sink), torch.ones_like(out_THD), retain_graph=True)
    for actual, wanted in zip(torch.autograd.grad(out_THD.sum(1).sum(), (q, k, v, sink)), expected, strict=True):
        assert torch.equal(actual, wanted)


@only_outside
def test_every_law_holds_for_the_triton_kernels_in_their_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@only_outside
def test_tritons_interpreter_still_needs_mending(tmp_path):
    """triton_backend._mend_interpreter lets a kernel's scalar be a loop bound. When this fails, Triton has mended it: drop ours."""
    program = tmp_path / "loop.py"
    program.write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def count(OUT, n):\n"
        "    total = 0\n"
        "    for i in tl.range(0, n):\n"
        "        total += i\n"
        "    tl.store(OUT, total)\n"
        "count[(1,)](torch.zeros(1, dtype=torch.int32), 4)\n"
    )
    done = subprocess.run([sys.executable, program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode != 0 and "TypeError" in done.stderr, done.stderr[-2000:]
