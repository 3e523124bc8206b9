"""Metrics worked by hand, the same however tokens are spread over microbatches and ranks, and without nan when there is nothing."""

import math
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.parallel.context import take_shard
from megatron_gptoss.rl.aggregate import UpdateTotals, count
from megatron_gptoss.rl.correction import PRESETS, weight_sums
from megatron_gptoss.rl.diagnostics import Totals, mismatch_measures, require_on_policy, too_many_unusable
from megatron_gptoss.rl.objective import correction_recipe, objective
from megatron_gptoss.rl.tokens import tokens_of
from megatron_gptoss.rl.worst import NUM_WORST, worst_of, worst_rows, worst_tokens
from megatron_gptoss.types import WorstToken
from tests.helpers import rl_twins as twin
from tests.helpers.rl_twins import packed, t


def measured(logp, engine, rows, *, old=None, rl=RlConfig(correction="none"), tokens=None):
    tokens = packed(*rows) if tokens is None else tokens
    found = objective(
        rl, tokens, UpdateTotals(*count([tokens]).tolist()), logp_N=t(*logp), entropy_N=t(*[0.25] * len(logp)),
        old_logp_N=None if old is None else t(*old), engine_logp_N=t(*engine), advantage_N=t(*[1.0] * len(logp)),
    )  # fmt: skip
    totals = Totals.empty()
    totals.add(found, tokens)
    return totals, {m.name: m.value for m in mismatch_measures(totals)}


def test_by_hand():
    # gaps trainer - engine: 0.5, 0 | -0.5
    totals, values = measured([-1.0, -2.0, -1.5], [-1.5, -2.0, -1.0], ("xx", "", "x"))
    e = math.exp
    assert totals.mean("entropy") == 0.25
    assert totals.mean("k1") == pytest.approx(0.0)
    assert totals.mean("k3") == pytest.approx((e(0.5) - 1.5 + e(-0.5) - 0.5) / 3)
    assert totals.mean("logp_abs") == pytest.approx(1 / 3)
    assert totals.maximum("logp_abs") == 0.5
    assert values["mismatch/chi2"] == pytest.approx((e(1) + 1 + e(-1)) / 3 - 1)
    assert values["mismatch/chi2_seq"] == pytest.approx((e(1) + e(-1)) / 2 - 1)
    assert values["mismatch/ess_seq"] == pytest.approx((e(0.5) + e(-0.5)) ** 2 / (2 * (e(1) + e(-1))))
    assert values["mismatch/log_ppl"] == pytest.approx((1.5 + 1.5) / 2)
    assert values["mismatch/log_ppl_engine"] == pytest.approx((1.75 + 1.0) / 2)
    assert values["mismatch/log_ppl_diff"] == pytest.approx(0.125)
    assert values["mismatch/log_ppl_abs_diff"] == pytest.approx((0.25 + 0.5) / 2)
    assert values["mismatch/log_ppl_abs_diff_max"] == 0.5


def test_shares_and_effective_sample_size_by_hand():
    rl = RlConfig(correction="tis", correction_veto=0.2)
    logs = [math.log(r) for r in (3.0, 1.0, 0.1, 1.0)]
    totals, values = measured(logs, [0.0] * 4, ("xx", "xx"), rl=rl)
    # weights 2 (cut), 1 | vetoed
    assert totals.mean("truncated") == 0.25
    assert totals.ess == pytest.approx(9 / (4 * 5))
    assert values["mismatch/weight_mean"] == 0.75
    assert (values["mismatch/rejected_fraction"], values["mismatch/rejected_seq_fraction"]) == (0.5, 0.5)
    assert values["mismatch/truncated_seq_fraction"] == 0.5
    _, values = measured(logs, [0.0] * 4, ("xx", "xx"), rl=RlConfig(correction="icepop"))
    assert values["mismatch/masked_fraction"] == 0.5
    nothing, _ = measured([-9.0], [0.0], ("x",), rl=RlConfig(correction="icepop"))
    assert nothing.ess == 0.0, "every weight is 0: no sample is left"


def test_ratio_and_clip_fraction_by_hand():
    totals, _ = measured([math.log(1.5), 0.0], [0.0, 0.0], ("xx",), old=[0.0, 0.0])
    assert totals.maximum("ratio_dev") == pytest.approx(0.5)
    assert totals.mean("clipped") == 0.5
    with pytest.raises(AssertionError, match=r"ratio 0\.5 away from 1 and 1 clipped"):
        require_on_policy(totals)
    require_on_policy(measured([math.log(1.5)], [0.0], ("x",))[0])


def test_by_position_and_by_turn():
    # positions 1, 3 in turns 0, 1; then one token at 128, the first beyond the window
    totals, values = measured([0.1, 0.2, 0.4], [0.0] * 3, ("x.x", "." * 127 + "x"))
    assert values["mismatch_position/0/logp_abs_mean"] == pytest.approx(0.15)
    assert values["mismatch_position/128/logp_abs_max"] == pytest.approx(0.4)
    assert values["mismatch_position/128/k1"] == pytest.approx(-0.4)
    assert values["mismatch_turn/0/logp_abs_mean"] == pytest.approx((0.1 + 0.4) / 2)
    assert values["mismatch_turn/1/k3"] == pytest.approx(math.exp(0.2) - 1.2)
    assert "mismatch_position/512/k1" not in values and "mismatch_turn/2/k1" not in values
    assert sum(totals.sum(f"position/{edge}/tokens") for edge in (0, 128)) == 3


def test_turns_beyond_the_last_bucket_share_it():
    _, values = measured([0.1] * 10, [0.0] * 10, ("x." * 10,))
    assert "mismatch_turn/7/k1" in values and "mismatch_turn/8/k1" not in values


def test_nothing_at_all_has_no_nan():
    for rows in ((), ("",), ("..", "")):
        totals, values = measured([], [], rows or (".",))
        assert totals.ess == totals.ess_seq == 1.0
        assert {v for k, v in values.items() if k != "mismatch/ess_seq"} == {0.0}


def test_log_probs_that_are_not_finite_are_counted_and_left_out():
    totals, values = measured([-1.0, math.nan, -1.0, -1.0], [-1.5, -1.0, -math.inf, -1.5], ("xx", "xx"))
    assert values["mismatch/unusable_fraction"] == 0.5
    assert totals.mean("k1") == pytest.approx(-0.5)
    assert too_many_unusable(totals, 0.5) == ""
    message = too_many_unusable(totals, 0.4)
    assert message.startswith("2 of 4 trained tokens") and "rl.max_unusable_fraction = 0.4" in message
    assert too_many_unusable(Totals.empty(), 0.0) == ""


def test_few_usable_tokens_are_not_filled_up_with_others():
    case = twin.random_case([3], 0, "near")
    batch, tokens, columns = twin.tokens_and_columns(case, [0], torch.float64)
    found = objective(
        RlConfig(), tokens, UpdateTotals(3, 1), logp_N=t(-1, math.nan, -1), entropy_N=columns["entropy"], old_logp_N=None,
        engine_logp_N=t(-1, -1, -1.5), advantage_N=columns["advantage"],
    )  # fmt: skip
    assert [w.position for w in worst_tokens([worst_rows(found, tokens, 0)], [batch])] == [case[0][2].position, case[0][0].position]


def test_a_clipped_sequence_does_not_clip_tokens_that_are_masked():
    rl = RlConfig(surrogate="gspo", correction="none")
    totals, _ = measured([0.5, math.nan], [0.0, 0.0], ("xx",), old=[0.0, 0.0], rl=rl)
    assert (totals.sum("clipped"), totals.mean("clipped")) == (1.0, 1.0)


def test_the_worst_tokens_come_by_name_and_place_and_each_once():
    case = twin.random_case([3, 0, 9, 4], 1, "far")
    case[2][4].engine = case[0][1].engine = math.inf  # not usable, so not among the worst
    packs = [twin.tokens_and_columns(case, order, torch.float64) for order in ([2, 1], [0, 3])]
    rows = []
    for j, (_, tokens, columns) in enumerate(packs):
        found = objective(
            RlConfig(), tokens, UpdateTotals(16, 3), logp_N=columns["logp"], entropy_N=columns["entropy"], old_logp_N=None,
            engine_logp_N=columns["engine"], advantage_N=columns["advantage"],
        )  # fmt: skip
        rows.append(worst_rows(found, tokens, j))
    found = worst_tokens(rows, [batch for batch, _, _ in packs])
    every = [(f"s{i}", tok.position, tok.logp, tok.engine) for i, seq in enumerate(case) for tok in seq if tok.engine < 0]
    every.sort(key=lambda x: -abs(x[2] - x[3]))
    assert [(w.name, w.position) for w in found] == [x[:2] for x in every[:NUM_WORST]]
    assert all(w.token_id == w.position for w in found), "the case's token ids are its places"
    assert worst_of([*found, *found]) == found
    assert worst_of([WorstToken("b", 1, 0, 0.0, 1.0), WorstToken("a", 2, 0, 1.0, 0.0)])[0].name == "a"
    assert worst_tokens([], []) == []


class Waits(TorchDispatchMode):
    """The operations for which a GPU would be waited: those that read a value, whose shape hangs on one, or that bring a tensor over.
    A number alone (no dimension) travels inside the launch."""

    READING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "repeat_interleave")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        by_mask = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        brought = name == "lift_fresh" and args[0].ndim > 0
        if by_mask or brought or name in self.READING or "unique" in name:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_what_waits():
    with Waits() as waits:
        x = torch.tensor([1.0, 2.0])
        float(x.sum()), x[x > 1], x.unique()
    assert waits.found == ["lift_fresh", "_local_scalar_dense", "index", "_unique2"]


@pytest.mark.parametrize("correction", sorted(PRESETS))
@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
def test_neither_loss_nor_diagnostics_wait_for_a_gpu(surrogate, correction):
    case = twin.random_case([5, 0, 3], 3, "bad")
    _, tokens, columns = twin.tokens_and_columns(case, [0, 1, 2], torch.float32)
    rl = RlConfig(
        surrogate=surrogate, correction=correction, aggregation="sequence-mean", kl_coef=0.1, dual_clip=3.0, correction_veto=0.1,
        correction_normalize=True, entropy_coef=0.1,
    )  # fmt: skip
    logp, measured = columns["logp"].requires_grad_(), Totals.empty()
    with Waits() as waits:
        found = objective(
            rl, tokens, UpdateTotals(8, 2, 1.5), logp_N=logp, entropy_N=columns["entropy"], old_logp_N=columns["old"],
            engine_logp_N=columns["engine"], advantage_N=columns["advantage"], ref_logp_N=columns["ref"],
        )  # fmt: skip
        found.loss_sum.backward()
        measured.add(found, tokens)
        worst_rows(found, tokens, 0)
        weight_sums(correction_recipe(rl), found.correction, tokens)
    assert waits.found == [] and measured.sum("usable") > 0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("correction", ["tis", "seq-mis", "geo-rs-seq-tis"])
@pytest.mark.parametrize("surrogate", ["ppo", "gspo"])
def test_a_sequence_cut_over_context_parallel_ranks_is_still_one_sequence(surrogate, correction, ranks):
    """Ranks are threads here, and `across` adds up what they bring; loss, gradient and metrics are those of one rank."""
    case = twin.random_case([5, 0, 1, 7, 3], 3, "far")
    rl = RlConfig(surrogate=surrogate, correction=correction, aggregation="sequence-mean", reject_low=0.7, reject_high=1.4)
    batch, whole, columns = twin.tokens_and_columns(case, [3, 0, 1, 4, 2], torch.float64)

    def run(tokens, mine, totals):
        logp = columns["logp"][mine].clone().requires_grad_()
        found = objective(
            rl, tokens, totals, logp_N=logp, entropy_N=columns["entropy"][mine], old_logp_N=columns["old"][mine],
            engine_logp_N=columns["engine"][mine], advantage_N=columns["advantage"][mine],
        )  # fmt: skip
        found.loss_sum.backward()
        measured = Totals.empty()
        measured.add(found, tokens)
        return found.loss_sum.item(), logp.grad, measured

    every = torch.arange(len(columns["logp"]))
    alone = run(whole, every, UpdateTotals(*count([whole]).tolist()))
    shards = [take_shard(batch, rank=r, ranks=ranks, multiple=ranks).mine_M for r in range(ranks)]
    parts = [tokens_of(batch, mine) for mine in shards]
    totals = UpdateTotals(*sum(count([part]) for part in parts).tolist())
    assert (totals.tokens, totals.sequences) == (16, 4)
    brought, barrier, done = [torch.zeros(0)] * ranks, threading.Barrier(ranks, timeout=60), [None] * ranks

    def work(rank: int) -> None:
        def across(x: torch.Tensor) -> torch.Tensor:
            brought[rank] = x
            barrier.wait()
            total = torch.stack(brought).sum(0)
            barrier.wait()
            return total

        done[rank] = run(parts[rank].to("cpu", across), shards[rank], totals)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(ranks)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    together = Totals.empty()
    for _, _, own in done:
        together.merge(own)
    assert sum(loss for loss, _, _ in done) == pytest.approx(alone[0], rel=1e-12)
    assert torch.allclose(torch.cat([grad for _, grad, _ in done]), alone[1], rtol=1e-12, atol=0)
    assert torch.allclose(together.sums, alone[2].sums, rtol=1e-12)
    assert torch.equal(together.maxima, alone[2].maxima) or torch.allclose(together.maxima, alone[2].maxima, rtol=1e-12)
