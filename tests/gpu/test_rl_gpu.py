"""The policy update's loss, gradient and metrics on a GPU equal those on the CPU, gaps of 800 nats and NaN included.

    python3 -m pytest tests/gpu/test_rl_gpu.py -q -p no:cacheprovider

Needs torch, pydantic and pytest.
"""

import pytest
import torch

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.rl.aggregate import UpdateTotals, count
from megatron_gptoss.rl.correction import PRESETS, correct, weight_sums
from megatron_gptoss.rl.diagnostics import Totals
from megatron_gptoss.rl.objective import correction_recipe, objective, usable
from megatron_gptoss.rl.worst import worst_rows
from tests.helpers import rl_twins as twin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(rl: RlConfig, case: twin.Case, device: str) -> list[torch.Tensor]:
    _, tokens, columns = twin.tokens_and_columns(case, list(range(len(case))), torch.float64)
    totals = UpdateTotals(*count([tokens]).tolist())
    tokens, columns = tokens.to(device), {name: column.to(device) for name, column in columns.items()}
    logp = columns["logp"].clone().requires_grad_()
    found = objective(
        rl, tokens, totals, logp_N=logp, entropy_N=columns["entropy"], old_logp_N=columns["old"], engine_logp_N=columns["engine"],
        advantage_N=columns["advantage"], ref_logp_N=columns["ref"],
    )  # fmt: skip
    found.loss_sum.backward()
    measured = Totals.empty(device)
    measured.add(found, tokens)
    how, usable_N = correction_recipe(rl), usable(columns["old"], columns["engine"])
    weights = weight_sums(how, correct(how, columns["old"], columns["engine"], tokens, usable_N), tokens)
    rows = worst_rows(found, tokens, 0)
    return [x.detach().cpu() for x in (found.loss_sum, logp.grad, measured.sums, measured.maxima, weights, rows)]


@pytest.mark.parametrize("correction", PRESETS)
@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("style", ["near", "far", "huge", "bad"])
def test_a_gpu_finds_what_a_cpu_finds(style, surrogate, correction):
    rl = RlConfig(surrogate=surrogate, correction=correction, aggregation="sequence-mean", kl_coef=0.1, correction_veto=0.1, dual_clip=3.0)
    case = twin.random_case([700, 0, 1, 300, 0], 4, style)
    for here, there in zip(run(rl, case, "cuda"), run(rl, case, "cpu"), strict=True):
        assert torch.allclose(here, there, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("correction", PRESETS)
@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
def test_the_gpu_is_not_waited_for_until_the_totals_are_fetched(surrogate, correction):
    rl = RlConfig(
        surrogate=surrogate, correction=correction, aggregation="sequence-mean", kl_coef=0.1, correction_veto=0.1, dual_clip=3.0,
        correction_normalize=True, entropy_coef=0.1,
    )  # fmt: skip
    case = twin.random_case([70, 0, 30], 4, "bad")
    _, tokens, columns = twin.tokens_and_columns(case, [0, 1, 2], torch.float32)
    tokens, columns = tokens.to("cuda"), {name: column.cuda() for name, column in columns.items()}
    logp, measured = columns["logp"].requires_grad_(), Totals.empty("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = objective(
            rl, tokens, UpdateTotals(100, 2, 1.5), logp_N=logp, entropy_N=columns["entropy"], old_logp_N=columns["old"],
            engine_logp_N=columns["engine"], advantage_N=columns["advantage"], ref_logp_N=columns["ref"],
        )  # fmt: skip
        found.loss_sum.backward()
        measured.add(found, tokens)
        worst_rows(found, tokens, 0)
        weight_sums(correction_recipe(rl), found.correction, tokens)
        with pytest.raises(RuntimeError, match="synchroniz"):
            measured.on_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_to_train_on():
    here, there = (run(RlConfig(), [[], []], device) for device in ("cuda", "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
