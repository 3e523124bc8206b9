"""The worst tokens of a step reach worst_tokens.jsonl with their own text and what stands before them."""

import json

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.loop.worst import CONTEXT, write_worst
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup, WorstToken


def one_rollout():
    tokenizer = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))
    ids = tuple(tokenizer.encode("the first (37+58)*4 and then some more words of no meaning 95"))
    assert len(ids) > CONTEXT + 4
    prompt = Prompt("p/1", "arithmetic", "1+1", "2")
    rollout = Rollout(
        prompt=prompt, index=3, token_ids=ids, sampled=(False,) * len(ids), logp=(0.0,) * len(ids), versions=(), num_tool_calls=0,
        stop_reason="final", answer=None, reward=0.0, reward_parts=(),
    )  # fmt: skip
    return tokenizer, ids, [RolloutGroup(prompt, (rollout,))]


def test_a_line_says_where_and_what(tmp_path):
    tokenizer, ids, groups = one_rollout()
    path = tmp_path / "worst_tokens.jsonl"
    late = len(ids) - 1
    worst = [WorstToken("p/1#3", late, ids[late], -1.0, -3.0), WorstToken("p/1#3", 2, ids[2], -1.0, -2.0)]
    write_worst(path, 1, worst[:1], groups, tokenizer)
    write_worst(path, 2, worst[1:], groups, tokenizer)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["step"], first["sample"], first["position"], first["trainer_logp"], first["engine_logp"]) == (
        1,
        "p/1#3",
        late,
        -1.0,
        -3.0,
    )
    assert (first["text"], first["before"]) == (tokenizer.decode(ids[late:]), tokenizer.decode(ids[late - CONTEXT : late]))
    assert (second["text"], second["before"]) == (tokenizer.decode(ids[2:3]), tokenizer.decode(ids[:2]))


def test_a_resumed_run_has_each_step_once(tmp_path):
    tokenizer, ids, groups = one_rollout()
    path = tmp_path / "worst_tokens.jsonl"
    write = lambda step, gap: write_worst(path, step, [WorstToken("p/1#3", 2, ids[2], -1.0, -1.0 - gap)], groups, tokenizer)  # noqa: E731
    for step in (1, 2, 3, 4):
        write(step, 1.0)
    with path.open("a") as file:
        file.write('{"step": 4, "samp')  # killed while it wrote
    for step in (3, 4):  # the checkpoint was of step 2
        write(step, 2.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["engine_logp"]) for line in lines] == [(1, -2.0), (2, -2.0), (3, -3.0), (4, -3.0)]
