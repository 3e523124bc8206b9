"""What a run holds while it lasts: run directory, Ray, trainer, engines, task.

In: the configuration and its plan. Out: a started session, and its end without orphans, whatever ended it. The story itself is told in
train.py, sft.py and evaluate.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from megatron_gptoss.checkpoint.marker import layout_words, written_layout
from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.load import Loaded, load
from megatron_gptoss.config.placement import Place, same_gpu
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.rank_memory import fits_beside_a_starting_engine, trainer_memory
from megatron_gptoss.config.schema import Config, OptimizerFields
from megatron_gptoss.data.tokenizer import Tokenizer, load_tokenizer
from megatron_gptoss.errors import MachineError, RunFailed, StoppedEarly
from megatron_gptoss.loop.archiving import Archiving
from megatron_gptoss.loop.event_loop import EventLoop
from megatron_gptoss.loop.nodes import gpus_of, lost_nodes, too_few_gpus, wait_for_nodes
from megatron_gptoss.loop.orphans import Keeper
from megatron_gptoss.loop.ray_start import join_ray
from megatron_gptoss.loop.saves import Saves
from megatron_gptoss.loop.stop import StopRequest
from megatron_gptoss.loop.weights import WeightLink
from megatron_gptoss.obs.console import ALARM, Console
from megatron_gptoss.obs.manifest import write_manifest
from megatron_gptoss.obs.metrics import MetricsLog
from megatron_gptoss.obs.plan_table import predicted_and_measured
from megatron_gptoss.obs.run_dir import (
    RunDir,
    checkpoint_step,
    find_weights,
    is_run_dir,
    latest_checkpoint,
    torn_since,
    write_atomic,
)
from megatron_gptoss.obs.spans import FOLDER as TRACE_FOLDER
from megatron_gptoss.obs.spans import SPANS, TRACE, write_trace
from megatron_gptoss.parallel.packing import pack_step, work_of
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.rl.samples import by_sample
from megatron_gptoss.rollout.collect import CollectLimits, collect
from megatron_gptoss.rollout.handle import EngineHandle, start_engine
from megatron_gptoss.rollout.pool import EnginePool, InlinePolicy, Policy, PoolCounts, PoolLimits
from megatron_gptoss.rollout.vllm_settings import EngineSettings
from megatron_gptoss.tasks.base import Task
from megatron_gptoss.tasks.registry import make_task
from megatron_gptoss.trainer.how import CriticSettings
from megatron_gptoss.trainer.start import RankResources, TrainingWorld
from megatron_gptoss.trainer.worker import FirstWeights, TrainerSettings, TrainerWorker
from megatron_gptoss.types import CriticStats, MicroBatch, Prompt, RolloutGroup, Sample, StepStats

T = TypeVar("T")


@dataclass
class Clock:
    """Seconds spent in each part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with SPANS(part):
                yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


class Session:
    """Made by `open_session`. Whatever it starts it also puts on the stack that ends it, in the same line of thought."""

    def __init__(self, loaded: Loaded, plan: RunPlan, command: str, ending: ExitStack) -> None:
        self.loaded, self.plan, self.command, self.ending = loaded, plan, command, ending
        self.config: Config = loaded.config
        self.console = Console()
        self.clock = Clock()
        self.loop = ending.enter_context(EventLoop())
        self.stop = ending.enter_context(StopRequest())
        if plan.switches:
            self.console.alarm(f"{ALARM}: {'; '.join(plan.switches)}")
        self.tokenizer: Tokenizer = load_tokenizer(self.config)
        self.task: Task = make_task(self.config)
        ending.callback(self.task.close)
        self.progress = Progress(step=0, policy_version=0, prompt_cursor=0)
        self.checkpoint = latest_checkpoint(plan.run_dir) if plan.resumed else None
        if self.checkpoint is not None and not self.config.run.init:
            # A resume with configuration files of its own does not change where the run once started.
            self._set_init(load([RunDir(plan.run_dir).config_file]).config.run.init)
        self.first_weights = self._first_weights()
        self._say_torn()
        if self.first_weights.path and self.checkpoint is None:
            # The very checkpoint, once and for all: a run directory may grow a newer one, and a resume may be called from elsewhere.
            self._set_init(self.first_weights.path)
        self._metrics: MetricsLog | None = None
        ending.callback(self._close_records)  # first here and last to run: a run that ends early still writes how its last save went
        if self.checkpoint is None:
            self.dir = RunDir.create(plan.run_dir, self.config)
            self._open_records(None)
        else:
            self.dir = RunDir(plan.run_dir)  # its records are touched only when the checkpoint has been loaded
        self.trainer: TrainingWorld | None = None
        self.worker = TrainerWorker  # what a rank is; tools make their own
        self.link: WeightLink | None = None  # made with the first policy
        self._pool: EnginePool | None = None
        self._counts_before = PoolCounts()
        self.step_began = time.perf_counter()
        self._memory_shown = False
        saved_step = checkpoint_step(self.checkpoint) if self.checkpoint is not None else 0
        self.archiving = Archiving(ending, self.console)
        self._saves = Saves(self.dir, self.config, saved_step or 0, ending)
        self.nodes: list[str] = []  # Ray's ids, in the plan's order

    def _say_torn(self) -> None:
        """A newest checkpoint was chosen, here or by a run's name as init: say which newer ones were passed over."""
        chosen = self.checkpoint
        if chosen is None and self.config.run.init and is_run_dir(Path(self.config.run.init)):
            chosen = Path(self.first_weights.path)
        for name, why in torn_since(chosen) if chosen is not None else []:
            self.console.say(f"{name} is torn and passed over for {chosen}: {why}")

    def _set_init(self, path: str) -> None:
        self.config = self.config.model_copy(update={"run": self.config.run.model_copy(update={"init": path})})

    def _open_records(self, resumed_step: int | None) -> None:
        if resumed_step is not None:
            RunDir.resume(self.dir.path, self.config, resumed_step)
            for torn in self.dir.checkpoints.glob(".tmp-*"):
                shutil.rmtree(torn)
            for torn in self.dir.rollouts.glob(".*.jsonl*"):
                torn.unlink()
        write_manifest(self.dir, self.command, self.plan, self._backends(), resumed_step)
        self._metrics = MetricsLog(self.dir, resumed_step)

    def _close_records(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    @property
    def metrics(self) -> MetricsLog:
        assert self._metrics is not None, "records are opened when the trainer has started"
        return self._metrics

    def _backends(self) -> dict[str, str]:
        cpu = self.plan.device == "cpu"
        return {
            "attention": self.plan.attention_full,
            "attention_windowed": self.plan.attention_windowed,
            "attention_deterministic": str(self.config.trainer.deterministic_attention).lower(),
            "transformer": self.config.trainer.transformer,
            "experts": self.config.trainer.experts,
            "rotary": self.config.trainer.rotary,
            "dispatcher": self.config.trainer.dispatcher,
            "logprob": self.config.trainer.logprob,
            "collectives": "gloo" if cpu else "nccl",
            "engine": "vllm-cpu" if cpu else "vllm",
            "weight_sync": self.plan.weight_sync,
        }

    # -- where the time goes -------------------------------------------------------------------------------------------------------------

    @property
    def _traced(self) -> bool:
        return self.config.run.trace_steps > 0

    @property
    def _trace_folder(self) -> Path:
        return self.dir.path / TRACE_FOLDER

    def start_trace(self) -> None:
        """The driver's own spans; trainer and engines are told of it when they are made."""
        if self._traced:
            SPANS.open(self._trace_folder / "driver.jsonl")
            self.ending.callback(SPANS.close)

    def show_trace(self) -> None:
        """Where the time of the last steps went, on the terminal and in trace.json."""
        if self._traced and (rows := write_trace(self.dir.path, self.config.run.trace_steps)):
            self.console.table("where the time of a step goes", rows)
            self.console.say(f"trace      {self.dir.path / TRACE}, for ui.perfetto.dev or chrome://tracing")

    # -- start and stop ------------------------------------------------------------------------------------------------------------------

    def start_ray(self, *, num_actors: int) -> None:
        """Join the cluster, or start one for this run that ends with it. Nothing of Ray reaches the terminal."""
        self.ending.callback(Keeper().close)
        join_ray(self.config.cluster.address, num_cpus=max(num_actors, self.plan.cluster.num_cpus), log=self.dir.logs / "ray.log")
        self.ending.callback(ray.shutdown)
        self.nodes = wait_for_nodes(self.plan.placement.num_nodes)
        if self.plan.device == "cuda":
            wanted = self.plan.placement.gpu_nodes(with_engines=self.command != "sft")
            if problem := too_few_gpus(gpus_of(self.nodes), wanted):
                raise MachineError(problem)

    def make_trainer(self, optimizer: OptimizerFields, *, total_updates: int) -> None:
        c, plan = self.config, self.plan
        settings = TrainerSettings(
            model=c.model,
            trainer=c.trainer,
            optimizer=optimizer,
            shape=ParallelShape(
                world=plan.world_size,
                tensor=plan.tensor_parallel,
                pipeline=plan.pipeline_parallel,
                context=plan.context_parallel,
                expert=plan.expert_parallel,
                stage_layers=plan.layers_per_stage,
            ),
            first_weights=self.first_weights,
            total_updates=total_updates,
            keep_reference=self.command == "train" and c.rl.kl_coef > 0.0,
            critic=self._critic(),
            seed=c.run.seed,
            fault=c.parity.trainer_fault,
            diagnose=c.diagnose,
            first_port=c.cluster.first_port,
            num_ports=c.cluster.num_ports,
            use_gpu=plan.device == "cuda",
            log_dir=str(self.dir.logs.absolute()),
            trace_dir=str(self._trace_folder.absolute()) if self._traced else "",
        )
        resources = RankResources(plan.trainer_resources.num_cpus, plan.trainer_resources.num_gpus)
        self.trainer = TrainingWorld(settings, resources, [self.nodes[node] for node in plan.placement.trainer], self.worker)
        self.ending.callback(self.trainer.stop)
        self.ending.callback(lambda: self._saves.end(self.progress.step, self.console))

    def _critic(self) -> CriticSettings | None:
        """Warm-up, decay, betas and all else of its optimizer are the policy's; the rate is its own."""
        if self.command != "train" or not self.config.rl.has_critic:
            return None
        return CriticSettings(self.config.rl.model_copy(update={"lr": self.config.rl.critic_lr}), self.plan.critic_updates)

    def _first_weights(self) -> FirstWeights:
        """What the trainer starts from. A resumed run needs its first weights again only as the reference of the KL term."""
        if self.checkpoint is not None and self.config.rl.kl_coef == 0.0:
            return FirstWeights("checkpoint", str(self.checkpoint.absolute()))
        if not self.config.run.init:
            return FirstWeights("random")
        source = find_weights(Path(self.config.run.init))
        return FirstWeights("hf" if source.kind == "huggingface" else "checkpoint", str(source.path.absolute()))

    def make_engines(self) -> None:
        c, plan = self.config, self.plan
        model_dir = self.dir.path / "engine"
        model_dir.mkdir(exist_ok=True)
        write_hf_config(c.model, model_dir / "config.json", dtype=c.rollout.dtype)
        if plan.shares_gpus:
            self.world.find_places()  # engines are told whose GPUs they share

        def make(index: int, start: int) -> EngineHandle:
            name = f"engine-{index}" + (f"-restart{start}" if start else "")
            ranks = plan.placement.engine_ranks[index] if plan.shares_gpus else ()
            if ranks and start:
                self.world.free_caches()  # it needs the room that a dead one had
            settings = EngineSettings(
                model_dir=str(model_dir.absolute()),
                dtype=c.rollout.dtype,
                max_model_len=plan.engine_max_model_len,
                max_running=plan.engine_max_running,
                log_path=str((self.dir.logs / f"{name}.log").absolute()),
                trace_path=str((self._trace_folder / f"{name}.jsonl").absolute()) if self._traced else "",
                kv_cache_gib=c.rollout.kv_cache_gib,
                gpu_memory_fraction=c.rollout.gpu_memory_fraction,
                gpu_kv_cache_gib=c.rollout.gpu_kv_cache_gib,
                deterministic=c.rollout.deterministic,
                seed=c.run.seed + index,
                num_cpus=plan.engine_resources.num_cpus,
                num_gpus=plan.placement.engine_gpus,
                tensor_parallel=plan.engine_tensor_parallel,
                visible_gpus=tuple(f"GPU-{gpu}" for rank in ranks for gpu in self.world.places[rank].gpus),
                sleeps=plan.shares_gpus,
                experts_to_tell=c.model.num_local_experts if c.rl.router_replay == "engine" else 0,
            )
            return start_engine(settings, name, self.nodes[plan.placement.engines[index]])

        self._pool = EnginePool(
            make,
            plan.num_engines,
            PoolLimits(
                max_in_flight=plan.engine_max_in_flight,
                start_timeout_s=c.rollout.start_timeout_s,
                turn_timeout_s=c.rollout.turn_timeout_s,
                probe_every_s=c.rollout.probe_every_s,
                probe_timeout_s=c.rollout.probe_timeout_s,
                max_restarts=c.rollout.max_restarts,
                restart_window_s=c.rollout.restart_window_s,
            ),
        )
        self.ending.callback(lambda: self.run(self.pool.close()))

    @property
    def pool(self) -> EnginePool:
        assert self._pool is not None, "this session has no engines"
        return self._pool

    @property
    def world(self) -> TrainingWorld:
        assert self.trainer is not None
        return self.trainer

    def start(self) -> None:
        """Trainer and engines come up side by side, or on shared GPUs one after the other: an engine finds out how much memory it has, and
        must be alone meanwhile, unless it is told (rollout.gpu_kv_cache_gib); and there must be room for both as they start. On resume the
        trainer's state is restored and the run's records go on from there."""
        at_once = self.config.rollout.gpu_kv_cache_gib and fits_beside_a_starting_engine(self.config)
        alone = self.plan.shares_gpus and not at_once
        if alone and self._pool is not None:
            self.run(self.pool.start())
            self.rest_engines()
        thread = ThreadPoolExecutor(1)
        starting: Future[None] = thread.submit(self._start_trainer)
        # Before Ray goes down: the thread notices that its actors were killed, and must not call Ray after that.
        self.ending.callback(self._end_of, starting)

        async def both() -> None:
            trainer = asyncio.wrap_future(starting)
            if self._pool is None or alone:
                await trainer
            else:
                await asyncio.gather(trainer, self._pool.start())

        self.run(both())
        if self._pool is not None and not alone:
            self.rest_engines()
        self._tell_places([*self.world.places, *([] if self._pool is None else self._pool.places())])
        if self.checkpoint is not None:
            self._open_records(checkpoint_step(self.checkpoint))

    def _tell_places(self, places: Sequence[Place]) -> None:
        """Into logs/places.json, and on more than one node to the console too. Two on one GPU end the run."""
        write_atomic(self.dir.logs / "places.json", json.dumps([asdict(place) for place in places], indent=1) + "\n")
        if len({place.host for place in places}) > 1:
            where: dict[str, list[str]] = {}
            for place in places:
                where.setdefault(place.host, []).append(place.who)
            self.console.say("; ".join(f"{host}: {', '.join(who)}" for host, who in where.items()))
        trainers = places[: self.plan.world_size]
        together = [trainers, places[self.plan.world_size :]] if self.plan.shares_gpus else [places]
        for apart in together:
            if problem := same_gpu(apart):
                raise MachineError(problem)

    def _start_trainer(self) -> None:
        self.world.start()
        if self.checkpoint is not None:
            self.progress = self.world.resume(self.checkpoint.absolute())

    def _end_of(self, starting: Future[None]) -> None:
        if not starting.done():
            self.world.stop()
            wait([starting], timeout=20)

    def stop_if_asked(self) -> None:
        """Between steps: save what is not saved yet and raise StoppedEarly, when somebody has asked the run to stop."""
        if not self.stop.asked:
            return
        step = self.progress.step
        if step > self._saves.saved_step:
            self.save()
        self.finish_save()
        go_on = f"go on with --resume {self.dir.path}" if step else "nothing was finished yet"
        raise StoppedEarly(f"asked to stop (SIGUSR1): ended after step {step}; {go_on}")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the session's event loop and wait for it. The engines' tasks run there also between calls."""
        return self.loop.run(coroutine)

    # -- verbs that several stories share ------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Give the engines the trainer's weights, which wakes them; returns when each has confirmed version and checksum."""
        self.run(self.pool.publish(self._policy(version)))

    def _policy(self, version: int) -> Policy:
        kind = self.plan.weight_sync
        if kind == "inline":
            weights = self.world.export_weights()
            return InlinePolicy(version, weights.buckets, weights.digest)
        if self.link is None:
            c = self.config
            self.link = WeightLink(
                self.world,
                kind,
                dtype=c.rollout.dtype,
                bucket_bytes=int(c.rollout.weight_bucket_mib * 2**20),
                ports=range(c.cluster.first_port, c.cluster.first_port + c.cluster.num_ports),
                shares_gpus=self.plan.shares_gpus,
            )
        return self.link.policy(version)

    @SPANS("engines to sleep")
    def rest_engines(self) -> None:
        """Where they share the trainer's GPUs: their memory is the trainer's until the next publish."""
        if self.plan.shares_gpus:
            self.run(self.pool.sleep())

    def wake_engines(self) -> None:
        """Those that rest are given the policy again that they had."""
        if self.plan.shares_gpus and self.pool.asleep:
            self.publish(self.progress.policy_version)

    def collect(
        self, prompts: Sequence[Prompt], *, group_size: int, step: int, version: int, words: str, routes: bool = False
    ) -> list[RolloutGroup]:
        """`routes`: the engines' experts come with the rollouts, and are kept."""
        with self.console.progress(words, total=len(prompts) * group_size, unit="conversations") as bar:
            coming = self.collecting(
                prompts, group_size=group_size, step=step, version=version, routes=routes, progress=lambda _done, _total: bar.advance()
            )
            return self.run(coming)

    def collecting(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        step: int,
        version: int | None,
        routes: bool = False,
        order: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Coroutine[Any, Any, list[RolloutGroup]]:
        """What `collect` waits for, to be awaited in the event loop. `version` None: of whatever policy the engines hold meanwhile."""
        c = self.config.rollout
        limits = CollectLimits(
            max_turns=c.max_turns,
            max_turn_tokens=c.max_turn_tokens,
            max_sequence_tokens=c.max_sequence_tokens,
            temperature=c.temperature,
            seeded=c.deterministic,
        )
        return collect(
            prompts,
            group_size,
            self.pool,
            self.task,
            self.tokenizer,
            limits,
            run_seed=self.config.run.seed,
            step=step,
            version=version,
            routes=routes,
            order=order,
            progress=progress,
        )

    @SPANS("pack")
    def pack(self, samples: Sequence[Sample], *, minibatches: int = 1) -> list[list[list[MicroBatch]]]:
        """`result[m][rank]` are the microbatches of update m."""
        return pack_step(
            samples,
            minibatches=minibatches,
            ranks=self.plan.data_parallel,
            tokens_per_microbatch=self.plan.tokens_per_microbatch,
            work=work_of(self.config.model),
            at_least=self.plan.least_microbatches,
        )

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The trainer's log-probs of each sample's trained tokens, in the samples' order."""
        packed = self.pack(samples)
        scores = self.world.score(packed, self.config.rollout.temperature)
        found = by_sample(self.world.by_microbatch(packed, scores))
        return [found.get(s.name, []) for s in samples]

    def show_memory(self) -> None:
        """The fullest rank's peak so far, as planned and as measured. Said once, after the first update; a CPU has no such figures."""
        if self._memory_shown or self.plan.device == "cpu":
            return
        self._memory_shown = True
        peaks = {rank: peak for rank, peak in enumerate(self.world.peak_memory()) if peak is not None}
        rank = max(peaks, key=lambda r: peaks[r].allocated)
        stage = rank // (self.plan.world_size // self.plan.pipeline_parallel)
        resting = None
        if self.plan.shares_gpus and self._pool is not None:
            self.world.free_caches()  # as the publish that follows does
            resting = self.world.peak_memory()[rank]
        rows = predicted_and_measured(trainer_memory(self.config)[stage], peaks[rank], resting)
        self.console.table(f"memory of trainer rank {rank}", rows)

    def engine_metrics(self) -> dict[str, float]:
        """What befell the engines since the last call; each cause of a restart is told once."""
        counts, before = self.pool.counts, self._counts_before
        for cause in counts.causes[len(before.causes) :]:
            self.console.say(f"an engine was restarted: {cause}")
        self._counts_before = replace(counts, causes=list(counts.causes))
        return {
            "rollout/engine_restarts": float(counts.restarts - before.restarts),
            "rollout/redispatched_turns": float(counts.redispatched_turns - before.redispatched_turns),
        }

    def note_skip(self, step: int, stats: StepStats) -> None:
        """Say why an update was refused, and count refusals in a row, which a resumed run goes on counting."""
        if stats.skipped:
            self.console.say(f"step {step}: an update was refused after {stats.num_updates} made: {stats.problem}")
        skipped = self.progress.skipped_in_a_row + 1 if stats.skipped else 0
        self.progress = replace(self.progress, skipped_in_a_row=skipped)

    def note_critic(self, step: int, stats: CriticStats) -> None:
        if stats.skipped:
            self.console.say(f"step {step}: an update of the critic was refused after {stats.num_updates} made: {stats.problem}")

    def say_resumed(self) -> None:
        """From where a run goes on, and what other places of its ranks mean."""
        assert self.checkpoint is not None
        self.console.say(f"resumed after step {self.progress.step} from {self.checkpoint}")
        plan, before = self.plan, written_layout(self.checkpoint)
        now = {
            "world": plan.world_size,
            "tensor": plan.tensor_parallel,
            "pipeline": plan.pipeline_parallel,
            "context": plan.context_parallel,
            "expert": plan.expert_parallel,
        }
        if before is not None and before != now:
            self.console.say(
                f"it was written by {layout_words(before)}, and goes on with {layout_words(now)}: weights, moments and schedule are the "
                "same, the ranks' random states begin anew from run.seed"
            )

    def save(self) -> None:
        """Begin a checkpoint of now; see Saves."""
        self._saves.begin(self.world, self.progress, self.metrics)

    def notice_save(self) -> None:
        """At the end of a step."""
        self._saves.notice(self.progress.step)

    def finish_save(self) -> None:
        """Wait until the checkpoint on its way, if there is one, is complete."""
        self._saves.finish(self.progress.step)


@contextmanager
def open_session(loaded: Loaded, plan: RunPlan, command: str) -> Iterator[Session]:
    """A session that is ended whatever happens, also while it is being made."""
    with ExitStack() as ending:
        session = Session(loaded, plan, command, ending)
        try:
            yield session
        except RunFailed as error:
            lost = lost_nodes() if session.nodes else []
            raise (type(error)(f"{error}\nLost: {', '.join(lost)}") if lost else error) from error.__cause__
