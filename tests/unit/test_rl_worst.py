"""The worst tokens of a step reach worst_tokens.jsonl with their own text and what stands before them."""

import json

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.loop.worst import CONTEXT, write_worst
from megatron_gptoss.types import Prompt, Rollout, RolloutGroup, WorstToken


def test_a_line_says_where_and_what(tmp_path):
    tokenizer = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))
    ids = tuple(tokenizer.encode("the first (37+58)*4 and then some more words of no meaning 95"))
    assert len(ids) > CONTEXT + 4
    prompt = Prompt("p/1", "arithmetic", "1+1", "2")
    rollout = Rollout(
        prompt=prompt, index=3, token_ids=ids, sampled=(False,) * len(ids), logp=(0.0,) * len(ids), versions=(0,), num_tool_calls=0,
        stop_reason="final", answer=None, reward=0.0, reward_parts=(),
    )  # fmt: skip
    groups, path = [RolloutGroup(prompt, (rollout,))], tmp_path / "worst_tokens.jsonl"
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
