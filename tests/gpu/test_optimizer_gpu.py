"""AdamW with states on the host and in bfloat16, on a GPU: the host's updates are the device's but for rounding, what is offloaded takes no
memory there, a step takes no more than chunks, and copies never overtake the gradients and weights that they carry.

    python3 -m pytest tests/gpu/test_optimizer_gpu.py -q -p no:cacheprovider

Needs torch and pytest, and 4 GiB of host memory.
"""

import pytest
import torch

from megatron_gptoss.trainer.adamw import PlannedAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RATES = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CHUNK = 2**20
MIB = 2**20


def optimizer(moments, share, sizes=(3 * CHUNK + 17, 1, 700, 5 * CHUNK, CHUNK)):
    g = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(n, generator=g, device="cuda").bfloat16() for n in sizes]
    return PlannedAdamW([{"params": made, **RATES}], moments=moments, host_share=share, chunk=CHUNK)


def parameters(chosen):
    return chosen.param_groups[0]["params"]


def run(chosen, steps=4):
    g = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        for p in parameters(chosen):
            # Made right before the step, behind a long queue: a copy that does not wait for it takes something else.
            p.decoupled_grad = torch.zeros(p.shape, device="cuda")
            torch.cuda._sleep(2_000_000)
            p.decoupled_grad.normal_(generator=g)
        chosen.step()
        for p in parameters(chosen):  # what comes behind the step reads the weights as soon as it may
            p.seen = p.clone()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_host_updates_as_the_device_does(share):
    device, host = optimizer(torch.float32, 0.0), optimizer(torch.float32, share)
    run(device), run(host)
    for p, q in zip(parameters(device), parameters(host), strict=True):
        one, two = device.state[p], {name: t.cuda() for name, t in host.state[q].items()}
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-7), name
        assert (one["master_param"] - two["master_param"]).abs().max() < 1e-5  # of four updates of up to 1e-3
        assert torch.equal(q, two["master_param"].bfloat16()), "each weight is its original, rounded"
        assert torch.equal(q.seen, q), "what was queued behind the step saw all weights"
    assert all(host.state[q]["exp_avg"].device.type == ("cpu" if q in host.on_host else "cuda") for q in parameters(host))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rounded_moments_follow_float32(share):
    """bfloat16 moments are off by at most a neighbour an update, 2^-7 of their size, and right on average."""
    wide, rounded = optimizer(torch.float32, 0.0), optimizer(torch.bfloat16, share)
    run(wide), run(rounded)
    for p, q in zip(parameters(wide), parameters(rounded), strict=True):
        if p.numel() < CHUNK:
            continue
        v, w = wide.state[p]["exp_avg_sq"], rounded.state[q]["exp_avg_sq"].cuda().float()
        assert rounded.state[q]["exp_avg_sq"].dtype == torch.bfloat16
        relative = (w - v) / v
        assert relative.abs().max() < 4 * 2**-7
        assert relative.mean().abs() < 5 * float(relative.std()) / CHUNK**0.5
        assert (wide.state[p]["master_param"] - rounded.state[q]["master_param"].cuda()).abs().mean() < 2e-5


def test_host_and_device_draw_the_same_noise():
    """The same moments on both, but where the last bits of float32 arithmetic decide: for few."""
    device, host = optimizer(torch.bfloat16, 0.0), optimizer(torch.bfloat16, 1.0)
    run(device, steps=1), run(host, steps=1)
    for p, q in zip(parameters(device), parameters(host), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert (device.state[p][name] != host.state[q][name].cuda()).float().mean() < 0.01


@pytest.mark.parametrize(("moments", "share", "held"), [(torch.float32, 0.0, 12), (torch.bfloat16, 0.0, 8), (torch.float32, 1.0, 0)])
def test_memory_on_the_device(moments, share, held):
    """Bytes a parameter, and in a step no more than seven float32 tensors of a chunk."""
    n = 64 * CHUNK
    before = torch.cuda.memory_allocated()
    chosen = optimizer(moments, share, sizes=(n,))
    weights = 2 * n
    assert torch.cuda.memory_allocated() - before - weights == pytest.approx(held * n, abs=MIB)
    (p,) = parameters(chosen)
    p.decoupled_grad = torch.randn(n, device="cuda")
    chosen.step()  # the noise and the pinned buffers are made in the first
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chosen.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 7 * 4 * CHUNK
