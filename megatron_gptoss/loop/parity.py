"""Before the first step: do trainer and engine give the same log-probs to the same tokens?

In: a session whose engines hold the trainer's weights. Out: the gap by position, or ParityError with the table. Sequences run past the
attention window on both sides of the prompt's end, since short ones hide a wrong window or YaRN. Naming the cause is a later issue's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_gptoss.data.harmony import generation_prefix, render
from megatron_gptoss.errors import ParityError
from megatron_gptoss.loop.session import Session
from megatron_gptoss.rl.parity import PositionGap, format_gaps, gap_by_position, within
from megatron_gptoss.types import Sample, TurnRequest, TurnResult

NEW_TOKENS = 24  # sampled after each prompt, as in training: decoding is the path that must agree


def probe_lengths(window: int, longest: int, new_tokens: int) -> list[int]:
    """Prompt lengths below, at and well beyond the window, as far as a conversation may grow."""
    wanted = [window // 2, window - new_tokens // 2, window + 1, 2 * window + 3, 4 * window + 5]
    return sorted({max(1, min(n, longest - new_tokens)) for n in wanted})


def check_parity(session: Session) -> list[PositionGap]:
    """Sample with the engine, score with the trainer, compare. Raises ParityError when any position is over `parity.max_abs_gap`."""
    config = session.config
    window, limit = config.model.sliding_window, config.parity.max_abs_gap
    longest = session.plan.engine_max_model_len
    new_tokens = min(NEW_TOKENS, longest // 2)
    prompts = _probe_prompts(session, probe_lengths(window, longest, new_tokens))
    results = session.run(_sample(session, prompts, new_tokens))
    samples, engine = [], []
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        n = len(prompt)
        samples.append(
            Sample(
                name=f"parity/{i}",
                token_ids=(*prompt, *result.token_ids),
                trained=(False,) * n + (True,) * len(result.token_ids),
                engine_logp=(0.0,) * n + result.logp,
                advantage=0.0,
            )
        )
        engine += [(n + t, lp) for t, lp in enumerate(result.logp)]
    trainer = session.score(samples)
    rows = gap_by_position(
        [position for position, _ in engine],
        [lp for sample in trainer for lp in sample],
        [lp for _, lp in engine],
        edges=[0, *(window * k // 2 for k in range(1, 2 + 2 * longest // window))],
    )
    if not within(rows, limit):
        raise ParityError(
            f"trainer and engine disagree on the same tokens: the largest gap may be {limit:g} nats (parity.max_abs_gap). "
            f"The run does not start.\n{format_gaps(rows, limit=limit, window=window)}"
        )
    return rows


def _probe_prompts(session: Session, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Held-out prompts one after another, cut to length: real text of the task, as long as needed."""
    prompts, stream = [], []
    number = 0
    while len(stream) < max(lengths) + len(lengths):
        for prompt in session.task.prompts("heldout", number, 8):
            stream += render(session.task.begin(prompt).opening(), session.tokenizer) + generation_prefix(session.tokenizer)
        number += 8
    for i, length in enumerate(lengths):
        prompts.append(tuple(stream[i : i + length]))  # another start each time, so that no prefix is shared
    return prompts


async def _sample(session: Session, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> list[TurnResult]:
    requests = [
        TurnRequest(
            request_id=f"parity-{i}",
            conversation_id=f"parity-{i}",
            token_ids=prompt,
            max_new_tokens=new_tokens,
            stop_token_ids=(),
            temperature=session.config.rollout.temperature,
            seed=i if session.config.rollout.deterministic else None,
        )
        for i, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*(session.pool.generate(r) for r in requests)))
