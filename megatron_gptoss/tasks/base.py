"""What a task is: where prompts come from, what the model is told, what a turn of the model leads to, and what is good.

In: prompts and parsed assistant turns. Out: messages to append, or a verdict. A task knows neither tokens nor engines, and needs no torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from megatron_gptoss.data.harmony import Message, ParsedTurn
from megatron_gptoss.types import Prompt, RewardPart

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Verdict:
    """The end of a conversation."""

    reward: float
    parts: tuple[RewardPart, ...]
    answer: str | None
    labels: tuple[str, ...]
    stop_reason: str  # "final" or "malformed"; the collector adds the reasons a task cannot see


@dataclass(frozen=True)
class Demonstration:
    """A transcript to imitate: messages of all roles, of which the assistant's are trained."""

    messages: tuple[Message, ...]
    kind: str  # "clean", "guess", "stop", "digit"
    # (message, first character, end character) of assistant text that stands elsewhere already and has to be copied; the rest is format.
    # `data.harmony.render_marked(messages, tokenizer, copied)` says which tokens those are.
    copied: tuple[tuple[int, int, int], ...] = ()


class Conversation(Protocol):
    """One rollout in progress."""

    def opening(self) -> Sequence[Message]:
        """System, developer and user messages before the first assistant turn."""
        ...

    def reply(self, turn: ParsedTurn) -> Sequence[Message] | Verdict:
        """Tool results that answer `turn`, one for each of `turn.calls` in their order, or the verdict that ends the conversation.

        A task that wants one call at a time looks at `len(turn.calls)`. May be called from several threads at once.
        """
        ...

    def cut(self, reason: str) -> Verdict:
        """The verdict when the collector ends the conversation: "length", "context", "max_turns", "aborted"."""
        ...


class Task(Protocol):
    name: str

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """Prompts `start` .. `start + count - 1` of an endless stream that depends on the seed only. `heldout` and `train` never meet."""
        ...

    def epoch_size(self, split: Split) -> int | None:
        """How many prompts there are before the stream repeats; None when it never does."""
        ...

    def begin(self, prompt: Prompt) -> Conversation: ...

    def close(self) -> None:
        """Release processes the task holds."""
        ...


class Demonstrator(Protocol):
    """A task that can also write transcripts for a warm start."""

    def demonstration(self, rng: random.Random) -> Demonstration:
        """One transcript of a training prompt, drawn with `rng` alone; with the flaws the configuration asks for."""
        ...

    def copy_transcripts(self, split: Split, start: int, count: int) -> list[Demonstration]:
        """Clean transcripts of prompts `start` .. `start + count - 1`, with the copied text marked."""
        ...
