"""Kills on a real GPU recover as on the CPU (tests/e2e/test_runs.py tells the same story), and leave no GPU memory behind.

Nothing else may use the machine's GPUs meanwhile. About six minutes on one H200; with two, GPTOSS_TEST_FLAGS may name another layout.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch

from tests.helpers.recovery import killed_and_resumed
from tests.helpers.runs import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(1200)
def test_an_engine_s_death_is_mended_and_a_trainer_s_is_gone_on_from(tmp_path: Path) -> None:
    flags = shlex.split(os.environ.get("GPTOSS_TEST_FLAGS", ""))
    killed_and_resumed(str(ROOT / "configs" / "small_h200.toml"), *flags, cwd=tmp_path, patience_s=400)
