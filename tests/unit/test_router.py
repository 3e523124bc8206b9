"""The router's laws: the choice is the k largest logits, the lower index first among equals; the numbers are Hugging Face's and Megatron's;
gradients reach the chosen logits and no other."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tiny_model import TINY

INF, NAN = float("inf"), float("nan")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def choose(logits, k):
    from megatron_gptoss.model.router import choose_experts

    return choose_experts(logits, k).tolist()


# --- The choice -------------------------------------------------------------------------------------------------------------------------

BY_HAND = [  # logits, k, chosen
    ([1, 2, 2, 1, 2], 2, [1, 2]),
    ([1, 2, 2, 1, 2], 4, [1, 2, 4, 0]),
    ([0, 0, 0, 0], 3, [0, 1, 2]),
    ([-1, -2, -1, -0.5], 3, [3, 0, 2]),  # negative floats order backwards as integers
    ([-0.0, 0.0, -0.0, -1], 3, [0, 1, 2]),  # equal, whatever their bits
    ([0.0, -0.0, 1e-30, -1e-30], 4, [2, 0, 1, 3]),
    ([-INF, 3, INF, -INF], 4, [2, 1, 0, 3]),
    ([1, NAN, 2, -NAN], 2, [1, 3]),  # not hidden behind finite logits
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("logits, k, chosen", BY_HAND)
def test_ties_by_hand(logits, k, chosen, dtype, device):
    assert choose(torch.tensor([logits], dtype=dtype, device=device), k) == [chosen]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_experts", [32, 128])
def test_many_tokens_with_ties_in_every_row(num_experts, device):
    """As in bfloat16 routers: few values, so that the k-th place is tied. A stable sort in float64 is the other way to the same choice."""
    from megatron_gptoss.model.router import choose_experts

    logits = random(5000, num_experts, seed=4).bfloat16().float().mul(4).round().div(4).to(device)
    fourth = logits.sort(descending=True).values[:, 3:5]
    assert (fourth[:, 0] == fourth[:, 1]).float().mean() > 0.2
    assert torch.equal(choose_experts(logits, 4), choose_experts(logits.double(), 4))


def test_a_tie_made_by_bfloat16_goes_to_the_lower_index():
    close = torch.tensor([[1.0, 1.001, 1.002, 0.5]])
    assert choose(close, 2) == [[2, 1]]
    assert choose(close.bfloat16(), 2) == [[0, 1]]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_choice_is_python_sort_by_logit_then_index(data):
    """Values from a short list, so that nearly every row has ties, at the k-th place too."""
    num_experts = data.draw(st.sampled_from([1, 2, 5, 32, 128]))
    k = data.draw(st.integers(1, min(num_experts, 4)))
    values = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-38, 0.25, 1.0, 7.0])
    row = data.draw(st.lists(values, min_size=num_experts, max_size=num_experts))
    expected = sorted(range(num_experts), key=lambda e: (-row[e], e))[:k]
    assert choose(torch.tensor([row]), k) == [expected]
    assert choose(torch.tensor([row], dtype=torch.float64), k) == [expected]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=8, max_size=8))
def test_integer_key_orders_any_floats(row):
    assert choose(torch.tensor([row]), 8) == [sorted(range(8), key=lambda e: (-row[e], e))]


# --- The numbers ------------------------------------------------------------------------------------------------------------------------


def config(num_experts=32, top_k=4, **fields):
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {
        "num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_moe_experts": num_experts, "moe_router_topk": top_k,
        "add_bias_linear": True, "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "expert_tensor_parallel_size": 1,
        "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**{**defaults, **fields})


def router(kind=None, *, layer=1, dtype=torch.float32, **fields):
    from megatron_gptoss.model.router import router_spec

    none = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    made = (kind or router_spec())(config=config(**fields), pg_collection=none)
    made.set_layer_number(layer)
    E, C = made.weight.shape
    made.weight.data, made.bias.data = random(E, C, seed=1, dtype=dtype), random(E, seed=2, dtype=dtype)
    return made


def hidden(T=200, dtype=torch.float32):
    return random(T, 1, 48, seed=3, dtype=dtype)


@pytest.mark.parametrize("num_experts", [32, 128])
def test_bit_equal_to_megatron(one_rank, num_experts):
    from megatron.core.transformer.moe.router import TopKRouter

    ours, theirs = router(num_experts=num_experts), router(TopKRouter, num_experts=num_experts)
    for a, b in zip(ours(hidden()), theirs(hidden()), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("num_experts", [32, 128])
def test_bit_equal_to_hugging_face(one_rank, num_experts):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    theirs = GptOssTopKRouter(SimpleNamespace(num_experts_per_tok=4, num_local_experts=num_experts, hidden_size=48))
    ours = router(num_experts=num_experts)
    theirs.load_state_dict({"weight": ours.weight.data, "bias": ours.bias.data})
    logits, probs, experts = theirs(hidden().squeeze(1))
    for a, b in zip(ours.route(hidden()), (logits, experts, probs), strict=True):
        assert torch.equal(a, b)


def test_bfloat16_weights_are_multiplied_in_float32(one_rank):
    made, x = router(dtype=torch.bfloat16), hidden(dtype=torch.bfloat16)
    logits, _, probs = made.route(x)
    exact = x.squeeze(1).double() @ made.weight.double().t() + made.bias.double()
    assert logits.dtype == probs.dtype == torch.float32
    # fp32's bound for 48 products and a bias, against bfloat16's rounding of the result, which is 2^-9 of it
    bound = 49 * 2**-24 * (x.squeeze(1).double().abs() @ made.weight.double().abs().t() + made.bias.double().abs())
    assert ((logits - exact).abs() <= bound).all()
    assert (logits.bfloat16().double() - exact).abs().max() > 100 * bound.max()


# --- Gradients --------------------------------------------------------------------------------------------------------------------------


def routed(x, weight, bias):
    from megatron_gptoss.model.router import choose_experts, router_logits, softmax_of_chosen

    logits = router_logits(x, weight, bias)
    return softmax_of_chosen(logits, choose_experts(logits, 4))


def test_gradients_equal_finite_differences_in_float64():
    shapes = ((7, 12), (16, 12), (16,))
    inputs = [random(*shape, seed=i, dtype=torch.float64).requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(routed, inputs)


def test_gradients_equal_autograd_of_the_plain_formula(one_rank):
    made, x = router(), hidden().requires_grad_()
    upstream = random(200, 32, seed=9)
    probs, chosen = made(x)
    probs.backward(upstream)

    x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, made.weight, made.bias))
    logits = torch.nn.functional.linear(x64.squeeze(1), w64, b64)
    plain = torch.softmax(logits.masked_fill(~chosen, -INF), dim=-1)  # dense, over the chosen only
    plain.backward(upstream.double())
    for ours, theirs in ((x.grad, x64.grad), (made.weight.grad, w64.grad), (made.bias.grad, b64.grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_an_expert_that_nobody_chose_has_no_gradient(one_rank):
    made = router()
    made.bias.data[5] = -1000.0
    probs, chosen = made(hidden())
    probs.backward(random(200, 32, seed=9))
    assert not chosen[:, 5].any()
    assert made.bias.grad[5] == 0 and not made.weight.grad[5].any()
    assert made.bias.grad[6] != 0 and made.weight.grad[6].any()


def test_probabilities_sum_to_one_on_k_experts(one_rank):
    probs, chosen = router()(hidden())
    assert (chosen.sum(1) == 4).all() and ((probs > 0) == chosen).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(200))


# --- What Megatron reads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_marks_for_the_sum_over_tensor_parallel_ranks(one_rank, sequence_parallel):
    """Its value is tested over two ranks in tests/dist/test_router_replay.py."""
    made = router(sequence_parallel=sequence_parallel, tensor_model_parallel_size=2 if sequence_parallel else 1)
    assert made.weight.sequence_parallel is made.bias.sequence_parallel is sequence_parallel


@pytest.mark.parametrize(
    "field, value",
    [
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_pre_softmax", True),
        ("moe_router_load_balancing_type", "aux_loss"),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_enable_routing_replay", True),
        ("moe_router_dtype", None),
    ],
)
def test_what_it_does_not_compute_is_refused(one_rank, field, value):
    with pytest.raises(ValueError, match=f"needs {field} = "):
        router(**{field: value})


def test_layers_are_counted_from_zero(one_rank):
    assert router(layer=1).layer == 0 and router(layer=24).layer == 23


def test_tiny_model_is_configured_as_the_router_wants(one_rank):
    from megatron_gptoss.model.build import megatron_config
    from megatron_gptoss.model.router import _refuse_other_routers

    _refuse_other_routers(megatron_config(TINY, one_rank, dtype=torch.float32))
