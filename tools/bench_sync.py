"""Times weight sync: from the trainer's layout to engines that generate again, with the share of each part, by a run's own machinery.

    python tools/bench_sync.py configs/tiny.toml --rollout.weight_sync=broadcast --rollout.weight_bucket_mib=0.25   # on a CPU: does it run?

20B shape, random weights, on GPUs: separate ones (NCCL), and one that trainer and engine share (CUDA IPC):

    python tools/bench_sync.py configs/20b.toml --parallel.data=1 --parallel.expert=1 --rollout.num_engines=1 --trainer.attention=triton
    python tools/bench_sync.py configs/20b.toml --parallel.data=1 --parallel.expert=1 --rollout.num_engines=1 --trainer.attention=triton \\
        --cluster.share_gpus=true --rollout.gpu_memory_fraction=0.4

What one of eight engines does in a step of 2,048 answers of 4,096 tokens, and how fast the whole model scores them on one GPU:

    python tools/bench_sync.py configs/20b.toml --parallel.data=1 --parallel.expert=1 --rollout.num_engines=1 --trainer.attention=triton \\
        --cluster.share_gpus=true --rollout.gpu_memory_fraction=0.6 --rl.router_replay=engine --only-time --answers 256 --tokens 4096

In: TOML files and dotted flags as `gptoss train` takes them. Out: tables; exit code 1 when what must be equal is not.

The session is that of a run, but for its ranks, which have no optimizer and no gradients, so that one GPU holds a 20B beside its engine,
and which draw their weights on their own device. Then:

1. `--updates` updates with the same weights, each timed: `sync` is what a run pays, from weights in the trainer's layout to engines that
   have confirmed version and digest and have their cache back; then one token is asked for. On shared GPUs the engines sleep before, which
   a run pays before it scores. Parts are the time of the GPU, or wall time on a CPU, on the lead rank, in the engine's actor and in its
   first worker; what runs side by side does not add up.
2. The same weights must change nothing: one digest, and deterministic engines would say the same.
3. Log-probs of trainer and engine on the same tokens, with weights A, with other weights B, and with A again: they follow. A random model
   in bfloat16 sends many tokens to other experts in the one than in the other; with --rl.router_replay=engine the trainer follows the
   engine's experts, and what is left is arithmetic.
4. Sentinels: every element of expert e of layer l becomes one number of its own, and the engine's parameters are read back.
5. With `--answers N`: N answers of `--tokens` tokens by all engines together, then scored by the trainer as a step does, both timed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_gptoss.config.load import Flag, Loaded, load, parse_flags
from megatron_gptoss.config.plan import make_plan
from megatron_gptoss.config.preflight import detect_cluster
from megatron_gptoss.errors import ConfigError, GptossError
from megatron_gptoss.loop.session import Session, open_session
from megatron_gptoss.obs.logs import last_lines
from megatron_gptoss.rl.samples import by_sample
from megatron_gptoss.trainer.worker import TrainerWorker
from megatron_gptoss.types import Sample, TurnRequest

if TYPE_CHECKING:
    from torch import Tensor

GIB = 2**30
PROMPTS, PROMPT_TOKENS = 4, 40


class BareRank(TrainerWorker):
    """A rank that can score and send, and has neither gradients nor an optimizer."""

    def start(self, host: str, port: int) -> int:
        from megatron_gptoss.trainer import passes

        parts: Any = passes
        parts.make_optimizer = parts.make_schedule = lambda *_args, **_kwargs: NoOptimizer()
        parts.DistributedDataParallel = lambda _config, _ddp, module: module
        return super().start(host, port)

    def _first_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors("A")

    def free_cache(self) -> None:
        """There are no gradients to give back."""
        import torch

        if self.settings.use_gpu:
            torch.cuda.empty_cache()

    def load_policy(self, which: str) -> None:
        self.trainer.load_hf(self._tensors(which))

    def _tensors(self, which: str) -> Iterator[tuple[str, Tensor]]:
        """Drawn where they are used: on the host 20 billion take minutes. "sentinels": see sentinel."""
        import torch

        from megatron_gptoss.checkpoint.weight_map import hf_shapes

        device = torch.device("cuda", 0) if self.settings.use_gpu else torch.device("cpu")
        model, dtype = self.settings.model, getattr(torch, self.settings.trainer.dtype)
        for name, shape in hf_shapes(model).items():
            digest = hashlib.sha256(f"{which}/{name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if which == "sentinels" and ".experts." in name:
                layer = int(name.split(".")[2])
                values = [sentinel(layer, expert, name, model.num_local_experts) for expert in range(shape[0])]
                tensor.copy_(torch.tensor(values, device=device).view(-1, *[1] * (len(shape) - 1)).expand(shape))
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
            elif name.endswith("sinks"):
                tensor.normal_(0.0, 1.0, generator=generator)
            else:
                tensor.normal_(0.0, model.initializer_range, generator=generator)
            yield name, tensor


class NoOptimizer:
    """Stands where the optimizer would, so that its memory is not taken."""

    def zero_grad(self) -> None: ...
    def reload_model_params(self) -> None: ...


KINDS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
ENGINE_NAMES = {"w13_weight": "gate_up_proj", "w13_bias": "gate_up_proj_bias", "w2_weight": "down_proj", "w2_bias": "down_proj_bias"}


def sentinel(layer: int, expert: int, name: str, num_experts: int) -> float:
    """A number that bfloat16 holds, of this expert's tensor alone (among 256 / experts layers and four tensors)."""
    kind = KINDS.index(name.rsplit(".", 1)[-1])
    return (1 + (layer * num_experts + expert) % 255) * 2.0 ** (-10 + 2 * kind) * (1 if kind % 2 else -1)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options, loaded = parse(arguments)
        return bench(options, loaded)
    except GptossError as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Loaded]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument(
        "--tokens", type=int, default=300, help="new tokens of an answer, where log-probs are compared and --answers are timed"
    )
    parser.add_argument("--answers", type=int, default=0, help="so many of them are sampled and scored, both timed")
    parser.add_argument("--folder", type=Path, help="for the run directory with its logs; default: a temporary one")
    parser.add_argument("--only-time", action="store_true", help="no comparison of log-probs and no sentinels")
    options, rest = parser.parse_known_args(arguments)
    if options.answers < 0:
        raise ConfigError(f"--answers {options.answers}: how many are to be sampled and scored; 0 or more, 0 for none.")
    paths, flags = parse_flags(rest)
    if options.layers:
        flags.append(Flag("model.num_hidden_layers", str(options.layers), "--layers"))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bench-sync-"))
    defaults = {
        "run.dir": str(folder),
        "run.name": "sync",
        "tokenizer.name": "tiny",  # no text is read
        "rollout.max_sequence_tokens": str(PROMPT_TOKENS + options.tokens),
        "rollout.max_turn_tokens": str(options.tokens),
        "trainer.tokens_per_microbatch": str(max(1024, PROMPTS * (PROMPT_TOKENS + options.tokens))),
        "rl.router_replay": "none",
    }
    given = {flag.key for flag in flags}
    flags += [Flag(key, value, "bench_sync") for key, value in defaults.items() if key not in given]
    return options, load(paths, flags)


def bench(options: argparse.Namespace, loaded: Loaded) -> int:
    plan = make_plan(loaded, detect_cluster())
    if plan.shortfall:
        raise ConfigError(plan.shortfall)
    console, logs = Console(width=150), plan.run_dir / "logs"
    console.print(f"logs: {logs}")
    try:
        with open_session(loaded, plan, "train") as session:
            began = time.perf_counter()
            session.worker = BareRank
            session.start_ray(num_actors=plan.world_size + plan.num_engines)
            session.make_trainer(loaded.config.rl, total_updates=1)
            session.make_engines()
            session.start()
            console.print(f"trainer and engines are up after {time.perf_counter() - began:.0f} s")
            return Bench(session, options, console).run()
    except BaseException:
        traceback.print_exc()
        for log in sorted(logs.glob("*.log")):
            print(f"---- {log.name} ends with", *last_lines(log, 60), sep="\n", file=sys.stderr)
        raise


class Bench:
    def __init__(self, session: Session, options: argparse.Namespace, console: Console) -> None:
        self.session, self.options, self.console = session, options, console
        self.version = 0
        self.failures: list[str] = []

    def run(self) -> int:
        first = self.update()
        self.console.print(f"the first update, which makes the connection: {first['sync']:.2f} s")
        rows = [self.update() for _ in range(self.options.updates)]
        self.report(rows)
        digests = {row["digest"] for row in rows} | {first["digest"]}
        self.check(len(digests) == 1, f"the same weights {1 + len(rows)} times: {len(digests)} digest")
        if not self.options.only_time:
            self.compare_log_probs()
            self.read_sentinels()
        if self.options.answers:
            self.time_answers(self.options.answers)
        self.memory()
        for failure in self.failures:
            self.console.print(f"FAILED: {failure}")
        return 1 if self.failures else 0

    def check(self, holds: bool, words: str) -> None:
        self.console.print(f"{'ok' if holds else 'FAILED'}: {words}")
        if not holds:
            self.failures.append(words)

    def update(self) -> dict[str, float]:
        """One update of all engines, timed, then a token of each."""
        s = self.session
        t0 = time.perf_counter()
        s.rest_engines()
        t1 = time.perf_counter()
        self.version += 1
        s.publish(self.version)
        t2 = time.perf_counter()
        s.run(self._sample(1, prompts=s.plan.num_engines))
        t3 = time.perf_counter()
        link = s.link
        parts = link.timings if link is not None else {}
        return {"sleep": t1 - t0, "sync": t2 - t1, "first token": t3 - t2, "digest": float(link.digest if link else 0), **parts}

    async def _sample(self, tokens: int, prompts: int) -> list[Sample]:
        session, vocabulary = self.session, self.session.config.model.vocab_size

        async def one(index: int) -> Sample:
            prompt = tuple((7919 * (index + 1) + 104729 * at * at) % vocabulary for at in range(PROMPT_TOKENS))
            request = TurnRequest(
                f"bench/{self.version}/{tokens}/{index}",
                f"c{index}",
                prompt,
                tokens,
                (),
                1.0,
                index if session.config.rollout.deterministic else None,
            )
            turn = await session.pool.generate(request)
            return Sample(
                name=f"bench/{index}",
                token_ids=(*prompt, *turn.token_ids),
                trained=(False,) * len(prompt) + (True,) * len(turn.token_ids),
                engine_logp=(0.0,) * len(prompt) + turn.logp,
                advantage=0.0,
                routes=turn.routes,
            )

        return list(await asyncio.gather(*(one(index) for index in range(prompts))))

    def report(self, rows: list[dict[str, float]]) -> None:
        table = Table(title=f"{self.session.plan.weight_sync}, {len(rows)} updates, seconds")
        for column in ("part", "median", "least", "most", "share of sync"):
            table.add_column(column, justify="left" if column == "part" else "right")
        whole = statistics.median(row["sync"] for row in rows)
        for part in rows[0]:
            if part == "digest":
                continue
            values = [row.get(part, 0.0) for row in rows]
            middle = statistics.median(values)
            table.add_row(part, f"{middle:.4f}", f"{min(values):.4f}", f"{max(values):.4f}", f"{100 * middle / whole:.1f} %")
        self.console.print(table)

    def gaps(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Mean and largest gap between the engine's log-probs and the trainer's, nats."""
        session, config = self.session, self.session.config
        packed = session.pack(samples)
        scores = session.world.score(packed, config.rollout.temperature, router_replay=config.rl.router_replay)
        scored = by_sample(session.world.by_microbatch(packed, scores))
        found = [
            abs(ours - theirs)
            for sample in samples
            for ours, theirs in zip(
                scored[sample.name], [x for x, t in zip(sample.engine_logp, sample.trained, strict=True) if t], strict=True
            )
        ]
        return statistics.fmean(found), max(found)

    def policy(self, which: str) -> None:
        world = self.session.world
        world._all("load other weights", "load_policy", [(which,)] * len(world.actors), world._change)

    def compare_log_probs(self) -> None:
        """A, then the engine's tokens of A under B, then B, then A."""
        s, found = self.session, {}
        for name in ("A", "B", "A again"):
            s.rest_engines()
            self.policy(name[0])
            self.update()
            samples = s.run(self._sample(self.options.tokens, PROMPTS))
            s.rest_engines()
            found[name] = (*self.gaps(samples), samples)
        s.rest_engines()
        self.policy("B")
        other_mean, _ = self.gaps(found["A"][2])
        for name, (mean, largest, _) in found.items():
            gap = f"mean gap {mean:.2g}, largest {largest:.2g} nats; other weights {other_mean:.2g}"
            self.check(mean < other_mean / 5, f"log-probs of trainer and engine with weights {name}: {gap}")

    def read_sentinels(self) -> None:
        s, model = self.session, self.session.config.model
        s.rest_engines()
        self.policy("sentinels")
        self.version += 1
        s.publish(self.version)
        wrong, seen = [], 0
        for slot in s.pool.slots:
            engine: Any = slot.engine
            for values in s.run(engine.expert_values()):
                for name, rows in values.items():
                    layer, kind = int(name.split(".layers.")[1].split(".")[0]), ENGINE_NAMES[name.rsplit(".", 1)[-1]]
                    for expert, (low, high) in enumerate(rows):
                        seen += 1
                        wanted = sentinel(layer, expert, kind, model.num_local_experts)
                        if (low, high) != (wanted, wanted) and not (kind == "down_proj_bias" and (low, high) == (0.0, 0.0)):
                            wrong.append(f"{name}[{expert}]: {low} to {high} instead of {wanted}")
        self.check(
            not wrong and seen > 0, f"{seen} tensors of single experts hold their sentinels" + "".join(f"\n  {w}" for w in wrong[:6])
        )

    def time_answers(self, answers: int) -> None:
        """Sampled by the engines, then scored by the trainer, twice: the first time it compiles."""
        s = self.session
        if not self.options.only_time:  # what is there by now are sentinels
            s.rest_engines()
            self.policy("A")
            self.update()
        t0 = time.perf_counter()
        samples = s.run(self._sample(self.options.tokens, answers))
        t1 = time.perf_counter()
        s.rest_engines()
        self.gaps(samples)
        t2 = time.perf_counter()
        mean, _ = self.gaps(samples)
        t3 = time.perf_counter()
        sampled, scored = answers * self.options.tokens, sum(len(sample.token_ids) for sample in samples)
        table = Table(title=f"{answers} answers of {self.options.tokens} tokens")
        for column in ("part", "seconds", "tokens", "tokens/s", "of them a GPU"):
            table.add_column(column, justify="left" if column == "part" else "right")
        engine_gpus = s.plan.num_engines * s.plan.engine_tensor_parallel
        for part, seconds, tokens, gpus in (("rollouts", t1 - t0, sampled, engine_gpus), ("scoring", t3 - t2, scored, s.plan.world_size)):
            table.add_row(part, f"{seconds:.1f}", f"{tokens:,}", f"{tokens / seconds:,.0f}", f"{tokens / seconds / gpus:,.0f}")
        self.console.print(table)
        self.console.print(f"scoring took {t2 - t1:.1f} s the first time; trainer and engine differ by {mean:.2g} nats a token")

    def memory(self) -> None:
        s = self.session
        for rank, peak in enumerate(s.world.peak_memory()):
            if peak is not None:
                self.console.print(
                    f"trainer rank {rank}: tensors at most {peak.allocated / GIB:.1f} GiB, its GPU in all now {peak.device / GIB:.1f} GiB"
                )
        for slot in s.pool.slots:
            engine: Any = slot.engine
            for worker, (tensors, device) in enumerate(s.run(engine.peak_memory())):
                self.console.print(
                    f"{engine.name} worker {worker}: tensors at most {tensors / GIB:.1f} GiB, its GPU in all now {device / GIB:.1f} GiB"
                )


if __name__ == "__main__":
    sys.exit(main())
