"""SinkAttention stands in for Megatron's and TransformerEngine's attention: the same numbers, gradients, parameter and checkpoint entries,
which layers are windowed and what is visible there, and a refusal in one line of what it does not compute."""

import ast
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.tiny_model import TINY, our_model, packed_batch, strong_tensors

H, K, D, WIDTH = 8, 2, 16, 5  # query heads, kv heads, head dim, keys that a windowed layer sees
SINKS = torch.linspace(-6, 6, H, dtype=torch.float64)


def config(**fields):
    """Megatron's own TransformerConfig, without any field of ours: layers 1, 3, ... are windowed, layers 2, 4, ... are not."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {
        "num_layers": 4, "hidden_size": H * D, "num_attention_heads": H, "num_query_groups": K, "kv_channels": D, "attention_dropout": 0.0,
        "softmax_type": "learnable", "window_size": (WIDTH - 1, 0), "window_attn_skip_freq": 2, "params_dtype": torch.float64,
        "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**{**defaults, **fields})


@pytest.fixture
def masks_on_host(monkeypatch):
    """Megatron's own attention makes its masks on "cuda"."""
    from megatron.core.transformer import utils

    from megatron_gptoss.model import cpu

    if not torch.cuda.is_available():
        host = cpu._TorchOnHost()
        host.ones = cpu._on_host(torch.ones)
        monkeypatch.setattr(utils, "torch", host)


def build(which, settings, layer=1, **more):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_gptoss.attention.module import SinkAttention

    kind = {"ours": SinkAttention, "megatron": DotProductAttention}[which]
    made = kind(config=settings, layer_number=layer, attn_mask_type=AttnMaskType.causal, attention_type="self", **more)
    if settings.softmax_type == "learnable":
        with torch.no_grad():
            made.softmax_offset.copy_(SINKS)
    return made


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def outputs_and_gradients(module, inputs, dout, **more):
    """[out, dq, dk, dv] and the gradient of the sinks when they are learnt."""
    from megatron.core.transformer.enums import AttnMaskType

    inputs = [x.clone().requires_grad_() for x in inputs]
    out = module(*inputs, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, **more)
    out.backward(dout)
    found = [out.detach(), *(x.grad for x in inputs)]
    return found + ([module.softmax_offset.grad] if isinstance(module.softmax_offset, torch.nn.Parameter) else [])


# ---- the same numbers as Megatron's own attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("layer", [3, 4])  # windowed, full
@pytest.mark.parametrize("softmax_type", ["learnable", "off-by-one", "vanilla"])
def test_outputs_and_gradients_equal_megatrons(one_rank, masks_on_host, softmax_type, layer, scaling):
    """In float64 to its rounding. In float32 ours errs, against that, at most twice as much as Megatron's float32 does, and by the rounding
    of its log-sum-exp: backward takes weights from exp(score - lse), whose relative error is eps times the size of a score."""
    s, b = 23, 2
    inputs = [2 * random(s, b, n, D, seed=seed) for seed, n in enumerate((H, K, K))]
    largest_score = torch.einsum("qbkgd,sbkd->bkgqs", inputs[0].unflatten(2, (K, -1)), inputs[1]).abs().max() * D**-0.5
    dout = random(s, b, H * D, seed=9)

    def run(which, dtype):
        settings = config(softmax_type=softmax_type, params_dtype=dtype, apply_query_key_layer_scaling=scaling)
        return outputs_and_gradients(build(which, settings, layer), [x.to(dtype) for x in inputs], dout.to(dtype))

    exact, ours = run("megatron", torch.float64), run("ours", torch.float64)
    assert len(exact) == len(ours) == 4 + (softmax_type == "learnable")
    for a, b_ in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b_, atol=1e-12, rtol=1e-12)
    eps = torch.finfo(torch.float32).eps
    for ours32, theirs32, truth in zip(run("ours", torch.float32), run("megatron", torch.float32), exact, strict=True):
        ours_err, theirs_err = ((x.double() - truth).abs().max() for x in (ours32, theirs32))
        assert ours_err <= 2 * theirs_err + eps * largest_score * truth.abs().max()


def test_sinks_window_and_their_gradients_matter_in_that_comparison(one_rank, masks_on_host):
    """The control: without sinks, or with one key more, the difference is far above rounding."""
    inputs, dout = [2 * random(23, 1, n, D, seed=n) for n in (H, K, K)], random(23, 1, H * D, seed=9)
    exact = outputs_and_gradients(build("megatron", config(), 1), inputs, dout)
    for wrong in (config(softmax_type="vanilla"), config(window_size=(WIDTH, 0))):
        found = outputs_and_gradients(build("ours", wrong, 1), inputs, dout)
        assert all((a - b).abs().max() > 1e-2 for a, b in zip(found, exact, strict=False))


def test_a_scale_of_the_callers_own_is_used(one_rank, masks_on_host):
    inputs, dout = [random(9, 1, n, D, seed=n) for n in (H, K, K)], random(9, 1, H * D, seed=9)
    ours, theirs = (outputs_and_gradients(build(which, config(), softmax_scale=0.5), inputs, dout) for which in ("ours", "megatron"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("padding", [0, 3])
def test_packed_sequences_equal_megatrons_attention_on_each_alone(one_rank, masks_on_host, layer, padding):
    """With cu_seqlens_q_padded, each sequence is followed by rows of padding in memory, here full of large numbers: no real row, and no
    gradient of one, may notice them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [7, 1, 12]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    real = torch.cat([torch.arange(n) + int(ends[i]) + i * padding for i, n in enumerate(lengths)])
    T = int(ends[-1]) + len(lengths) * padding
    inputs, dout = [torch.full((T, n, D), 100.0, dtype=torch.float64) for n in (H, K, K)], torch.zeros(T, H * D, dtype=torch.float64)
    for x, n in zip(inputs, (H, K, K), strict=True):
        x[real] = 2 * random(len(real), n, D, seed=n)
    dout[real] = random(len(real), H * D, seed=9)

    cu = ends.int()
    in_memory = cu + padding * torch.arange(len(cu), dtype=torch.int32) if padding else None
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu.clone(), max_seqlen_q=12, max_seqlen_kv=12,
        cu_seqlens_q_padded=in_memory, cu_seqlens_kv_padded=in_memory,
    )  # fmt: skip
    ours = outputs_and_gradients(build("ours", config(), layer), inputs, dout, packed_seq_params=packed)

    theirs = []
    for rows in real.split(lengths):
        one = [x[rows].unsqueeze(1) for x in inputs]
        theirs.append(outputs_and_gradients(build("megatron", config(), layer), one, dout[rows].unsqueeze(1)))
    for i in range(4):
        torch.testing.assert_close(ours[i][real], torch.cat([t[i].squeeze(1) for t in theirs]), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(ours[4], sum(t[4] for t in theirs), atol=1e-12, rtol=1e-12)


def test_recomputing_core_attention_as_megatron_does_changes_no_gradient(one_rank):
    """Megatron hands tensors and the mask type through its checkpoint function, which is another way into forward()."""
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens, positions, cu_seqlens = packed_batch([9, 14], TINY.vocab_size, 0)
    gradients = []
    for recompute in (False, True):
        model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
        for layer in model.decoder.layers:
            layer.self_attention.checkpoint_core_attention = recompute
        model(input_ids=tokens, position_ids=positions, packed_seq_params=packed_params(cu_seqlens, 14)).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


# ---- the same parameter and checkpoint ----------------------------------------------------------------------------------------------


def entries(module, tp_rank=0):
    """Everything that says where a sharded tensor lies in the checkpoint, as layer 3 of 4 of a stack asks for it."""
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = module.sharded_state_dict("layers.core_attention.", ((0, 2, 4),), metadata)
    return {
        name: (t.key, t.global_shape, t.global_offset, t.local_shape, t.axis_fragmentations, t.replica_id, t.dtype, t.prepend_axis_num)
        for name, t in state.items()
    }


def groups(tp=1, rank=0, cp=1):
    """Process groups that only know their size, for what is decided without communication."""
    return SimpleNamespace(tp=SimpleNamespace(size=lambda: tp, rank=lambda: rank), cp=SimpleNamespace(size=lambda: cp, rank=lambda: 0))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("softmax_type", ["learnable", "off-by-one", "vanilla"])
def test_checkpoint_entries_equal_megatrons_on_every_tensor_parallel_rank(one_rank, softmax_type, rank):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_gptoss.attention.module import SinkAttention

    settings = config(softmax_type=softmax_type)
    made = [kind(settings, 3, AttnMaskType.causal, "self", pg_collection=groups(2, rank)) for kind in (SinkAttention, DotProductAttention)]
    ours, theirs = (entries(m) for m in made)
    assert ours == theirs
    if softmax_type == "learnable":
        (entry,) = ours.values()
        assert entry[:4] == ("layers.core_attention.softmax_offset", (4, H), (2, rank * H // 2), (H // 2,))
        assert made[0].softmax_offset.tensor_model_parallel and made[0].softmax_offset.partition_dim == 0, (
            "counted in the norm on all ranks"
        )
    else:
        assert not list(made[0].parameters()) and not made[0].state_dict()


def test_state_dicts_move_both_ways_between_ours_and_megatrons(one_rank):
    ours, theirs = build("ours", config()), build("megatron", config())
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["softmax_offset"]
    with torch.no_grad():
        theirs.softmax_offset.mul_(2)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.softmax_offset, 2 * SINKS)
    with torch.no_grad():
        ours.softmax_offset.mul_(2)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.softmax_offset, 4 * SINKS)


class LikeTransformerEngine(torch.nn.Module):
    """NOT TransformerEngine: what its DotProductAttention registers, read in its source, for machines without a GPU. A float32 parameter of
    zeros, an `_extra_state` as every module of its has, and a hook that excuses that key's absence under core_attention. The real one is a
    matter of tests/gpu."""

    def __init__(self, heads):
        super().__init__()
        self.register_parameter("softmax_offset", torch.nn.Parameter(torch.zeros(heads)))
        self.register_load_state_dict_post_hook(self.excuse)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state.numel() == 0

    @staticmethod
    def excuse(_module, keys):
        for key in [k for k in keys.missing_keys if "core_attention._extra_state" in k]:
            keys.missing_keys.remove(key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_move_both_ways_by_transformer_engines_documented_contract(one_rank, dtype):
    ours = torch.nn.ModuleDict({"core_attention": build("ours", config(params_dtype=dtype))})
    theirs = torch.nn.ModuleDict({"core_attention": LikeTransformerEngine(H)})
    assert "core_attention._extra_state" in theirs.state_dict()
    theirs.load_state_dict(ours.state_dict())  # strict: neither a missing nor an unexpected key
    assert torch.equal(theirs["core_attention"].softmax_offset, SINKS.to(dtype).float())
    with torch.no_grad():
        theirs["core_attention"].softmax_offset.mul_(-0.5)
    state = theirs.state_dict()
    ours.load_state_dict(state)
    assert torch.equal(ours["core_attention"].softmax_offset, (SINKS.to(dtype).float() * -0.5).to(dtype))
    assert "core_attention._extra_state" in state, "the caller's dictionary is left as it was"


def test_the_same_seed_gives_the_sinks_that_megatron_begins_with(one_rank):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_gptoss.attention.module import SinkAttention

    begun = []
    for kind in (SinkAttention, DotProductAttention):
        torch.manual_seed(7)
        begun.append(kind(config(), 1, AttnMaskType.causal, "self").softmax_offset)
    assert torch.equal(*begun) and begun[0].abs().min() > 0


def parameters_in_source(module, kind, method):
    """Parameter names as the source has them: megatron.core.extensions.transformer_engine defines mocks without TransformerEngine."""
    source = importlib.util.find_spec(module).loader.get_source(module)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == kind]
    (function,) = (node for node in nodes[0].body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_every_keyword_of_both_is_taken_and_no_other(one_rank, method):
    from megatron_gptoss.attention.module import SinkAttention

    ours = list(inspect.signature(getattr(SinkAttention, method)).parameters)
    megatron = parameters_in_source("megatron.core.transformer.dot_product_attention", "DotProductAttention", method)
    te = parameters_in_source("megatron.core.extensions.transformer_engine", "TEDotProductAttention", method)
    assert set(ours) == {*megatron, *te}
    same = next((i for i, (a, b) in enumerate(zip(megatron, te, strict=False)) if a != b), min(len(megatron), len(te)))
    assert ours[:same] == megatron[:same] == te[:same], "as far as both agree, arguments may be positional"


# ---- windows ------------------------------------------------------------------------------------------------------------------------

WINDOW, QUERY = TINY.sliding_window, 15


def attend(model, layer: int, key_distance: int | None, *, packed: bool):
    """Core attention's output for token QUERY of 20, with the key and value `key_distance` back changed (None: nothing changed)."""
    from megatron_gptoss.model.gpt_oss import packed_params

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(20, 1, n, TINY.head_dim, generator=generator) for n in (4, 2, 2))
    if key_distance is not None:
        k[QUERY - key_distance] += 1
        v[QUERY - key_distance] += 1
    core = model.decoder.layers[layer].self_attention.core_attention
    with torch.no_grad():
        if packed:
            cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
            return core(q[:, 0], k[:, 0], v[:, 0], packed_seq_params=packed_params(cu_seqlens, 20))[QUERY]
        return core(q, k, v)[QUERY, 0]


@pytest.mark.parametrize("packed", [True, False])
def test_even_layers_see_the_window_and_odd_layers_everything(one_rank, packed):
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)))
    for layer, distance, visible in [(0, WINDOW, False), (0, WINDOW - 1, True), (1, WINDOW, True), (1, -1, False)]:
        same = torch.equal(attend(model, layer, distance, packed=packed), attend(model, layer, None, packed=packed))
        assert same != visible, (layer, distance)


def test_the_window_fault_shows_one_key_more(one_rank):
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 1)), fault="window")
    assert not torch.equal(attend(model, 0, WINDOW, packed=True), attend(model, 0, None, packed=True))
    assert torch.equal(attend(model, 0, WINDOW + 1, packed=True), attend(model, 0, None, packed=True))


def test_windows_in_megatrons_words(one_rank):
    from megatron_gptoss.attention.module import layer_window

    for window, skip, layer, expected in [
        ((127, 0), 2, 1, 128), ((127, 0), 2, 2, None), ((127, 0), None, 2, 128), ((127, 0), [1, 0], 1, 128), ((127, 0), [1, 0], 2, None),
        ((0, 0), None, 1, 1), (None, None, 1, None), ((-1, 0), None, 1, None),
    ]:  # fmt: skip
        assert layer_window(SimpleNamespace(window_size=window, window_attn_skip_freq=skip), layer) == expected


# ---- context parallelism ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def context_calls(monkeypatch):
    """Stands in for context.py: what it was asked for, answered as if this rank's shard were everything."""
    from megatron_gptoss.attention.api import attend as attend_whole

    calls = []

    def attend_context(q, k, v, sink, *, cu_seqlens, group, window, scale, backend, deterministic):
        calls.append(SimpleNamespace(cu_seqlens=cu_seqlens.tolist(), group=group, window=window, scale=scale, backend=backend))
        return attend_whole(q, k, v, sink, window=window, scale=scale)

    monkeypatch.setitem(sys.modules, "megatron_gptoss.attention.context", SimpleNamespace(attend_context=attend_context))
    return calls


def shard(s=6, b=1):
    return [random(s, b, n, D, seed=n) for n in (H, K, K)]


def test_more_than_one_context_rank_goes_through_attend_context_with_global_bounds(one_rank, context_calls):
    from megatron.core.packed_seq_params import PackedSeqParams

    world = groups(cp=2)
    module = build("ours", config(context_parallel_size=2), pg_collection=world)
    out = module(*shard())
    assert out.shape == (6, 1, H * D)
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)  # 6 tokens here, 12 in all
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=8, max_seqlen_kv=8)
    module(*(x.squeeze(1) for x in shard()), packed_seq_params=packed)
    assert [c.cu_seqlens for c in context_calls] == [[0, 12], [0, 4, 12]]
    assert all((c.group, c.window, c.scale, c.backend) == (world.cp, WIDTH, D**-0.5, "reference") for c in context_calls)

    # a batch's own word about its ranks, as TEDotProductAttention takes it
    other = groups(cp=4).cp
    packed.cp_group = other
    module(*(x.squeeze(1) for x in shard()), packed_seq_params=packed)
    assert context_calls[-1].group is other
    whole = torch.tensor([0, 4, 6], dtype=torch.int32)
    alone = PackedSeqParams(qkv_format="thd", cu_seqlens_q=whole, cu_seqlens_kv=whole, local_cp_size=1)
    module(*(x.squeeze(1) for x in shard()), packed_seq_params=alone)
    assert len(context_calls) == 3, "local_cp_size = 1: the sequences are whole"


def test_a_batch_of_several_rows_over_context_ranks_is_refused(one_rank, context_calls):
    module = build("ours", config(context_parallel_size=2), pg_collection=groups(cp=2))
    with pytest.raises(ValueError, match=r"query has batch 2; .*Pack several as thd"):
        module(*shard(b=2))
    assert not context_calls


# ---- refusals -----------------------------------------------------------------------------------------------------------------------

TWO = groups(cp=2)


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout = 0.1"),
        ({}, {"attention_dropout": 0.2}, "attention_dropout = 0.2"),
        ({}, {"attention_type": "cross"}, "attention_type = 'cross'"),
        ({}, {"attn_mask_type": "padding"}, "attn_mask_type = padding"),
        ({}, {"attn_mask_type": "no_mask"}, "attn_mask_type = no_mask"),
        ({}, {"attn_mask_type": "causal_bottom_right"}, "attn_mask_type = causal_bottom_right"),
        ({}, {"k_channels": 16, "v_channels": 8}, "v_channels = 8 differs from k_channels = 16"),
        ({}, {"v_channels": 8}, "v_channels = 8"),
        ({}, {"num_splits": 4}, "num_splits = 4"),
        ({}, {"pg_collection": TWO}, "context_parallel_size = 1, but the context-parallel group has 2"),
        ({"context_parallel_size": 2}, {}, "context_parallel_size = 2, but the context-parallel group has 1"),
        ({}, {"pg_collection": groups(tp=3)}, "num_attention_heads = 8 cannot be divided over 3"),
        ({}, {"pg_collection": groups(tp=4)}, "num_query_groups = 2 cannot be divided over 4"),
        ({"window_size": (4, 4)}, {}, r"window_size = \(4, 4\)"),
        ({"softmax_type": "sigmoid"}, {}, "softmax_type = 'sigmoid'"),
        ({"qk_clip": True}, {}, "qk_clip"),
        ({"log_max_attention_logit": True}, {}, "log_max_attention_logit"),
    ],
)
def test_what_the_constructor_does_not_compute_is_refused_in_one_line(one_rank, settings, arguments, words):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_gptoss.attention.module import SinkAttention

    made = config()
    for name, value in settings.items():  # past TransformerConfig's own checks
        setattr(made, name, value)
    given = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", **arguments}
    if isinstance(given["attn_mask_type"], str):
        given["attn_mask_type"] = AttnMaskType[given["attn_mask_type"]]
    with pytest.raises(ValueError, match=words) as caught:
        SinkAttention(made, 1, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_mask": torch.zeros(1, 1, 6, 6, dtype=torch.bool)}, "attention_mask is given"),
        ({"attention_bias": torch.zeros(1, H, 6, 6)}, "attention_bias is given"),
        ({"attn_mask_type": "no_mask"}, "attn_mask_type = no_mask"),
        ({"num_splits": 2}, "num_splits = 2"),
        ({"key": torch.zeros(7, 1, K, D, dtype=torch.float64)}, r"key is \[s, b\] = \[7, 1\] and query \[6, 1\]"),
        ({"packed": {"qkv_format": "bshd"}}, "qkv_format = 'bshd'"),
        ({"packed": {"qkv_format": "thd"}}, "cu_seqlens_q is None"),
        ({"packed": {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_kv": [0, 3, 6]}}, "cu_seqlens_kv differs from cu_seqlens_q"),
        ({"packed": {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_kv": None}}, "cu_seqlens_kv differs from cu_seqlens_q"),
        (
            {"packed": {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_kv": [0, 2, 5], "cu_seqlens_q_padded": [0, 3, 6]}},
            "cu_seqlens_kv_padded differs from cu_seqlens_q_padded",
        ),
        ({"packed": {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_kv": [0, 2, 5]}}, "cu_seqlens runs from 0 to 5"),
        ({"packed": {"cu_seqlens_q": [0, 6], "cu_seqlens_kv": [0, 6], "local_cp_size": 2}}, "local_cp_size = 2 comes without cp_group"),
    ],
)
def test_what_forward_does_not_compute_is_refused_in_one_line(one_rank, change, words):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    query, key, value = shard()
    given = {"query": query, "key": key, "value": value, **change}
    if isinstance(given.get("attn_mask_type"), str):
        given["attn_mask_type"] = AttnMaskType[given["attn_mask_type"]]
    if "packed" in given:
        fields = {"qkv_format": "thd", **given.pop("packed")}
        fields = {name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for name, x in fields.items()}
        given["packed_seq_params"] = PackedSeqParams(**fields)
        given |= {name: given[name].squeeze(1) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=words) as caught:
        build("ours", config())(**given)
    assert "\n" not in str(caught.value)
