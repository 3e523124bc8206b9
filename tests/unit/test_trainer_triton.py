"""Training with our kernels is training with the reference: three optimizer steps of the tiny model, in Triton's interpreter.

In a process of its own, since TRITON_INTERPRET is read when triton is imported. Few tokens, since the interpreter runs a kernel's programs
one by one in numpy.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


def child(backend: str, folder: Path) -> None:
    """Train and write down the losses, the norms of the gradients, and how often each backend was asked."""
    import torch

    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from megatron_gptoss.parallel.packing import pack_step
    from megatron_gptoss.parallel.shape import ParallelShape

    torch.set_num_threads(1)
    shape = ParallelShape(world=1)
    init_groups(shape, rank=0, init_method=f"file://{folder}/meet", timeout_s=60, seed=0, backend="gloo")
    from megatron_gptoss.attention import reference
    from megatron_gptoss.trainer.how import Update
    from tests.helpers.training import samples, trainer

    rooms = {"reference": reference}
    if backend == "triton":
        from megatron_gptoss.attention import triton_backend

        rooms["triton"] = triton_backend
    calls: dict[str, int] = {}

    def count(name, room, direction):
        plain = getattr(room, direction)

        def counted(*arguments):
            calls[f"{name} {direction}"] = calls.get(f"{name} {direction}", 0) + 1
            return plain(*arguments)

        setattr(room, direction, counted)

    for name, room in rooms.items():
        for direction in ("forward", "backward"):
            count(name, room, direction)
    if backend == "triton":
        from megatron_gptoss.model import rotary_kernels

        count("rotary", rotary_kernels, "split")
        count("rotary", rotary_kernels, "join")

    t = trainer(shape, attention=backend, rotary="fused" if backend == "triton" else "reference")
    stats = []
    for step in range(STEPS):
        # longer than the window of 8, several sequences in a pack, odd lengths
        batch = [m[0] for m in pack_step(samples(4, seed=step, longest=23), minibatches=1, ranks=1, tokens_per_microbatch=64)]
        stats.append(t.update(batch, Update(policy=None)))
    found = {"loss": [s.loss for s in stats], "grad": [s.grad_norm for s in stats], "tokens": [s.num_tokens for s in stats], "calls": calls}
    (folder / "found.json").write_text(json.dumps(found))
    destroy_groups()


def train(backend: str, folder: Path) -> dict:
    folder.mkdir()
    code = f"from pathlib import Path; from tests.unit.test_trainer_triton import child; child({backend!r}, Path({str(folder)!r}))"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_three_steps_with_triton_have_the_losses_of_the_reference(tmp_path):
    reference, triton = (train(backend, tmp_path / backend) for backend in ("reference", "triton"))
    assert set(reference["calls"]) == {"reference forward", "reference backward"}
    assert set(triton["calls"]) == {"triton forward", "triton backward", "rotary split", "rotary join"}, "nothing fell back"
    assert triton["tokens"] == reference["tokens"]
    assert triton["loss"] == pytest.approx(reference["loss"], rel=0, abs=1e-5)
    assert triton["grad"] == pytest.approx(reference["grad"], rel=1e-5)
    assert max(reference["loss"]) - min(reference["loss"]) > 1e-2, "the weights have moved, so later losses tell of gradients"
