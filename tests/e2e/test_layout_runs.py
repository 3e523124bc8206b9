"""The command line trains to the losses of one rank however the ranks share the model, and a run may change that when it is resumed.

One run goes on from layout to layout: settings, ranks, several microbatches a step, metrics, checkpoint and resume, with each of them.
That every gradient is right is tests/dist/test_parallel_layouts.py's.
"""

import pytest

from tests.helpers.runs import CONFIGS, metrics, must

# A constant rate without warm-up, because a longer run has another schedule; about five microbatches a step.
FLAGS = [
    "--run.name=layouts", "--sft.decay=constant", "--sft.warmup_steps=0", "--sft.min_copy_probability=0.0",
    "--trainer.tokens_per_microbatch=512",
]  # fmt: skip
STEPS = 3  # in each layout
LAYOUTS = ("tensor", "context", "pipeline")


def test_one_run_through_tensor_context_and_pipeline_ranks_has_the_losses_of_one_rank(tmp_path):
    total = STEPS * len(LAYOUTS)
    must("sft", *CONFIGS, *FLAGS, "--run.id=one", f"--sft.steps={total}", cwd=tmp_path)
    run = tmp_path / "runs" / "layouts-two"
    for place, layout in enumerate(LAYOUTS, start=1):
        begin = ["--resume", str(run)] if run.exists() else [*CONFIGS, *FLAGS, "--run.id=two"]
        sizes = [f"--parallel.{name}={2 if name == layout else 1}" for name in LAYOUTS]
        text = must("sft", *begin, *sizes, f"--sft.steps={place * STEPS}", cwd=tmp_path)
        assert f"{layout} 2" in text, text

    one, two = metrics(tmp_path / "runs" / "layouts-one"), metrics(run)
    assert sorted(one) == sorted(two) == list(range(1, total + 1))
    for step in one:
        assert two[step]["train/loss"] == pytest.approx(one[step]["train/loss"], abs=1e-5), f"step {step}"
        assert two[step]["grad/norm"] == pytest.approx(one[step]["grad/norm"], rel=1e-5), f"step {step}"
        assert two[step]["policy/entropy"] == pytest.approx(one[step]["policy/entropy"], abs=1e-5), f"step {step}"
        assert two[step]["train/tokens"] == one[step]["train/tokens"], f"step {step}"
    assert one[total]["train/loss"] < 0.5 * one[1]["train/loss"], "nine steps far enough apart that a lost moment would show"
    held_out = "sft/copy_probability"  # a product of probabilities of many tokens, scored in the last layout
    assert two[total][held_out] == pytest.approx(one[total][held_out], rel=1e-3)
