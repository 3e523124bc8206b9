"""Rollouts for whoever reads them: whole Harmony conversations with the tiny tokenizer, and text that means harm."""

from __future__ import annotations

from megatron_gptoss.config.schema import Config, TokenizerConfig
from megatron_gptoss.data.harmony import Message, generation_prefix, render
from megatron_gptoss.data.tokenizer import load_tokenizer
from megatron_gptoss.types import Prompt, RewardPart, Rollout, RolloutGroup, SampleScores, VersionRun

TINY = load_tokenizer(Config(tokenizer=TokenizerConfig(name="tiny")))
HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>&lt;{{script}} \x1b[31m "\\u003c" π日\u2028'


def conversation(prompt: Prompt, index: int, said: str, *, reward: float = 0.0, label: str = "right", question: str = "") -> Rollout:
    """A call, its result and a final answer. `said`: the arguments of the call. The engine's log-prob of its n-th token is -n / 8."""
    given = [Message("developer", "# Tools\nfunctions.calc(expression)"), Message("user", question or prompt.text)]
    prefix = generation_prefix(TINY)
    call = render([Message("assistant", said, "commentary", "functions.calc", "<|constrain|>json")], TINY)[len(prefix) :]
    answer = [*render([Message("tool", "95", "commentary", "assistant", author_name="functions.calc")], TINY), *prefix]
    final = render([Message("assistant", "95", "final")], TINY)[len(prefix) :]
    parts = [([*render(given, TINY), *prefix], False), (call, True), (answer, False), (final, True)]
    token_ids = [token for ids, _ in parts for token in ids]
    sampled = [flag for ids, flag in parts for _ in ids]
    numbers = iter(range(len(token_ids)))
    return Rollout(
        prompt=prompt,
        index=index,
        token_ids=tuple(token_ids),
        sampled=tuple(sampled),
        logp=tuple(-next(numbers) / 8 if flag else 0.0 for flag in sampled),
        versions=(VersionRun(3, len(call)), VersionRun(4, len(final))),
        num_tool_calls=1,
        stop_reason="final",
        answer="95",
        reward=reward,
        reward_parts=(RewardPart("right", reward),),
        labels=(label,),
    )


def scores_of(rollout: Rollout, name: str, *, advantage: float = 0.5, gap: float = 0.25) -> SampleScores:
    """The trainer says `gap` more than the engine of every token."""
    logp = [x for x, flag in zip(rollout.logp, rollout.sampled, strict=True) if flag]
    return SampleScores(name, (advantage,) * len(logp), tuple(x + gap for x in logp))


def a_step() -> list[RolloutGroup]:
    """Two groups: one whose rewards differ and that says hostile things, one that is always right."""
    first, second = Prompt("p/0", "arithmetic", HOSTILE, "95</script>"), Prompt("p/1", "arithmetic", "(37+58)*1", "95")
    return [
        RolloutGroup(first, (conversation(first, 0, HOSTILE, label="</script>"), conversation(first, 1, "37+58", reward=1.0))),
        RolloutGroup(second, tuple(conversation(second, i, "37+58", reward=1.0) for i in range(2))),
    ]
