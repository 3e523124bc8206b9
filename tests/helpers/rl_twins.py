"""The mathematics of rl/ once more in plain Python, a token at a time, straight from docs/rollout_correction.md; and random cases for it.

Sequences are lists of `Tok`. The twins themselves use neither torch nor rl/; `tokens_and_columns` hands a case over.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from megatron_gptoss.parallel.packing import make_microbatch
from megatron_gptoss.rl.tokens import Tokens, tokens_of
from megatron_gptoss.types import MicroBatch, Sample

LIMIT = 40.0  # exponents of the loss
FAR = 300.0  # exponents of the diagnostics
BAD = (math.nan, math.inf, -math.inf)


@dataclass
class Tok:
    logp: float
    old: float
    engine: float
    ref: float
    entropy: float
    advantage: float
    position: int = 0
    turn: int = 0
    # what the twin finds
    usable: bool = True
    weight: float = 0.0
    truncated: bool = False
    masked: bool = False
    rejected: bool = False
    ratio: float = 1.0
    clipped: bool = False
    loss: float = 0.0
    slope: float = 0.0  # d loss / d logp

    def before(self, on_policy: bool) -> float:
        return (self.logp if on_policy else self.old) if self.usable else 0.0


Case = list[list[Tok]]


def random_case(lengths: list[int], seed: int, style: str) -> Case:
    """`style`: "near" and "far" gaps between the policies, "huge" ones of up to 800 nats, or "bad" log-probs among near ones."""
    draw = random.Random(seed)
    width = {"near": 0.02, "far": 0.7, "huge": 0.7, "bad": 0.1}[style]

    def gap() -> float:
        if style == "huge" and draw.random() < 0.3:
            return draw.choice((-1, 1)) * draw.uniform(20.0, 800.0)
        return draw.gauss(0.0, width)

    def token() -> Tok:
        logp = -draw.expovariate(0.5)
        found = Tok(logp, logp + gap(), logp + gap(), logp + gap(), draw.uniform(0.0, 3.0), draw.gauss(0.0, 1.0))
        if style == "bad" and draw.random() < 0.4:
            setattr(found, draw.choice(("logp", "old", "engine", "ref", "entropy")), draw.choice(BAD))
        return found

    case = [[token() for _ in range(n)] for n in lengths]
    for seq in case:
        position, turn = draw.choice((1, 40, 126, 510, 2046)), 0
        for t in seq:
            t.position, t.turn = position, turn
            tool_tokens = draw.choice((0, 0, 2))
            position, turn = position + 1 + tool_tokens, turn + (tool_tokens > 0)
    return case


def tokens_and_columns(case: Case, order: list[int], dtype: torch.dtype) -> tuple[MicroBatch, Tokens, dict[str, torch.Tensor]]:
    """The sequences of a case that one microbatch holds, and the columns that `objective` is given."""
    names = ("logp", "old", "engine", "ref", "entropy", "advantage")
    columns = {name: torch.tensor([getattr(t, name) for i in order for t in case[i]], dtype=dtype) for name in names}
    places = [{t.position for t in case[i]} for i in order]
    rows = [[p in there for p in range(max(there, default=0) + 2)] for there in places]
    batch = make_microbatch([_sample(f"s{i}", row) for i, row in zip(order, rows, strict=True)])
    return batch, tokens_of(batch), columns


def packed(*rows: str) -> Tokens:
    """One sequence for each string: x a trained token, . another; each begins with one that is not trained."""
    return tokens_of(make_microbatch([_sample(f"s{i}", [False, *(c == "x" for c in row)]) for i, row in enumerate(rows)]))


def _sample(name: str, trained: list[bool]) -> Sample:
    """Token ids are places."""
    return Sample(name, tuple(range(len(trained))), tuple(trained), (0.0,) * len(trained), 0.0)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def exp_cut(x: float) -> float:
    return math.exp(min(max(x, -LIMIT), LIMIT))


def exp_slope(x: float) -> float:
    return exp_cut(x) if abs(x) <= LIMIT else 0.0


def find_usable(case: Case, *, on_policy: bool, with_ref: bool) -> None:
    for t in (t for seq in case for t in seq):
        given = [t.logp, t.engine] + ([] if on_policy else [t.old]) + ([t.ref] if with_ref else [])
        t.usable = all(map(math.isfinite, given))


# -- correction --------------------------------------------------------------------------------------------------------------------------


def correct(case: Case, name: str, *, cap, floor, low, high, veto, on_policy: bool) -> None:
    for seq in case:
        logs = [t.before(on_policy) - t.engine for t in seq if t.usable]
        product = sum(logs)
        mean = product / max(len(logs), 1)
        out_of_band = not math.log(low) <= mean <= math.log(high)
        whole = {
            "seq-is": product, "seq-tis": product, "seq-mis": product, "geo-tis": mean, "geo-mis": mean, "geo-rs-seq-tis": product,
        }.get(name)  # fmt: skip
        reject = (
            (name.startswith("geo-rs") and out_of_band)
            or (name == "seq-mis" and product > math.log(cap))
            or (name == "geo-mis" and not math.log(floor) <= mean <= math.log(cap))
            or (veto > 0 and any(log < math.log(veto) for log in logs))
        )
        for t in seq:
            t.weight, t.truncated, t.masked, t.rejected = 0.0, False, False, reject
            if not t.usable or reject:
                continue
            log = whole if whole is not None else t.before(on_policy) - t.engine
            if name in ("none", "geo-rs"):
                t.weight = 1.0
            elif name in ("tis", "seq-tis", "geo-tis", "geo-rs-tis", "geo-rs-seq-tis"):
                t.weight, t.truncated = (cap, True) if log > math.log(cap) else (math.exp(log), False)
            elif name == "mis":
                t.masked = log > math.log(cap)
            elif name == "icepop":
                t.masked = not math.log(floor) <= log <= math.log(cap)
            if (name in ("mis", "icepop") and not t.masked) or name in ("seq-is", "seq-mis", "geo-mis"):
                t.weight = math.exp(min(log, LIMIT))


def mean_weight(case: Case, name: str) -> float:
    if name.startswith("seq") or name in ("geo-tis", "geo-mis", "geo-rs-seq-tis"):
        kept = [[t.weight for t in seq if t.weight > 0] for seq in case]
        weights = [w[0] for w in kept if w]
    else:
        weights = [t.weight for seq in case for t in seq if t.weight > 0]
    return sum(weights) / len(weights) if weights and sum(weights) else 1.0


# -- the loss ----------------------------------------------------------------------------------------------------------------------------


def surrogate(t: Tok, kind: str, log_ratio: float, *, low: float, high: float, dual: float) -> None:
    a, r = t.advantage, exp_cut(log_ratio)
    near = min(max(r, 1 - low), 1 + high)
    t.ratio = r
    if kind == "cispo":
        t.loss, t.slope, t.clipped = -near * a * t.logp, -near * a, near != r
        return
    t.clipped = near * a < r * a
    t.loss, t.slope = (-near * a, 0.0) if t.clipped else (-r * a, -a * exp_slope(log_ratio))
    if dual and a < 0 and t.loss > -dual * a:
        t.loss, t.slope, t.clipped = -dual * a, 0.0, True


def kl(kind: str, logp: float, ref: float, old: float) -> tuple[float, float]:
    """Value and derivative by logp."""
    d = logp - ref
    if kind == "k1":
        return d, 1.0
    if kind == "k2":
        return d * d / 2, d
    gap = min(-d, LIMIT)
    k3, slope = math.exp(gap) - gap - 1, (1 - math.exp(gap) if -d <= LIMIT else 0.0)
    if kind == "k3":
        return k3, slope
    return exp_cut(logp - old) * k3, exp_slope(logp - old) * k3 + exp_cut(logp - old) * slope


@dataclass
class Found:
    loss_sum: float = 0.0
    size: float = 0.0  # sum of |terms|, for the tolerance
    slopes: list[list[float]] | None = None


def objective(case: Case, rl, *, on_policy: bool, with_ref: bool) -> Found:
    """Fills the tokens' fields. rl: RlConfig."""
    find_usable(case, on_policy=on_policy, with_ref=with_ref)
    correct(
        case, rl.correction, cap=rl.correction_cap, floor=rl.correction_floor, low=rl.reject_low, high=rl.reject_high,
        veto=rl.correction_veto, on_policy=on_policy,
    )  # fmt: skip
    by = mean_weight(case, rl.correction) if rl.correction_normalize else 1.0
    total = sum(map(len, case))
    sequences = sum(1 for seq in case if seq)
    found = Found(slopes=[])
    for seq in case:
        logs = [t.logp - t.before(on_policy) for t in seq if t.usable]
        mean = sum(logs) / max(len(logs), 1)
        each = {
            "token-mean": 1.0,
            "sequence-mean": total / max(sequences * len(seq), 1),
            "sequence-sum": total / max(sequences, 1) / (rl.aggregation_length or 1),
        }[rl.aggregation]  # fmt: skip
        found.slopes.append([])
        for t in seq:
            value = slope = 0.0
            if t.usable:
                log = mean if rl.surrogate == "gspo" else t.logp - t.before(on_policy)
                surrogate(t, rl.surrogate, log, low=rl.clip_low, high=rl.clip_high, dual=rl.dual_clip)
                value, slope = t.weight / by * t.loss, t.weight / by * t.slope
                if math.isfinite(t.entropy):
                    value -= rl.entropy_coef * t.entropy
                if with_ref and rl.kl_coef and rl.kl_in == "loss":
                    k, dk = kl(rl.kl_estimator, t.logp, t.ref, t.before(on_policy))
                    value, slope = value + rl.kl_coef * k, slope + rl.kl_coef * dk
                    found.size += abs(each * rl.kl_coef * k)
                found.size += abs(each * t.weight / by * t.loss) + 1.0
            else:
                t.clipped, t.ratio = False, 1.0
            found.loss_sum += each * value
            found.slopes[-1].append(each * slope)
    return found


# -- what is measured --------------------------------------------------------------------------------------------------------------------


def measures(case: Case, *, on_policy: bool, with_ref: bool) -> dict[str, float]:
    """Under the names of Totals.sums, and the derived ones of metrics.jsonl. The tokens' fields must have been filled."""
    all_tokens = [t for seq in case for t in seq]
    tokens = [t for t in all_tokens if t.usable]
    gaps = [t.before(on_policy) - t.engine for t in tokens]
    seqs = [kept for seq in case if (kept := [t for t in seq if t.usable])]
    sums = [sum(t.before(on_policy) - t.engine for t in seq) for seq in seqs]
    cut = lambda x: min(max(x, -FAR), FAR)  # noqa: E731
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    rhos, seq_rhos = [math.exp(cut(g)) for g in gaps], [math.exp(cut(s)) for s in sums]
    weights = [t.weight for t in tokens]

    def ess(values: list[float]) -> float:
        squares = len(values) * sum(v * v for v in values)
        return (1.0 if not values else 0.0) if not squares else sum(values) ** 2 / squares

    log_ppl, log_ppl_engine = (
        mean([mean([-f(t) for t in seq]) for seq in seqs]) for f in (lambda t: t.before(on_policy), lambda t: t.engine)
    )
    buckets: dict[str, float] = {}
    edges = (0, 128, 512, 2048, 8192, 32768)
    places = {f"position/{a}": [t for t in tokens if t.position >= a and all(t.position < b for b in edges if b > a)] for a in edges}
    places |= {f"turn/{k}": [t for t in tokens if min(t.turn, 7) == k] for k in range(8)}
    for bucket, inside in places.items():
        own = [t.before(on_policy) - t.engine for t in inside]
        if own:
            buckets[f"mismatch_{bucket}/k1"] = mean([-g for g in own])
            buckets[f"mismatch_{bucket}/k3"] = mean([math.expm1(cut(g)) - cut(g) for g in own])
            buckets[f"mismatch_{bucket}/logp_abs_mean"] = mean([abs(g) for g in own])
            buckets[f"mismatch_{bucket}/logp_abs_max"] = max(map(abs, own))
    return buckets | {
        "kl_ref": mean([kl("k3", t.logp, t.ref, 0.0)[0] for t in tokens]) if with_ref else 0.0,
        "entropy": mean([t.entropy if math.isfinite(t.entropy) else 0.0 for t in tokens]),
        "k1": mean([-g for g in gaps]),
        "k3": mean([math.expm1(cut(g)) - cut(g) for g in gaps]),
        "logp_abs": mean([abs(g) for g in gaps]),
        "logp_abs_max": max(map(abs, gaps), default=0.0),
        "ess": ess(weights),
        "clipped": mean([t.clipped for t in tokens]),
        "truncated": mean([t.truncated for t in tokens]),
        "mismatch/chi2": mean([r * r for r in rhos]) - 1 if rhos else 0.0,
        "mismatch/chi2_seq": mean([r * r for r in seq_rhos]) - 1 if seq_rhos else 0.0,
        "mismatch/ess_seq": ess(seq_rhos),
        "mismatch/log_ppl": log_ppl,
        "mismatch/log_ppl_engine": log_ppl_engine,
        "mismatch/log_ppl_diff": log_ppl - log_ppl_engine,
        "mismatch/log_ppl_abs_diff": mean([abs(s) / len(seq) for s, seq in zip(sums, seqs, strict=True)]),
        "mismatch/log_ppl_abs_diff_max": max((abs(s) / len(seq) for s, seq in zip(sums, seqs, strict=True)), default=0.0),
        "mismatch/masked_fraction": mean([t.masked for t in tokens]),
        "mismatch/rejected_fraction": mean([t.rejected for t in tokens]),
        "mismatch/truncated_seq_fraction": mean([any(t.truncated for t in seq) for seq in seqs]),
        "mismatch/rejected_seq_fraction": mean([seq[0].rejected for seq in seqs]),
        "mismatch/weight_mean": mean(weights),
        "mismatch/unusable_fraction": (len(all_tokens) - len(tokens)) / len(all_tokens) if all_tokens else 0.0,
    }  # fmt: skip


# -- advantages --------------------------------------------------------------------------------------------------------------------------


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """From the definition: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (i - t) * deltas[i] for i in range(t, len(deltas))) for t in range(len(deltas))]


def compared(scores: list[float], kind: str) -> list[float]:
    n = len(scores)
    if kind == "reinforce++":
        return list(scores)
    if n < 2:
        return [0.0] * n
    mean = sum(scores) / n
    if kind == "rloo":
        return [s - (sum(scores[:i]) + sum(scores[i + 1 :])) / (n - 1) for i, s in enumerate(scores)]
    std = math.sqrt(sum((s - mean) ** 2 for s in scores) / (n - 1)) + 1e-4 if kind == "group" else 1.0
    return [(s - mean) / std for s in scores]


def whitened(values: list[float]) -> list[float]:
    n = len(values)
    if n < 2:
        return [0.0] * n
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]
