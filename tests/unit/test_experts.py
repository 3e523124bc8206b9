"""Laws of the experts in float64: the loop against Hugging Face's experts, the kernels and their gradients against the loop.

The file runs twice: here, and once more in a process of its own in which the kernels run in Triton's interpreter (TRITON_INTERPRET must be
set before triton is imported).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gptoss.model import expert_grouped, expert_reference
from megatron_gptoss.model.rows import find_rows, from_experts, to_experts, weight_of_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_outside = pytest.mark.skipif(INTERPRETED, reason="runs once, not once more in the interpreter's process")
only_kernels = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")

F64 = torch.float64
LIMIT = 7.0
C, I = 72, 80  # no multiple of any tile
NAMES = ("x", "weight", "w1", "b1", "w2", "b2")

# Rows of each expert: tiles have 16 or 64 rows.
COUNTS = {
    "uneven": [70, 0, 1, 130, 0],
    "whole tiles": [64, 128],
    "first and last empty": [0, 65, 63, 0],
    "all to one": [0, 0, 150],
    "one expert": [17],
    "one row each": [1] * 9,
    "no rows": [0, 0, 0],
}


@pytest.fixture(scope="module", autouse=True)
def mended():
    if INTERPRETED:
        assert expert_grouped.missing(torch.device("cpu"), F64, C, I) is None


@pytest.fixture
def products_in_float64(monkeypatch):
    """torch's grouped_mm has no float64."""
    monkeypatch.setattr(expert_grouped, "grouped_mm", looped_mm)


def looped_mm(a, b, offs):
    ends = offs.tolist()
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 3:
        return torch.cat([a[i:j] @ b[e] for e, (i, j) in enumerate(pieces)])
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in pieces])


def inputs(counts, dtype=F64, seed=0):
    """x, weight, w1, b1, w2, b2: pre-activations of size 4, so that both clamps bind for some."""
    g = torch.Generator().manual_seed(seed)
    N, E = sum(counts), len(counts)
    shapes = [(N, C), (N,), (E, 2 * I, C), (E, 2 * I), (E, C, I), (E, C)]
    sizes = [1, 1, 0.3, 3, 0.3, 1]
    return [(s * torch.randn(shape, generator=g, dtype=F64)).to(dtype).requires_grad_() for s, shape in zip(sizes, shapes, strict=True)]


def loop(leaves, counts):
    return expert_reference.experts(*leaves[:2], counts, *leaves[2:], LIMIT)


def grouped(leaves, counts):
    return expert_grouped.experts(*leaves[:2], torch.tensor(counts).cumsum(0).to(torch.int32), *leaves[2:], LIMIT)


def with_gradients(compute, leaves, counts, seed=1):
    """Output and gradients, by name."""
    out = compute(leaves, counts)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(out.dtype)
    return {"y": out.detach(), **dict(zip(NAMES, torch.autograd.grad(out, leaves, cotangent), strict=True))}


def assert_same(actual, expected, name):
    """To 1e-12 of the largest entry."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    if expected.numel():
        error = float((actual - expected).abs().max())
        assert error <= 1e-12 * max(1.0, float(expected.abs().max())), (name, error)


@only_outside
def test_the_loop_computes_hugging_faces_experts():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    E, T, K = 5, 40, 2
    config = GptOssConfig(hidden_size=C, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config).double()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_((3.0 if name == "gate_up_proj_bias" else 0.3) * torch.randn(p.shape, generator=g, dtype=F64))
    x = torch.randn(T, C, generator=g, dtype=F64, requires_grad=True)
    weight, chosen = torch.rand(T, E, generator=g, dtype=F64).topk(K)
    full = torch.zeros(T, E, dtype=F64).scatter(1, chosen, weight).requires_grad_()
    expected = theirs(x, router_indices=chosen, routing_weights=full.gather(1, chosen)).view(T, C)

    rows = find_rows(full > 0, K)
    interleaved = theirs.gate_up_proj.detach().mT, theirs.gate_up_proj_bias.detach()
    w1, b1 = (torch.cat([p[:, 0::2], p[:, 1::2]], 1).contiguous() for p in interleaved)
    counts = (full > 0).sum(0).tolist()
    y = expert_reference.experts(
        to_experts(x, rows, expert_reference), weight_of_rows(full, rows), counts, w1, b1,
        theirs.down_proj.detach().mT.contiguous(), theirs.down_proj_bias.detach(), LIMIT,
    )  # fmt: skip
    ours = from_experts(y, rows, expert_reference)
    assert_same(ours.detach(), expected.detach(), "output")
    cotangent = torch.randn(T, C, generator=g, dtype=F64)
    for name, a, b in zip(("x", "weight"), *(torch.autograd.grad(o, (x, full), cotangent) for o in (ours, expected)), strict=True):
        assert_same(a, b, name)


@only_outside
def test_activation_worked_by_hand():
    """gate 8 is 7; up -9 is -7; up 9 is 7; a far negative gate gives nothing, whatever up is."""
    h = torch.tensor([[8.0, 1.0, -1000.0, -9.0, 8.0, 3.0]], dtype=F64)  # gates, then ups
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0], dtype=F64)
    out = expert_reference.activate(h, bias, torch.tensor([2.0], dtype=F64), LIMIT)
    sigmoid = torch.tensor([1.702 * 7, 1.702], dtype=F64).sigmoid()
    assert_same(out, torch.tensor([[2 * 7 * sigmoid[0] * -6, 2 * sigmoid[1] * 8, 0.0]], dtype=F64), "out")


@only_kernels
@pytest.mark.parametrize("case", COUNTS)
def test_outputs_and_gradients_of_the_kernels_equal_the_loop(case, products_in_float64):
    counts = COUNTS[case]
    leaves = inputs(counts)
    ours, exact = with_gradients(grouped, leaves, counts), with_gradients(loop, leaves, counts)
    for name in exact:
        assert_same(ours[name], exact[name], name)
    for e, count in enumerate(counts):
        if count == 0:
            assert all(not ours[name][e].any() for name in ("w1", "b1", "w2", "b2")), "a gradient for an expert without rows"


@only_kernels
def test_experts_without_rows_have_no_gradient_whatever_the_product_leaves_there(monkeypatch):
    def leaving_garbage(a, b, offs):
        out = looped_mm(a, b, offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(expert_grouped, "grouped_mm", leaving_garbage)
    counts = [0, 5, 0, 2, 0]
    leaves = inputs(counts)
    ours, exact = with_gradients(grouped, leaves, counts), with_gradients(loop, leaves, counts)
    for name in exact:
        assert_same(ours[name], exact[name], name)


@only_kernels
def test_gradients_at_the_clamps_are_those_of_torch_clamp():
    """Just inside, at, and just outside both limits, of both halves; and far out, where the sigmoid under- and overflows."""
    from megatron_gptoss.model import expert_kernels

    edge = torch.tensor([7.0, -7.0, 0.0, 1e4, -1e4], dtype=F64)
    values = torch.cat([edge, torch.nextafter(edge, edge + 1), torch.nextafter(edge, edge - 1)])
    gate, up = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    h = torch.stack([gate, up], 1).requires_grad_()  # one column: I = 1
    weight = torch.linspace(-2, 2, len(h), dtype=F64).requires_grad_()
    bias = torch.zeros(1, 2, dtype=F64).requires_grad_()
    offs = torch.tensor([len(h)], dtype=torch.int32)
    exact = expert_reference.activate(h, bias[0], weight, LIMIT)
    dout = torch.linspace(1, 2, len(h), dtype=F64).unsqueeze(1)
    dh, dbias, dweight = torch.autograd.grad(exact, (h, bias, weight), dout)
    assert_same(expert_kernels.activate(h.detach(), bias.detach(), weight.detach(), offs, LIMIT), exact.detach(), "forward")
    found = expert_kernels.activate_backward(dout, h.detach(), bias.detach(), weight.detach(), offs, LIMIT)
    for name, a, b in zip(("out", "dh", "dbias", "dweight"), found, (exact.detach(), dh, dbias, dweight), strict=True):
        assert torch.isfinite(a).all()
        assert_same(a, b, name)


@only_kernels
@pytest.mark.parametrize(("case", "dtype"), [("uneven", torch.bfloat16), ("one expert", torch.float32), ("no rows", torch.bfloat16)])
def test_low_precision_errs_no_more_than_twice_the_loop_in_the_same_dtype(case, dtype):
    """With torch's own grouped_mm. Both against float64 on the same rounded inputs; and one rounding of the largest entry."""
    counts = COUNTS[case]
    leaves = inputs(counts, dtype)
    leaves[1] = leaves[1].detach().float().requires_grad_()  # router weights are float32
    exact = with_gradients(loop, [x.detach().double().requires_grad_() for x in leaves], counts)
    ours, eager = with_gradients(grouped, leaves, counts), with_gradients(loop, leaves, counts)
    for name, right in exact.items():
        assert ours[name].dtype == eager[name].dtype
        if right.numel():
            err, budget = ((found[name].double() - right).abs().max() for found in (ours, eager))
            assert err <= 2 * budget + torch.finfo(dtype).eps * right.abs().max(), (name, float(err), float(budget))


@only_kernels
def test_without_gradients_the_output_has_the_same_bits():
    counts = [3, 0, 30]
    leaves = inputs(counts, torch.bfloat16)
    with torch.no_grad():
        out = grouped(leaves, counts)
    assert torch.equal(out, with_gradients(grouped, leaves, counts)["y"])


@only_kernels
def test_the_same_inputs_give_the_same_bits():
    counts = [20, 0, 70]
    leaves = inputs(counts, torch.bfloat16)
    first, again = (with_gradients(grouped, leaves, counts) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@only_kernels
def test_an_expert_computes_what_it_would_alone(products_in_float64):
    """Bit for bit: no sum crosses from one expert to another, wherever the tiles fall."""
    counts = [5, 67, 64]
    leaves = inputs(counts)
    together = with_gradients(grouped, leaves, counts)
    cotangent = torch.randn(sum(counts), C, generator=torch.Generator().manual_seed(1), dtype=F64)
    for e, (begin, end) in enumerate(((0, 5), (5, 72), (72, 136))):
        alone = [x.detach()[begin:end].requires_grad_() for x in leaves[:2]] + [p.detach()[e : e + 1].requires_grad_() for p in leaves[2:]]
        out = grouped(alone, [end - begin])
        gradients = torch.autograd.grad(out, alone, cotangent[begin:end])
        assert torch.equal(out, together["y"][begin:end])
        for name, gradient in zip(NAMES, gradients, strict=True):
            whole = together[name]
            assert torch.equal(gradient, whole[begin:end] if name in ("x", "weight") else whole[e : e + 1]), name


class Sizes(TorchDispatchMode):
    """The bytes of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen += [x.nbytes for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, torch.Tensor)]
        return out


@only_kernels
def test_memory_is_what_it_says():
    """Saved: x, h, the weights and where experts end. Made, ever: nothing longer than [N, 2I] and the parameters' gradients."""
    counts = [40] * 6
    N, E = sum(counts), len(counts)
    leaves = inputs(counts, torch.float32)
    saved = []
    parameters = {p.data_ptr() for p in leaves[2:]}

    def pack(x):
        if x.data_ptr() not in parameters:
            saved.append(x.numel())
        return x

    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = grouped(leaves, counts)
        out.sum().backward()
    assert sorted(saved) == sorted([N * C, N * 2 * I, N, E])
    assert max(sizes.seen) <= 4 * max(N * 2 * I, E * 2 * I * C) < 4 * E * N * C


def routing(T, E, K, seed=0):
    """[T, E] bool, K true in a row; expert 0 has no token."""
    g = torch.Generator().manual_seed(seed)
    return torch.zeros(T, E, dtype=torch.bool).scatter(1, 1 + torch.rand(T, E - 1, generator=g).topk(K).indices, True)


def permutation():
    if INTERPRETED:
        from megatron_gptoss.model import expert_kernels

        return expert_kernels
    return expert_reference


@only_outside
@pytest.mark.parametrize(("T", "E", "K"), [(23, 6, 3), (1, 9, 4), (40, 3, 1), (0, 4, 2)])
def test_rows_are_megatrons(T, E, K):
    from megatron.core.transformer.moe.moe_utils import permute

    x, weight = torch.randn(T, 5, dtype=F64), torch.rand(T, E, dtype=F64)
    chosen = routing(T, E, K)
    rows = find_rows(chosen, K)
    theirs, their_weight, their_token, *_ = permute(x, chosen, probs=weight, num_out_tokens=T * K)
    assert torch.equal(rows.token_N, their_token)
    assert torch.equal(to_experts(x, rows, expert_reference), theirs)
    assert torch.equal(weight_of_rows(weight, rows), their_weight)
    assert torch.equal(rows.token_N[rows.row_TK], torch.arange(T)[:, None].expand(T, K)), "a token's rows are its own"
    assert (rows.row_TK.diff(dim=1) > 0).all(), "in the order of experts"


@pytest.mark.parametrize("width", [5, 1030])
def test_there_and_back_are_each_others_gradient(width):
    """<there(x), y> = <x, back(y)> for all x and y, and autograd's gradients are these; there and back again is K times x."""
    T, E, K = 9, 6, 3
    rows, backend = find_rows(routing(T, E, K), K), permutation()
    x, y = torch.randn(T, width, dtype=F64, requires_grad=True), torch.randn(T * K, width, dtype=F64, requires_grad=True)
    there, back = to_experts(x, rows, backend), from_experts(y, rows, backend)
    assert_same((there * y).sum().detach(), (x * back).sum().detach(), "adjoint")
    assert_same(torch.autograd.grad(there, x, y, retain_graph=True)[0], back.detach(), "gradient of there")
    assert_same(torch.autograd.grad(back, y, x, retain_graph=True)[0], there.detach(), "gradient of back")
    assert_same(from_experts(there, rows, backend).detach(), K * x.detach(), "there and back again")
    assert torch.equal(there, x[rows.token_N]) and torch.equal(back, expert_reference.sum_rows(y, rows.row_TK))


@pytest.mark.parametrize("width", [5, 1030])
def test_tokens_that_visit_fewer_experts_have_fewer_rows(width):
    """As behind DeepEP, where a token visits one to K of this rank's experts: the rows of those, and the two ways stay adjoint."""
    T, E, K = 20, 4, 3
    chosen = routing(T, 8, K)[:, :E]  # the others are another rank's
    chosen = chosen[chosen.any(1)]
    T, visits, backend = chosen.shape[0], chosen.sum(1), permutation()
    assert {1, 2} <= set(visits.tolist()) <= {1, 2, 3}
    rows = find_rows(chosen, K, N=int(visits.sum()))
    assert torch.equal(torch.stack([rows.token_N, rows.cell_N % E], 1)[:, [1, 0]], chosen.T.nonzero()), "sorted by expert, then by token"
    assert torch.equal((rows.row_TK >= 0).sum(1), visits)
    y = torch.randn(int(visits.sum()), width, dtype=F64, requires_grad=True)
    x = torch.randn(T, width, dtype=F64, requires_grad=True)
    there, back = to_experts(x, rows, backend), from_experts(y, rows, backend)
    for token in range(T):
        assert_same(back[token].detach(), y[rows.token_N == token].sum(0).detach(), f"token {token}")
    assert_same(torch.autograd.grad(there, x, y, retain_graph=True)[0], back.detach(), "gradient of there")
    assert_same(torch.autograd.grad(back, y, x, retain_graph=True)[0], there.detach(), "gradient of back")
    assert_same(from_experts(there, rows, backend).detach(), visits[:, None] * x.detach(), "there and back again")


def test_a_tokens_rows_are_added_in_float32_and_rounded_once():
    """1 and twice 2^-8 are 1 + 2^-7; added one by one in bfloat16 they would be 1."""
    y = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert permutation().sum_rows(y, torch.tensor([[0, 1, 2]])).item() == 1 + 2.0**-7


@only_outside
def test_gradient_of_the_weights_is_written_where_they_came_from():
    chosen = routing(7, 5, 2)
    weight = torch.rand(7, 5, dtype=F64, requires_grad=True)
    rows = find_rows(chosen, 2)
    (gradient,) = torch.autograd.grad(weight_of_rows(weight, rows), weight, torch.arange(1.0, 15.0, dtype=F64))
    assert torch.equal(gradient != 0, chosen)
    assert torch.equal(gradient[chosen].sort().values, torch.arange(1.0, 15.0, dtype=F64))


@only_outside
@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "words"),
    [
        ("cpu", torch.float32, (64, 64), "on a CPU use 'loop'"),
        ("cuda", torch.float32, (64, 64), "fast in bfloat16 only"),
        ("cuda", torch.bfloat16, (2880, 2881), "multiples of 8"),
        ("meta", torch.bfloat16, (64, 64), "run on a CUDA GPU, not on meta"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(device, dtype, sizes, words):
    assert words in expert_grouped.missing(torch.device(device), dtype, *sizes)


@only_outside
def test_all_of_this_in_tritons_interpreter():
    """The kernels, in a process of their own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
