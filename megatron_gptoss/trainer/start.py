"""A training world seen from the driver: start one actor per rank, call all ranks at once, stop them.

In: settings. Out: the ranks' results, rank 0 first, or one error that names the rank, the phase and the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_gptoss.checkpoint.progress import Progress
from megatron_gptoss.config.placement import Place, same_gpu
from megatron_gptoss.config.schema import RlConfig
from megatron_gptoss.errors import DeadlineExpired, GptossError, MachineError, TrainerFailed
from megatron_gptoss.obs.logs import last_lines
from megatron_gptoss.rl.parity import PieceGap
from megatron_gptoss.sync.transfer import Sent, SharedBuffers, Superseded, Transfer
from megatron_gptoss.trainer import wire
from megatron_gptoss.trainer.how import Update
from megatron_gptoss.trainer.worker import Actor, ExportedWeights, TrainerSettings, TrainerWorker
from megatron_gptoss.types import CriticStats, MicroBatch, PeakMemory, StepStats

LOG_LINES = 12


@dataclass(frozen=True)
class RankResources:
    cpus: float
    gpus: float


class TrainingWorld:
    """Handles of all ranks. Every method is one phase with a deadline.

    Phases may be asked for by several threads: the ranks work them off one after another, all in the same order.
    """

    def __init__(
        self, settings: TrainerSettings, resources: RankResources, nodes: Sequence[str], worker: type[TrainerWorker] = TrainerWorker
    ) -> None:
        """`nodes[rank]`: Ray's id of the node that a rank belongs on. `worker`: what a rank is; tools make their own."""
        self.settings = settings
        self.timeout_s = settings.trainer.step_timeout_s
        environment = {"OMP_NUM_THREADS": str(settings.trainer.threads_per_rank)}
        if settings.use_gpu and settings.shape.tensor > 1:
            # Megatron starts a gather before the product that hides it; with one queue to the GPU they arrive in that order.
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if not settings.use_gpu:
            # Megatron's helpers are torch.compile functions; on a CPU they would start a C++ compiler and round differently.
            environment["TORCHDYNAMO_DISABLE"] = "1"
            # Ray does not hide a GPU from an actor that asked for none, and Megatron would use it.
            environment["CUDA_VISIBLE_DEVICES"] = ""
            if "triton" in (settings.trainer.attention, settings.trainer.backend_of_windowed_layers):
                # Asked of the user's own environment by preflight; Ray's workers on another node would not have it.
                environment["TRITON_INTERPRET"] = "1"
        wire.register()
        remote = ray.remote(worker)
        self.actors: list[Actor] = [
            remote.options(
                name=f"trainer-{rank}-{os.getpid()}",
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[rank], soft=False),
                runtime_env={"env_vars": environment},
            ).remote(settings, rank)
            for rank in range(settings.shape.world)
        ]
        self.places: list[Place] = []  # of each rank
        # Ranks that share a model see the same microbatches.
        self._data = [settings.shape.data_index(rank) for rank in range(settings.shape.world)]
        self._last = "launch"
        self._order = threading.Lock()  # held while a phase is handed to all ranks
        self.changes = 0  # phases handed out that change the policy's weights
        self.healthy = True  # no rank has died or been given up

    def log(self, rank: int) -> Path:
        return Path(self.settings.log_dir) / f"trainer-{rank}.log"

    def _all(self, phase: str, method: str, per_rank: Sequence[tuple], before: Callable[[], None] = lambda: None) -> list:
        """Call `method` on every rank; the first failure or the deadline ends the phase. `before` runs when no other phase can come in
        between, and may raise."""
        with self._order:
            before()
            calls = [getattr(a, method).remote(*arguments) for a, arguments in zip(self.actors, per_rank, strict=True)]
        return self._wait(phase, calls)

    def _change(self) -> None:
        self.changes += 1

    def _wait(self, phase: str, calls: list) -> list:
        pending, deadline = list(calls), time.monotonic() + self.timeout_s
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()), num_returns=1)
            if not done:
                raise self._expired(phase, [calls.index(c) for c in pending])
            try:
                ray.get(done[0])
            except RayActorError as error:
                raise self._died(calls.index(done[0]), phase, error) from None
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, GptossError):
                    raise cause from None
                raise self._died(calls.index(done[0]), phase, error) from error
        self._last = phase
        return ray.get(calls)

    def _same(self, phase: str, method: str, *arguments: object) -> list:
        return self._all(phase, method, [arguments] * len(self.actors))

    def _one(self, phase: str, method: str, *arguments: object) -> Any:
        """Call `method` on rank 0 alone."""
        return self._wait(phase, [getattr(self.actors[0], method).remote(*arguments)])[0]

    def _died(self, rank: int, phase: str, error: Exception) -> TrainerFailed:
        self.healthy = False
        log = self.log(rank)
        if isinstance(error, ActorDiedError) and not error.actor_init_failed:
            # Ray's text is long and knows no more; what the process last said is in its log.
            words = "its process is gone. Something outside killed it (the kernel, for want of memory? see dmesg) or it crashed"
        else:
            words = " ".join(str(getattr(error, "cause", error)).split())[:300]
            with log.open("a") as file:
                file.write(f"{error}\n")  # the rank's own traceback, which otherwise nobody would see
        tail = "\n".join(f"  {line}" for line in last_lines(log, LOG_LINES))
        return TrainerFailed(f"trainer rank {rank} failed while it should {phase}: {words}\nLog {log}:\n{tail}")

    def _expired(self, phase: str, missing: list[int]) -> DeadlineExpired:
        self.healthy = False
        for rank in missing:
            # A pid of another node may be anybody's here.
            if rank < len(self.places) and self.places[rank].host == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(self.places[rank].pid, signal.SIGUSR1)
        logs = ", ".join(str(self.log(rank)) for rank in missing)
        stacks = f"Stacks were written to {logs}." if self.places else f"Their logs: {logs}."
        return DeadlineExpired(
            f"the trainer did not {phase} within {self.timeout_s:.0f} s (trainer.step_timeout_s); waiting for rank {missing}. "
            f"Last finished: {self._last}. {stacks}"
        )

    # -- phases --------------------------------------------------------------------------------------------------------------------------

    def find_places(self) -> None:
        self.places = self._same("start", "place")
        if problem := same_gpu(self.places):
            raise MachineError(problem)  # before NCCL meets them

    def start(self) -> int:
        """Build all ranks. Returns the parameters of rank 0."""
        if not self.places:
            self.find_places()
        meeting = self._one("open a port", "open_meeting")
        return self._same("build the model", "start", *meeting)[0]

    def resume(self, path: Path) -> Progress:
        return self._all("load the checkpoint", "resume", [(str(path),)] * len(self.actors), self._change)[0]

    def score(
        self,
        minibatches: Sequence[Sequence[Sequence[MicroBatch]]],
        temperature: float,
        *,
        reference: bool = False,
        router_replay: str = "none",
    ) -> list:
        """`minibatches[m][d]` are microbatches of data-parallel rank d. Returns scores[d][m][microbatch]. `reference`: of the reference
        policy instead of the current one. `router_replay`: whose choice of experts the pass follows, and keep it for the update."""
        arguments = [(batches, temperature, reference, router_replay) for batches in self._dealt(self._by_data(minibatches))]
        scores = self._all("score", "score", arguments)
        return [scores[self.settings.shape.first_rank(d)] for d in range(self.settings.shape.data)]

    def _by_data(self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]]) -> list[list[Sequence[MicroBatch]]]:
        """minibatches[m][d] -> [d][m]."""
        return [[m[d] for m in minibatches] for d in range(self.settings.shape.data)]

    def _dealt(self, by_data: Sequence[Any]) -> list[ray.ObjectRef]:
        """For each rank what its data-parallel rank is to have, in the object store once for all that share it."""
        stored = [ray.put(each) for each in by_data]
        return [stored[d] for d in self._data]

    @staticmethod
    def by_microbatch(minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *scored: list) -> Iterator[tuple]:
        """(microbatch, its log-probs in each of `scored`): what `score` returned for these minibatches, put beside them."""
        for batch, *found in _beside(minibatches, *scored):
            yield batch, *(scores.logp_N for scores in found)

    def values(self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]]) -> Iterator[tuple]:
        """(microbatch, the critic's values [N] before its trained tokens) for every microbatch."""
        values = self._all("value", "values", [(batches,) for batches in self._dealt(self._by_data(minibatches))])
        return _beside(minibatches, [values[self.settings.shape.first_rank(d)] for d in range(self.settings.shape.data)])

    def update_critic(self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], rl: RlConfig) -> CriticStats:
        """One training step of the critic, towards the targets that the microbatches carry."""
        return self._all("update the critic", "update_critic", [(batches, rl) for batches in self._dealt(self._by_data(minibatches))])[0]

    def update(self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], how: Update, old: list | None = None) -> StepStats:
        """One training step. `old` is what `score` returned for the same minibatches, None when the update is on-policy."""
        scored = [None] * len(self.actors) if old is None else self._dealt(old)
        arguments = [(batches, how, before) for batches, before in zip(self._dealt(self._by_data(minibatches)), scored, strict=True)]
        stats = self._with_all_scores(self._all("update", "update", arguments, self._change))
        if stats.num_updates == 0:
            with self._order:
                self.changes -= 1  # it changed nothing
        return stats

    def measure(self, minibatch: Sequence[Sequence[MicroBatch]], how: Update) -> StepStats:
        """`minibatch[d]` are microbatches of data-parallel rank d. What an update would measure, without making one."""
        return self._with_all_scores(self._all("measure", "measure", [(batches, how) for batches in self._dealt(minibatch)]))

    @staticmethod
    def _with_all_scores(stats: Sequence[StepStats]) -> StepStats:
        """What all ranks agree on, with the scores of the samples that each of them had."""
        return replace(stats[0], scores=tuple(score for each in stats for score in each.scores))

    @contextmanager
    def broken(self, fault: str) -> Iterator[None]:
        """The policy computes with this fault (model/faults.py) inside the block."""
        self._same("be broken", "break_model", fault)
        try:
            yield
        finally:
            if self.healthy:
                self._same("be mended", "mend_model")

    def compare_pieces(self, minibatch: Sequence[Sequence[MicroBatch]], temperature: float, head_limit: float) -> list[PieceGap]:
        """`minibatch[d]` are microbatches of data-parallel rank d. Rank 0's pieces beside the reference; a rank must hold the whole model.
        `head_limit`: nats."""
        arguments = [(minibatch[d], temperature, head_limit) for d in self._data]
        return self._all("be compared with the reference", "compare_pieces", arguments)[0]

    def peak_memory(self) -> list[PeakMemory | None]:
        """What each rank's GPU held at most; None for ranks on a CPU."""
        return self._same("measure memory", "peak_memory")

    def export_weights(self) -> ExportedWeights:
        return self._same("gather the weights", "export_weights")[0]

    def lend_buffers(self, dtype: str, bucket_bytes: int) -> list[SharedBuffers]:
        """Of every rank, for one engine each."""
        return self._same("lend its buffers", "lend_buffers", dtype, bucket_bytes)

    def free_caches(self) -> None:
        self._same("free its cache", "free_cache")

    def send_weights(self, transfer: Transfer, slots: Sequence[tuple[int, ...] | None], changes: int) -> list[Sent]:
        """What the sending ranks say, the lead first. `slots`: see sync.send.Sender.send, of each rank. `changes`: as they were when the
        transfer's version was made; raises Superseded when they are others."""

        def check() -> None:
            if self.changes != changes:
                raise Superseded(f"version {transfer.version} is gone: the trainer has changed its weights since")

        sent = self._all("send the weights", "send_weights", [(transfer, own) for own in slots], check)
        return [each for each in sent if each is not None]

    def save(self, path: Path, progress: Progress, needed_bytes: int, *, background: bool) -> None:
        """Begin a checkpoint. The last one must be finished."""
        self._same("save", "save", str(path), progress, needed_bytes, background)

    def save_is_over(self) -> bool:
        return self._one("say how the checkpoint is getting on", "save_is_over")

    def finish_save(self) -> float:
        """Wait until the checkpoint is complete. Returns the seconds its writing took."""
        return max(self._same("write the checkpoint", "finish_save"))

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def _beside(minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *found: list) -> Iterator[tuple]:
    """(microbatch, what each of `found` has for it); found[d][m][j] is of data-parallel rank d's microbatch j of minibatch m."""
    for m, minibatch in enumerate(minibatches):
        for d, batches in enumerate(minibatch):
            for j, batch in enumerate(batches):
                yield batch, *(each[d][m][j] for each in found)
