"""What attention refuses, and in which words: one line that names the argument, what it is and the rule it breaks."""

import sys

import pytest
import torch

from megatron_gptoss.attention import flash, te
from megatron_gptoss.attention.api import BACKENDS, attend, find_backend
from megatron_gptoss.attention.layout import Layout
from megatron_gptoss.errors import MachineError

T, H, K, D = 6, 4, 2, 8


def arguments(**change):
    good = {"q_THD": torch.zeros(T, H, D), "k_TKD": torch.zeros(T, K, D), "v_TKD": torch.zeros(T, K, D), "sink_H": torch.zeros(H)}
    return {**good, **change}


def refusal(error, **change):
    with pytest.raises(error) as caught:
        attend(**arguments(**change))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 240
    return message


def test_the_good_arguments_pass():
    out_THD, lse_TH = attend(**arguments(), cu_seqlens=torch.tensor([0, 2, T]), window=3, scale=0.5, backend="reference")
    assert out_THD.shape == (T, H, D) and lse_TH.shape == (T, H)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_THD": torch.zeros(T, H * D)}, ["q_THD", "(6, 32)", "[tokens, heads, head dim]"]),
        ({"k_TKD": torch.zeros(1, T, K, D)}, ["k_TKD", "(1, 6, 2, 8)", "[tokens, heads, head dim]"]),
        ({"k_TKD": torch.zeros(T + 1, K, D), "v_TKD": torch.zeros(T + 1, K, D)}, ["k_TKD", "7 tokens", "q_THD 6", "same T"]),
        ({"v_TKD": torch.zeros(T, K, D + 1)}, ["v_TKD", "(6, 2, 9)", "(6, 2, 8)", "same"]),
        ({"k_TKD": torch.zeros(T, K, D + 1), "v_TKD": torch.zeros(T, K, D + 1)}, ["k_TKD", "head dim 9", "q_THD 8", "same"]),
        ({"k_TKD": torch.zeros(T, 3, D), "v_TKD": torch.zeros(T, 3, D)}, ["q_THD", "4 heads", "k_TKD 3", "multiple"]),
        ({"k_TKD": torch.zeros(T, 0, D), "v_TKD": torch.zeros(T, 0, D)}, ["q_THD", "4 heads", "k_TKD 0", "multiple"]),
        ({"sink_H": torch.zeros(3)}, ["sink_H", "(3,)", "(4,)"]),
        ({"sink_H": torch.zeros(1, H)}, ["sink_H", "(1, 4)", "(4,)"]),
    ],
)  # fmt: skip
def test_shapes(change, words):
    message = refusal(ValueError, **change)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k_TKD": torch.zeros(T, K, D, dtype=torch.bfloat16)}, ["k_TKD", "torch.bfloat16", "q_THD torch.float32", "one float type"]),
        ({"v_TKD": torch.zeros(T, K, D, dtype=torch.float64)}, ["v_TKD", "torch.float64", "one float type"]),
        ({"q_THD": torch.zeros(T, H, D, dtype=torch.int64)}, ["q_THD", "torch.int64", "float type"]),
        ({"sink_H": torch.zeros(H, dtype=torch.int32)}, ["sink_H", "torch.int32", "float type"]),
        ({"sink_H": torch.zeros(H, device="meta")}, ["sink_H", "meta", "cpu"]),
        ({"k_TKD": torch.zeros(T, K, D, device="meta")}, ["k_TKD", "meta", "cpu", "one device"]),
    ],
)
def test_types_and_devices(change, words):
    message = refusal(ValueError, **change)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    [
        ([0, 4, 3, T], ["decreases", "place 2", "4 -> 3"]),
        ([0, 4], ["from 0 to 4", "T = 6"]),
        ([0, 4, T + 1], ["from 0 to 7", "T = 6"]),
        ([1, T], ["from 1 to 6", "T = 6"]),
        ([0], ["[sequences + 1]", "(1,)"]),
        ([[0, T]], ["[sequences + 1]", "(1, 2)"]),
        ([0.0, 6.0], ["integers", "torch.float32"]),
    ],
)
def test_sequence_bounds(cu_seqlens, words):
    message = refusal(ValueError, cu_seqlens=torch.tensor(cu_seqlens))
    assert [word for word in ["cu_seqlens", *words] if word not in message] == [], message


def test_sequence_bounds_changed_in_place_are_read_again():
    """Layouts are kept per tensor: a tensor that changed is another one."""
    cu_seqlens = torch.tensor([0, 3, T])
    q_THD = torch.randn(T, H, D, generator=torch.Generator().manual_seed(0))
    same = arguments(q_THD=q_THD, k_TKD=q_THD[:, :K], v_TKD=q_THD[:, :K])
    before, _ = attend(**same, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 4
    after, _ = attend(**same, cu_seqlens=cu_seqlens)
    assert not torch.equal(before[3], after[3])
    assert torch.equal(after, attend(**same, cu_seqlens=torch.tensor([0, 4, T]))[0])
    cu_seqlens[1] = 7
    assert "decreases" in refusal(ValueError, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_sees_at_least_the_token_itself(window):
    message = refusal(ValueError, window=window)
    assert f"window = {window}" in message and "at least 1" in message


def test_an_unknown_backend_is_told_the_known_ones():
    message = refusal(ValueError, backend="flash3")
    assert "backend = 'flash3'" in message
    assert all(name in message for name in BACKENDS)


@pytest.mark.parametrize("backend", ["triton", "flash", "te"])
def test_a_gpu_backend_on_a_cpu_says_what_would_work(monkeypatch, backend):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = refusal(MachineError, backend=backend)
    assert f"backend '{backend}'" in message and "CUDA" in message and "cpu" in message and "'reference'" in message


@pytest.mark.parametrize(
    ("module", "capability", "dtype", "head_dim", "word"),
    [
        (flash, (8, 0), torch.bfloat16, 64, "9.0"),
        (flash, (9, 0), torch.float32, 64, "torch.float32"),
        (flash, (9, 0), torch.bfloat16, 20, "20"),
        (flash, (9, 0), torch.bfloat16, 136, "136"),
        (te, (9, 0), torch.float32, 64, "torch.float32"),
        (te, (9, 0), torch.bfloat16, 20, "20"),
    ],
)
def test_what_a_library_cannot_do_is_known_before_it_is_imported(monkeypatch, module, capability, dtype, head_dim, word):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(module, "_import_fault", lambda: pytest.fail("imported"))
    message = module.missing(torch.device("cuda"), dtype, head_dim, False)
    assert message and word in message and "\n" not in message


@pytest.mark.parametrize(
    ("module", "imported", "package"),
    [(flash, "flash_attn", "flash-attn-4==4.0.0b36"), (te, "transformer_engine", "transformer-engine[pytorch]==2.20.2")],
)
def test_an_absent_package_is_named_with_its_version(monkeypatch, module, imported, package):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name in [name for name in sys.modules if name.partition(".")[0] == imported] + [imported]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(module, "_import_fault", module._import_fault.__wrapped__)  # not what an earlier test has cached
    message = module.missing(torch.device("cuda"), torch.bfloat16, 64, False)
    assert message and package in message and "\n" not in message


def test_transformer_engine_has_no_deterministic_backward(monkeypatch):
    message = te.missing(torch.device("cuda"), torch.bfloat16, 64, True)
    assert message and "deterministic" in message


def test_transformer_engine_refuses_what_it_has_no_argument_for():
    q_THD, k_UKD = torch.zeros(T, H, D), torch.zeros(T + 2, K, D)
    for layout in (Layout((0, T), offset=2), Layout((0, T), offset=2, causal=False)):
        with pytest.raises(ValueError, match="plain self-attention only"):
            te.forward(q_THD, k_UKD, k_UKD, None, layout, None, 1.0)
    with pytest.raises(ValueError, match="no gradient through lse"):
        te.backward(q_THD, q_THD[..., 0], q_THD, k_UKD, k_UKD, None, q_THD, q_THD[..., 0], Layout((0, T)), None, 1.0, False)
    if (torch.backends.cudnn.version() or 0) < te.CUDNN_FOR_PACKED_SINKS:
        with pytest.raises(MachineError, match=r"cuDNN 9\.26 for packed sequences with sinks"):
            te.forward(q_THD, k_UKD, k_UKD, torch.zeros(H), Layout((0, 2, T)), None, 1.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bounds": (1, 5)}, "begin at 0"),
        ({"bounds": (0, 5, 4)}, "not decrease"),
        ({"bounds": (0,)}, "bounds"),
        ({"first_key": 3, "offset": 2}, "first_key = 3"),
        ({"causal": False, "bounds": (0, 2, 5)}, "one sequence"),
    ],
)
def test_a_layout_that_contradicts_itself(change, word):
    with pytest.raises(ValueError, match=word):
        Layout(**{"bounds": (0, 5), **change})


def test_every_backend_is_found_or_refused_by_name():
    for name in BACKENDS:
        try:
            assert find_backend(name, torch.zeros(1, 1, 8)).name == name
        except MachineError as error:
            assert f"'{name}'" in str(error)
