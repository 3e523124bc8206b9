"""What does a step cost when rollouts and updates wait for each other, and when they overlap?

    .venv/bin/python tools/bench_overlap.py simulate --seconds 1.0 --steps 20
    .venv/bin/python tools/bench_overlap.py compare runs/demo-sync runs/demo-overlap --skip 2

`simulate` tells both stories, loop/train.py and loop/overlap.py as they are, with engines and a trainer that sleep: an engine that decodes
so many conversations at once, a token each after a fixed time, and updates that take as long as a step's rollouts. It needs one core, and
says what the story itself allows. `compare` reads the metrics of two real runs. Out: seconds of a step by part, and their quotient.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import patch

import typer

from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.config.load import Loaded, load, parse_flags
from megatron_gptoss.config.plan import Cluster, RunPlan, make_plan
from megatron_gptoss.data.tokenizer import Tokenizer
from megatron_gptoss.errors import EngineFailed
from megatron_gptoss.loop import overlap, train
from megatron_gptoss.loop.session import Session
from megatron_gptoss.rollout.pool import PoolCounts
from megatron_gptoss.rollout.update_gate import UpdateGate
from megatron_gptoss.types import MicroBatch, PolicyVersion, StepStats, TurnRequest, TurnResult

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("wait", "rollout", "score", "update", "sync")
DIGITS = (1, 20)  # of the simulated answers, so that lengths differ as they do

app = typer.Typer(add_completion=False, no_args_is_help=True)


# ---- engines and a trainer that sleep --------------------------------------------------------------------------------------------------


class Places:
    """So many at once; those who wait are let in by order, then as they came."""

    def __init__(self, number: int) -> None:
        self.free, self.tickets = number, itertools.count()
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def one(self, order: int) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (order, next(self.tickets), turn))
        self._let_in()
        await turn
        try:
            yield
        finally:
            self.free += 1
            self._let_in()

    def _let_in(self) -> None:
        while self.free and self.waiting:
            self.free -= 1
            heapq.heappop(self.waiting)[-1].set_result(None)


class SleepingPool:
    """One engine: `running` conversations at once, each a token every `token_s`. The rest of a turn that an update interrupts is asked of
    it again."""

    def __init__(self, tokenizer: Tokenizer, running: int, token_s: float) -> None:
        self.places, self.token_s = Places(running), token_s
        self.counts = PoolCounts()
        self.version: PolicyVersion = -1
        self.gate = UpdateGate(self.abort)
        self.aborted: dict[str, asyncio.Event] = {}
        self.closed = False
        self.said: dict[str, int] = {}  # tokens of a conversation's answer so far
        self.sampled = Counter[PolicyVersion]()  # tokens by policy
        self.head = [tokenizer.special("<|channel|>"), *tokenizer.encode("final"), tokenizer.special("<|message|>")]
        self.digit, self.end = tokenizer.encode("7")[0], tokenizer.special("<|return|>")

    async def generate(self, request: TurnRequest) -> TurnResult:
        if self.closed:
            raise EngineFailed("a turn was asked for after the engines' end")
        async with self.gate.turn(request):
            self.aborted[request.request_id] = asyncio.Event()
            version, tokens, reason = self.version, [], "interrupted"
            async with self.places.one(request.order):
                while not self.aborted[request.request_id].is_set() and reason != "stop":
                    await asyncio.sleep(self.token_s)
                    tokens.append(self._next(request.conversation_id))
                    reason = "stop" if tokens[-1] == self.end else reason
            self.sampled[version] += len(tokens)
            return TurnResult(tuple(tokens), (-0.1,) * len(tokens), reason, version)

    def _next(self, conversation: str) -> int:
        place = self.said.get(conversation, 0)
        self.said[conversation] = place + 1
        answer = [*self.head, *[self.digit] * random.Random(conversation).randint(*DIGITS), self.end]
        return answer[place]

    async def abort(self, request_id: str) -> None:
        if request_id in self.aborted:
            self.aborted[request_id].set()

    async def publish(self, version: PolicyVersion) -> None:
        async with self.gate.update():
            self.version = version

    async def close(self) -> None:
        """As a real pool it goes down with turns in flight; whoever still asks is a fault."""
        self.closed = True


class SleepingWorld:
    """A trainer whose update takes `update_s`. It remembers what it was given."""

    healthy = True

    def __init__(self, update_s: float) -> None:
        self.update_s = update_s
        self.trained: list[list[str]] = []  # names of each update's samples

    def update(self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *_: Any) -> StepStats:
        time.sleep(self.update_s)
        batches = [batch for minibatch in minibatches for rank in minibatch for batch in rank]
        self.trained.append([name for batch in batches for name in batch.names])
        tokens = sum(batch.target_N.numel() for batch in batches)
        return StepStats(0.0, 1.0, 1e-3, tokens, len(minibatches), False, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)


class SleepingSession(Session):
    """A session without Ray, weights and checkpoints."""

    def with_fakes(self, pool: SleepingPool, world: SleepingWorld) -> SleepingSession:
        self._pool, self.trainer = pool, world  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def start_ray(self, **_: Any) -> None: ...
    def make_trainer(self, *_: Any, **__: Any) -> None: ...
    def make_engines(self) -> None: ...
    def start(self) -> None: ...
    def save(self) -> None: ...
    def say_resumed(self) -> None: ...

    def publish(self, version: int) -> None:
        self.run(self.pool.publish(version))  # pyright: ignore[reportArgumentType]


@contextmanager
def sleeping(
    story: ModuleType, pool: Callable[[Tokenizer], SleepingPool], world: SleepingWorld, progress: Progress | None = None
) -> Iterator[list[SleepingSession]]:
    """Inside the block `story` opens such sessions, which are listed. `progress`: where they go on from."""
    opened: list[SleepingSession] = []

    @contextmanager
    def open_session(loaded: Loaded, plan: RunPlan, command: str) -> Iterator[Session]:
        with ExitStack() as ending:
            session = SleepingSession(loaded, plan, command, ending)
            opened.append(session.with_fakes(pool(session.tokenizer), world))
            session.progress = progress or session.progress
            ending.callback(lambda: session.run(session.pool.close()))
            yield session

    with patch.object(story, "open_session", open_session):
        yield opened


SIMULATED = ("--run.eval_every=0", "--run.final_eval_prompts=0", "--parity.enabled=false", "--rl.drop_uniform_groups=false")


def simulated_run(
    folder: Path, name: str, rollout_s: float, update_s: float, max_lag_steps: int, *flags: str, progress: Progress | None = None
) -> tuple[Path, SleepingSession, SleepingWorld]:
    """One run of sleepers: so many seconds for a step's rollouts alone, and for its update. Returns its directory, and who took part."""
    configs = [str(ROOT / "configs" / file) for file in ("tiny.toml", "demo.toml")]
    options = (f"--run.dir={folder}", f"--run.name={name}", "--run.id=0", f"--rollout.max_lag_steps={max_lag_steps}")
    loaded = load(*parse_flags([*configs, *SIMULATED, *options, *flags]))
    plan = make_plan(loaded, Cluster(num_cpus=2, num_gpus=0))
    running = loaded.config.rollout.max_running
    tokens = 4 + sum(DIGITS) / 2  # of a mean answer
    token_s = rollout_s * running / plan.sequences_per_step / tokens
    world, story = SleepingWorld(update_s), overlap if max_lag_steps else train
    with sleeping(story, lambda tokenizer: SleepingPool(tokenizer, running, token_s), world, progress) as opened:
        overlap.run_overlapped(loaded, plan) if max_lag_steps else train.run_training(loaded, plan)
    return plan.run_dir, opened[0], world


# ---- what runs cost --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Means over the steps of a run, in seconds."""

    steps: int
    step_s: float
    parts: dict[str, float]
    lag_mean: float
    lag_max: float
    stale: float
    continued: float


def cost(run: Path, skip: int) -> Cost:
    """Without the first `skip` steps, in which engines and trainer have not met yet."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["step"] > skip and "time/step_s" in row]
    if not rows:
        raise typer.BadParameter(f"{run} has no steps after the first {skip}")

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows) / len(rows)

    parts = {part: mean(f"time/{part}_s") for part in PARTS if any(f"time/{part}_s" in row for row in rows)}
    return Cost(
        len(rows), mean("time/step_s"), parts, mean("rollout/lag_mean"), max(row.get("rollout/lag_max", 0.0) for row in rows),
        sum(row.get("rollout/groups_stale", 0.0) for row in rows), mean("rollout/continued_turns"),
    )  # fmt: skip


def tell(sync: Cost, overlapped: Cost) -> None:
    for name, each in (("synchronous", sync), ("overlapped", overlapped)):
        inside = " + ".join(f"{part} {seconds:.3f}" for part, seconds in each.parts.items())
        print(f"{name:12s} {each.step_s:.3f} s a step over {each.steps} steps ({inside})")
    print(f"overlapped / synchronous = {overlapped.step_s / sync.step_s:.3f}")
    print(
        f"token lag: mean {overlapped.lag_mean:.2f}, largest {overlapped.lag_max:.0f}; stale groups {overlapped.stale:.0f}; "
        f"{overlapped.continued:.1f} turns a step went on under another policy"
    )


@app.command()
def simulate(
    seconds: Annotated[float, typer.Option(help="Of a step's rollouts, and of its update.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 20,
    lag: Annotated[int, typer.Option(help="rollout.max_lag_steps of the overlapped one.")] = 1,
    skip: Annotated[int, typer.Option(help="First steps that are not counted.")] = 2,
) -> None:
    """Both stories with engines and a trainer that sleep."""
    with tempfile.TemporaryDirectory() as folder:
        # What a step's rollouts really take, the last stragglers included: the update is made as slow.
        alone, _, _ = simulated_run(Path(folder), "alone", seconds, 0.0, 0, "--run.steps=4")
        update_s = cost(alone, 1).parts["rollout"]
        runs = [simulated_run(Path(folder), f"lag{n}", seconds, update_s, n, f"--run.steps={steps}")[0] for n in (0, lag)]
        tell(cost(runs[0], skip), cost(runs[1], skip))


@app.command()
def compare(sync: Path, overlapped: Path, skip: Annotated[int, typer.Option(help="First steps that are not counted.")] = 2) -> None:
    """Two runs that were made: run directories of `gptoss train`."""
    tell(cost(sync, skip), cost(overlapped, skip))


if __name__ == "__main__":
    app()
