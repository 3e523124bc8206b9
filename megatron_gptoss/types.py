"""What crosses a border between rooms: frozen records, shapes and units in the field comments.

In: nothing. Out: the records. No behaviour beyond `check()`, which raises ValueError when a record contradicts itself.

Shape legend: T tokens of one conversation or of one packed microbatch, S sequences, N predicted (trained) tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_gptoss.model.replay import Routes

PolicyVersion = int  # 0 is the policy a run starts from; each optimizer update that is published adds one


@dataclass(frozen=True)
class Prompt:
    """One problem, as a task poses it."""

    id: str  # stable and unique within a run: "arithmetic/train/17"
    task: str  # registry name of the task that can reward it
    text: str  # the user's words
    gold: str  # reference answer, in the form the task compares with


@dataclass(frozen=True)
class TurnRequest:
    """One assistant turn asked of an engine. Token ids in."""

    request_id: str  # unique over the run, also over restarts of an engine
    conversation_id: str  # turns of one conversation prefer the same engine (prefix cache)
    token_ids: tuple[int, ...]  # [T] everything so far
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]  # sampling ends after one of these; it is part of the result
    temperature: float
    seed: int | None = None  # None: the engine's own stream
    order: int = 0  # turns of a lower one are served first, whenever they come
    interruptible: bool = False  # an update need not wait for it: it then ends early, with stop reason "interrupted"


@dataclass(frozen=True)
class TokenRoutes:
    """Which experts an engine ran the first tokens of a conversation through. Bytes: small on the way, and records stay comparable."""

    experts: bytes  # uint8 [T, num_layers, top_k]; a row (one token in one layer) of zeros is missing
    num_layers: int
    top_k: int  # experts per token, at least 2: with one a row of zeros would be expert 0
    num_experts: int  # of a layer, at most 256
    num_rerouted: int = 0  # rows that a later turn ran again and sent elsewhere; `experts` keeps what the token after was sampled from

    @property
    def num_tokens(self) -> int:
        return len(self.experts) // (self.num_layers * self.top_k)

    def check(self) -> None:
        if self.num_layers < 1 or self.top_k < 2 or self.num_experts > 256 or len(self.experts) % (self.num_layers * self.top_k):
            raise ValueError(
                f"{len(self.experts)} bytes are no routes of {self.num_layers} layers with {self.top_k} of {self.num_experts} experts"
            )


@dataclass(frozen=True)
class TurnResult:
    """One assistant turn as an engine sampled it. Token ids and log-probs out."""

    token_ids: tuple[int, ...]  # [T] new tokens only, the stop token included
    logp: tuple[float, ...]  # [T] log-prob under the distribution sampled from (temperature applied), nats
    stop_reason: str  # "stop" | "length" | "abort" | "interrupted" (by an update: the rest can be asked for)
    version: PolicyVersion  # weights that sampled it
    routes: TokenRoutes | None = None  # of the request's tokens and the new ones but the last, which was never run; None: not asked for

    def check(self) -> None:
        if len(self.token_ids) != len(self.logp):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logp)} log-probs")
        if self.stop_reason not in ("stop", "length", "abort", "interrupted"):
            raise ValueError(f"unknown stop reason {self.stop_reason!r}")


@dataclass(frozen=True)
class RewardPart:
    """One term of a reward, kept apart for the archive."""

    name: str
    value: float


@dataclass(frozen=True)
class VersionRun:
    """So many sampled tokens in a row are of one policy."""

    version: PolicyVersion
    num_tokens: int


@dataclass(frozen=True)
class Rollout:
    """One finished conversation with its reward. What is trained is exactly what was sampled."""

    prompt: Prompt
    index: int  # place in its group, 0 .. group_size-1
    token_ids: tuple[int, ...]  # [T] the whole conversation, append-only over turns
    sampled: tuple[bool, ...]  # [T] True where the engine sampled the token (these are trained)
    logp: tuple[float, ...]  # [T] the engine's log-prob where sampled, 0.0 elsewhere, nats
    versions: tuple[VersionRun, ...]  # of the sampled tokens, in their order; two neighbours differ, within a turn too
    num_tool_calls: int
    stop_reason: str  # "final" | "malformed" | "length" (turn too long) | "context" (conversation too long) | "max_turns" | "aborted"
    answer: str | None  # as parsed from the final channel
    reward: float
    reward_parts: tuple[RewardPart, ...]
    labels: tuple[str, ...] = ()  # task's own words about the behaviour: "no-call", "stopped-early", "right", …
    routes: TokenRoutes | None = None  # of the first tokens; the last sampled one has none. None: not asked for

    def check(self) -> None:
        T = len(self.token_ids)
        if self.routes is not None:
            self.routes.check()
            if self.routes.num_tokens > T:
                raise ValueError(f"rollout {self.prompt.id}#{self.index}: {T} tokens, but routes of {self.routes.num_tokens}")
        if not (len(self.sampled) == len(self.logp) == T):
            raise ValueError(f"rollout {self.prompt.id}#{self.index}: {T} tokens, {len(self.sampled)} flags, {len(self.logp)} log-probs")
        if any(lp != 0.0 for lp, s in zip(self.logp, self.sampled, strict=True) if not s):
            raise ValueError(f"rollout {self.prompt.id}#{self.index}: a log-prob on a token that was not sampled")
        if self.sampled and self.sampled[0]:
            raise ValueError(f"rollout {self.prompt.id}#{self.index}: the first token cannot be sampled")
        counted, sampled = sum(run.num_tokens for run in self.versions), sum(self.sampled)
        if counted != sampled or any(run.num_tokens < 1 for run in self.versions):
            raise ValueError(f"rollout {self.prompt.id}#{self.index}: {sampled} sampled tokens, but policy versions {self.versions}")
        if any(one.version == next_.version for one, next_ in pairwise(self.versions)):
            raise ValueError(f"rollout {self.prompt.id}#{self.index}: neighbours of one policy version in {self.versions}")


@dataclass(frozen=True)
class RolloutGroup:
    """All rollouts of one prompt; advantages compare them with each other."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class Sample:
    """One sequence to train on."""

    name: str  # "<prompt id>#<index>", for messages and dumps
    token_ids: tuple[int, ...]  # [T]
    trained: tuple[bool, ...]  # [T] True where the token's log-prob enters the loss; never the first
    engine_logp: tuple[float, ...]  # [T] nats, 0.0 where not trained
    advantage: float  # of all trained tokens of the sequence
    token_advantages: tuple[float, ...] = ()  # [T], 0.0 where not trained, instead of `advantage` where tokens differ; (): they do not
    routes: TokenRoutes | None = None  # the engine's, of the first tokens
    values: tuple[float, ...] = ()  # [T] what a critic expected before each trained token, 0.0 elsewhere; (): no critic
    value_targets: tuple[float, ...] = ()  # [T] what it should have expected; nan on trained tokens that teach it nothing

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples for one forward and backward pass: no padding, one row. Tensors live on the CPU until a worker moves them."""

    names: tuple[str, ...]  # [S] sample names
    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, restarting at 0 in every sequence
    cu_seqlens: Tensor  # int32 [S+1], first 0, last T
    max_seqlen: int
    predict_N: Tensor  # int64, index t into T whose *next* token t+1 is trained
    target_N: Tensor  # int64, that next token
    sample_N: Tensor  # int64, which of the S sequences it belongs to
    advantage_N: Tensor  # float32
    engine_logp_N: Tensor  # float32, nats
    routes: Routes | None = None  # the engine's, of the T tokens and all layers; None when no sample has any
    value_N: Tensor | None = None  # float32, a critic's before the step; None: no critic
    value_target_N: Tensor | None = None  # float32, nan where the critic learns nothing

    def check(self) -> None:
        T, N = self.tokens_T.numel(), self.predict_N.numel()
        if int(self.cu_seqlens[-1]) != T or len(self.names) != self.cu_seqlens.numel() - 1:
            raise ValueError("cu_seqlens does not cover the packed tokens")
        for field in ("target_N", "sample_N", "advantage_N", "engine_logp_N", "value_N", "value_target_N"):
            if getattr(self, field) is not None and getattr(self, field).numel() != N:
                raise ValueError(f"{field} has {getattr(self, field).numel()} entries, predict_N has {N}")


@dataclass(frozen=True)
class Measure:
    """One number under its name in metrics.jsonl."""

    name: str
    value: float


@dataclass(frozen=True)
class WorstToken:
    """A token on which trainer and engine disagree more than on others."""

    name: str  # of its sample
    position: int  # in its sequence
    token_id: int
    trainer_logp: float  # nats
    engine_logp: float  # nats


@dataclass(frozen=True)
class SampleScores:
    """What an update knew of one sample's trained tokens. N of them, in their order."""

    name: str  # of the sample
    advantage: tuple[float, ...]  # [N]
    trainer_logp: tuple[float, ...]  # [N] nats, of the policy before the step's first update; nan where it could not be used


@dataclass(frozen=True)
class CriticStats:
    """What one step of the critic measured, over all ranks. Field comments give the metric name in metrics.jsonl."""

    loss: float  # critic/loss, of the first epoch: before the step
    clip_fraction: float  # critic/clip_fraction, share of tokens whose clipped value decided, over all updates
    grad_norm: float  # critic/grad_norm, before clipping, mean over the step's updates
    learning_rate: float  # critic/lr
    num_updates: int  # critic/updates
    skipped: bool  # True when an update was refused; those after it were not tried
    problem: str = ""  # when skipped
    value_mean: float = 0.0  # critic/value_mean, of the values that the step's advantages were made of
    explained_variance: float = 0.0  # critic/explained_variance, of their targets


@dataclass(frozen=True)
class StepStats:
    """What one training step measured, reduced over ranks and microbatches. Field comments give the metric name in metrics.jsonl."""

    loss: float  # train/loss
    grad_norm: float  # grad/norm, before clipping, mean over the step's updates
    learning_rate: float  # train/lr
    num_tokens: int  # train/tokens, trained tokens
    num_updates: int  # train/updates, optimizer updates made; above 0 the weights have changed
    skipped: bool  # True when an update was refused; those after it were not tried
    ratio_max_abs_dev: float  # policy/ratio_max_abs_dev
    clip_fraction: float  # policy/clip_fraction
    entropy: float  # policy/entropy, nats per trained token
    kl_ref: float  # policy/kl_ref, nats per trained token, 0.0 when there is no reference
    k1: float  # mismatch/k1, mean of (engine - trainer) log-prob
    k3: float  # mismatch/k3
    logp_abs_mean: float  # mismatch/logp_abs_mean
    logp_abs_max: float  # mismatch/logp_abs_max
    ess: float  # mismatch/ess, effective sample size of the token weights, 0..1
    truncated_fraction: float  # mismatch/truncated_fraction, share of token weights cut by the importance cap
    problem: str = ""  # when skipped: which microbatch, which value, where it was dumped
    measures: tuple[Measure, ...] = ()  # mismatch in more detail: by sequence, by position, by assistant turn
    worst: tuple[WorstToken, ...] = ()  # the largest gaps between trainer and engine first
    critic: CriticStats | None = None  # None: no critic
    scores: tuple[SampleScores, ...] = ()  # of every sample, when the update was asked to keep them


@dataclass(frozen=True)
class PeakMemory:
    """What one rank's GPU held at most, in bytes."""

    allocated: int  # tensors: torch.cuda.max_memory_allocated()
    reserved: int  # with the allocator's gaps: torch.cuda.max_memory_reserved()
    device: int  # in all, CUDA's own memory and other processes included: total - free of torch.cuda.mem_get_info()
    reserved_now: int = 0  # torch.cuda.memory_reserved(), not at most but as it is asked
