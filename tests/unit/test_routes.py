"""An engine's routes on their way: added up over turns, kept in the archive, packed with the tokens."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from megatron_gptoss.config.load import load, parse_flags
from megatron_gptoss.config.plan import broken_rules
from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.errors import DataError, EngineFailed
from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.rl.advantages import AdvantageRule
from megatron_gptoss.rl.samples import make_samples
from megatron_gptoss.rollout.archive import read_archive, write_archive
from megatron_gptoss.rollout.collect import collect
from megatron_gptoss.rollout.routes import add_turn, token_routes
from megatron_gptoss.tasks.arithmetic import Arithmetic
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup, TokenRoutes, TurnRequest, TurnResult, VersionRun
from tests.helpers.routes import rows_of
from tests.unit.test_collect import LIMITS, ScriptedPool
from tests.unit.test_rl_trainer import TINY as TINY_FILE

L, K, E = 3, 2, 8
TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))


def rows(n: int, seed: int) -> torch.Tensor:
    """uint8 [n, L, K], no expert twice in a row."""
    return torch.rand(n, L, E, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :K].to(torch.uint8).contiguous()


def told(rows_TLK: torch.Tensor) -> TokenRoutes:
    return token_routes(rows_TLK.numpy(), E)


def request(tokens: int) -> TurnRequest:
    return TurnRequest("r", "c", tuple(range(tokens)), 20, (), 1.0)


def turn(new: int, routes: TokenRoutes | None, stop_reason: str = "stop") -> TurnResult:
    return TurnResult(tuple(range(new)), (-1.0,) * new, stop_reason, 0, routes)


# ---- over turns ---------------------------------------------------------------------------------------------------------------------


def test_what_an_earlier_turn_told_stays_and_what_it_could_not_know_is_added():
    """Turn 1: 4 tokens of prompt, 3 sampled, the last of them never run. Then 2 tokens of a tool. Turn 2: 4 sampled."""
    first, second = rows(6, 1), rows(12, 2)
    second[:6] = first
    second[5, 2] = second[5, 2].flip(0)  # the same experts in another order
    known = add_turn(None, request(4), turn(3, told(first)))
    assert rows_of(known).equal(first)
    both = add_turn(known, request(9), turn(4, told(second)))
    assert rows_of(both).equal(torch.cat([first, second[6:]])) and both.num_tokens == 9 + 4 - 1 and both.num_rerouted == 0


def test_a_prefix_that_was_run_again_otherwise_is_counted_and_not_believed():
    first, second = rows(6, 1), rows(12, 2)
    differ = sum(set(a.tolist()) != set(b.tolist()) for a, b in zip(first.flatten(0, 1), second[:6].flatten(0, 1), strict=True))
    known = add_turn(None, request(4), turn(3, told(first)))
    both = add_turn(known, request(9), turn(4, told(second)))
    assert rows_of(both).equal(torch.cat([first, second[6:]])) and both.num_rerouted == differ > 9
    third = torch.cat([rows_of(both), rows(3, 3)])
    assert add_turn(both, request(12), turn(4, told(third))).num_rerouted == differ, "counts add up over turns"


def test_a_missing_row_is_filled_by_a_later_turn_and_contradicts_nothing():
    whole = rows(12, 2)
    first = whole[:6].clone()
    first[1, 0], first[3] = 0, 0
    second = whole.clone()
    second[2] = 0  # and what only the earlier one knew stays
    both = add_turn(add_turn(None, request(4), turn(3, told(first))), request(9), turn(4, told(second)))
    assert rows_of(both).equal(whole) and both.num_rerouted == 0


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        (None, "ran 6 tokens and returned no routes"),
        (told(rows(7, 1)), "ran 6 tokens and returned routes of 7 tokens"),
        (told(rows(5, 1)), "returned routes of 5 tokens"),
        (told(torch.zeros(6, L, K, dtype=torch.uint8)), "all routes that the engine returned are zeros"),
        (told(rows(6, 1) + 1), "to expert 8 of 8"),
    ],
)
def test_routes_that_cannot_be_the_turns_stop_the_run(routes, why):
    with pytest.raises(EngineFailed, match=why):
        add_turn(None, request(4), turn(3, routes))


def test_an_aborted_turn_adds_nothing():
    known = told(rows(6, 1))
    assert add_turn(known, request(9), turn(0, None, "abort")) is known


class TellingPool(ScriptedPool):
    """An engine whose experts depend on a token and its place alone, as with a prefix cache."""

    async def generate(self, request):
        result = await super().generate(request)
        ran = (*request.token_ids, *result.token_ids)[:-1]
        table = rows(4096, 5)
        return replace(result, routes=told(table[[(31 * token + 7 * t) % 4096 for t, token in enumerate(ran)]]))


def conversation(**more) -> Rollout:
    prompts = [Prompt("p", "arithmetic", "(37+58)*4", "380")]
    story = collect(prompts, 1, TellingPool(), Arithmetic(0), TINY, LIMITS, run_seed=0, step=0, **more)  # type: ignore[arg-type]
    return asyncio.run(story)[0].rollouts[0]


def test_a_conversation_with_tools_has_every_row_but_the_last():
    rollout = conversation(routes=True)
    assert rollout.versions == (VersionRun(3, 32),) and rollout.num_tool_calls == 2
    assert rollout.routes.num_tokens == len(rollout.token_ids) - 1 and rollout.routes.num_rerouted == 0
    table = rows(4096, 5)
    assert rows_of(rollout.routes).equal(table[[(31 * token + 7 * t) % 4096 for t, token in enumerate(rollout.token_ids[:-1])]])
    assert conversation().routes is None, "nobody asked"


# ---- in the archive, and into a microbatch ---------------------------------------------------------------------------------------------


def test_the_archive_gives_back_every_row_and_old_archives_have_none(tmp_path):
    rollout = conversation(routes=True)
    rollout = replace(rollout, routes=replace(rollout.routes, num_rerouted=7))
    groups = [RolloutGroup(rollout.prompt, (rollout, replace(rollout, index=1, routes=None)))]
    path = tmp_path / "step-1.jsonl"
    write_archive(path, 1, groups, TINY)
    assert read_archive(path) == groups
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1]["routes"] is None and lines[0]["routes"]["num_experts"] == E
    path.write_text("\n".join(json.dumps({k: v for k, v in line.items() if k != "routes"}) for line in lines))
    assert all(r.routes is None for r in read_archive(path)[0].rollouts)
    lines[0]["routes"]["experts"] = "AAAA"
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(DataError, match=":1: this line is not a rollout: routes cannot be read"):
        read_archive(path)


def test_routes_are_packed_as_the_tokens_are():
    rollout = conversation(routes=True)
    (sample,) = make_samples([RolloutGroup(rollout.prompt, (rollout,))], AdvantageRule("group-mean"))
    other = replace(sample, name="without", routes=None)
    batch = make_microbatch([other, sample])
    n = len(sample.token_ids)
    assert (batch.routes.layers, batch.routes.num_experts, batch.routes.num_tokens) == ((0, 1, 2), E, 2 * n)
    assert batch.routes.experts_LTK.dtype == torch.uint8
    assert batch.routes.experts_LTK[:, n : 2 * n - 1].transpose(0, 1).equal(rows_of(sample.routes))
    assert batch.routes.missing_LT.sum(1).tolist() == [n + 1] * L
    assert make_microbatch([other]).routes is None


# ---- in the configuration ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rl.router_replay=scored"], ["rl.router_replay", 'rl.old_logp = "scored"']),
        (["--rl.router_replay=engine", "--model.num_experts_per_tok=1"], ["at least 2 experts a token", "model.num_experts_per_tok = 1"]),
        (["--rl.router_replay=engine", "--model.num_local_experts=512"], ["at most 256", "model.num_local_experts = 512"]),
    ],
)
def test_what_cannot_be_replayed_is_refused(flags, words):
    (message,) = broken_rules(load(*parse_flags([TINY_FILE, *flags])))
    assert all(word in message for word in words), message


def test_scored_routes_go_with_scored_log_probs():
    for more in ("--rl.old_logp=scored", "--rl.minibatches=2"):
        assert broken_rules(load(*parse_flags([TINY_FILE, "--rl.router_replay=scored", more]))) == []
