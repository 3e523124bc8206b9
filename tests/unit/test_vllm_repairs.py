"""Repairs of vLLM that a CPU can show without an engine, each with the fault itself, so that a later vLLM without it is noticed."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.runs import ROOT

FALLS_ASLEEP = """
import itertools, types
import pytest, torch
from vllm.v1.worker.gpu_worker import Worker

torch.accelerator = types.SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (next(free), 100))

def worker(**backend):
    model = types.SimpleNamespace(named_buffers=lambda: [])
    backend = types.SimpleNamespace(**backend)
    return types.SimpleNamespace(
        model_runner=types.SimpleNamespace(model=model), get_draft_model=lambda: None, _get_sleep_mode_backend=lambda: backend
    )

given_back = []
free = itertools.cycle([60, 50])  # it gave back 10 and others took 20
with pytest.raises(AssertionError, match="Memory usage increased after sleeping"):
    Worker.sleep(worker(suspend=given_back.append), 2)

import megatron_gptoss.rollout.vllm_worker
Worker.sleep(worker(suspend=given_back.append), 2)
assert given_back == [2, 2]

def refuse(level):
    assert level == 1, "not mapped"

with pytest.raises(AssertionError, match="not mapped"):
    Worker.sleep(worker(suspend=refuse), 2)
print("all is well")
"""


def test_an_engine_falls_asleep_while_others_take_memory_of_its_gpu():
    command, environment = [sys.executable, "-c", FALLS_ASLEEP], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("all is well\n"), done.stdout + done.stderr
