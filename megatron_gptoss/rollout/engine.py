"""One rollout engine: vLLM's AsyncLLM inside a Ray actor, on a CPU, on a GPU, or on several GPUs of one node.

In: `EngineSettings`, turns as token ids, new weights inside calls or where a call says they come from. Out: `TurnResult` (token ids,
log-probs, policy version) and `HeldWeights`, the engine's own account after an update.
It neither chooses between engines nor restarts one; `pool.py` does. `handle.py` starts the actor and is the driver's end of it. Importing
this module imports neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.rollout.routes import token_routes
from megatron_gptoss.rollout.turns import Outcome, Ticket, TurnDesk
from megatron_gptoss.rollout.update_gate import UpdateGate
from megatron_gptoss.rollout.vllm_settings import EngineSettings, engine_arguments
from megatron_gptoss.sync.transfer import Receipt
from megatron_gptoss.sync.verify import NO_WEIGHTS
from megatron_gptoss.types import PolicyVersion, TurnRequest, TurnResult

LOOK_S = 0.5  # between two looks whether the engine core lives that an answer is awaited from

Answer = TypeVar("Answer")


class EngineDied(Exception):
    """The engine process or its core is gone, or does not answer. A restart cures it."""


class WeightsRefused(Exception):
    """The engine could not take an update as a whole, or holds no whole policy. A restart alone does not cure it."""


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
        keep_out_of_garbage_collections()
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
            flat_logprobs=True,  # lists of numbers; else each token is a dict and an object, which garbage collections go through
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
        logp = flat_log_probs(turn.token_ids, turn.logprobs)
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


def keep_out_of_garbage_collections() -> None:
    """What there is by now stays to the end: vLLM, Ray and torch are so many objects that a full collection stops this process for 0.3 s
    (measured on a CPU). A run on an H200 had such silences in every third step, whose rollouts took 0.7 s otherwise."""
    gc.collect()
    gc.freeze()


def flat_log_probs(token_ids: Sequence[int], told: Any) -> tuple[float, ...]:
    """Of the tokens as sampled, from vLLM's FlatLogprobs, which has one entry for each; None or empty where there is no token."""
    logp = tuple(told.logprobs) if told else ()
    if list(token_ids) != (list(told.token_ids) if told else []):
        raise EngineDied(f"vLLM returned log-probs of other tokens than it sampled: {len(logp)} for {len(token_ids)}")
    return logp


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
