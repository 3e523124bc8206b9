"""The kernel that splits and rotates queries and keys, in Triton's interpreter: it equals its twin, the twin equals Megatron's own way, and
backward is the gradient."""

import os
import subprocess
import sys

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_gptoss.model import rotary

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernels_in_the_interpreter starts")


def problem(T: int, K: int, G: int, D: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(T, K * (G + 2) * D, generator=generator, dtype=torch.float64).to(dtype)
    half = torch.rand(T, 1, 1, D // 2, generator=generator, dtype=torch.float64) * 50
    return qkv, torch.cat([half, half], -1)


def test_the_twin_is_megatrons_rotation():
    T, K, G, D = 5, 2, 3, 8
    qkv, angles = problem(T, K, G, D)
    q, k, v = rotary.reference(qkv, rotary.table_of(angles, 1.3, torch.float64), K, D)
    heads = qkv.view(T, K, G + 2, D)
    for found, plain in ((q, heads[:, :, :G].reshape(T, K * G, D)), (k, heads[:, :, G])):
        theirs = _apply_rotary_pos_emb_bshd(plain.unsqueeze(1), angles, mscale=1.3).squeeze(1)
        torch.testing.assert_close(found, theirs, rtol=1e-14, atol=1e-14)
    assert torch.equal(v, heads[:, :, G + 1])


def test_a_quarter_turn_by_hand():
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=torch.float64)  # one query, key and value head of two channels
    table = torch.tensor([[[[0.0, 1.0]]]], dtype=torch.float64)
    q, k, v = rotary.reference(qkv, table, 1, 2)
    assert q.flatten().tolist() == [-2.0, 1.0] and k.flatten().tolist() == [-4.0, 3.0] and v.flatten().tolist() == [5.0, 6.0]


@interpreted
@pytest.mark.parametrize(("T", "K", "G", "D"), [(1, 1, 1, 2), (70, 2, 3, 16), (0, 2, 2, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernel_equals_its_twin(T, K, G, D, dtype):
    assert rotary.missing(torch.device("cpu"), D) is None
    qkv, angles = problem(T, K, G, D, dtype)
    table = rotary.table_of(angles, 1.3, dtype)
    ours, twins = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    found, true = rotary.split_and_rotate(ours, table, K, D), rotary.reference(twins, table, K, D)
    gradients = [torch.randn_like(x) for x in true]
    for a, b in zip(found, true, strict=True):
        assert a.is_contiguous() and torch.equal(a, b)
    (dours,), (dtwins,) = torch.autograd.grad(found, ours, gradients), torch.autograd.grad(true, twins, gradients)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(dours, dtwins, rtol=bound, atol=bound)
    assert torch.equal(qkv, ours.detach()), "the input was written"


@interpreted
def test_gradient():
    assert rotary.missing(torch.device("cpu"), 4) is None
    qkv, angles = problem(3, 2, 2, 4)
    table = rotary.table_of(angles, 1.3, torch.float64)
    torch.autograd.gradcheck(lambda x: rotary.split_and_rotate(x, table, 2, 4), qkv.requires_grad_())


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_kernels_in_the_interpreter():
    # A process of its own: Triton decides at its first import whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_a_gpu_it_says_so():
    if INTERPRETED:
        pytest.skip("here the interpreter runs it")
    assert "use 'reference'" in (rotary.missing(torch.device("cpu"), 64) or "")
    assert "powers of two, not 48" in (rotary.missing(torch.device("cuda"), 48) or "")
