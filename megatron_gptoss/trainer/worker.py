"""One trainer rank as a Ray actor: a thin skin around `Trainer`.

In: settings and calls from the driver. Out: results, or the exception that stopped this rank. Standard output and errors go to the
rank's log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_gptoss.config.placement import Place
from megatron_gptoss.config.schema import DiagnoseConfig, ModelConfig, OptimizerFields, RlConfig, TrainerConfig
from megatron_gptoss.obs.spans import SPANS
from megatron_gptoss.parallel.shape import ParallelShape
from megatron_gptoss.trainer.how import CriticSettings
from megatron_gptoss.types import PeakMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    import ray
    from torch import Tensor

    from megatron_gptoss.checkpoint.background import Planner, Saving
    from megatron_gptoss.checkpoint.progress import Progress
    from megatron_gptoss.rl.parity import PieceGap
    from megatron_gptoss.sync.send import Sender
    from megatron_gptoss.sync.transfer import Sent, SharedBuffers, Transfer
    from megatron_gptoss.trainer.critic import Critic
    from megatron_gptoss.trainer.how import TokenScores, Update
    from megatron_gptoss.trainer.passes import Minibatch
    from megatron_gptoss.trainer.step import Trainer
    from megatron_gptoss.types import CriticStats, StepStats


@dataclass(frozen=True)
class FirstWeights:
    """Where a run's weights come from."""

    kind: Literal["random", "hf", "checkpoint"]
    path: str = ""


@dataclass(frozen=True)
class TrainerSettings:
    model: ModelConfig
    trainer: TrainerConfig
    optimizer: OptimizerFields
    shape: ParallelShape
    first_weights: FirstWeights
    total_updates: int
    keep_reference: bool
    critic: CriticSettings | None  # None: no critic
    seed: int
    fault: str
    diagnose: DiagnoseConfig
    first_port: int  # where the ranks may meet
    num_ports: int
    use_gpu: bool
    log_dir: str
    trace_dir: str = ""  # folder for each rank's spans; "": none


@dataclass(frozen=True)
class ExportedWeights:
    """Handle of the policy's weights in the object store, and what the receiver must find."""

    buckets: ray.ObjectRef  # of a list of buckets, each safetensors bytes
    num_tensors: int
    digest: int


class TrainerWorker:
    """Made into an actor by `start.launch`. Methods are called on all ranks, in the same order."""

    def __init__(self, settings: TrainerSettings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.trainer: Trainer  # from `start` on
        self.critic: Critic | None = None
        self.saving: Saving  # the checkpoint last begun
        self.planner: Planner | None = None
        self._sender: Sender | None = None
        self._mend: list[Callable[[], None]] = []
        log = Path(settings.log_dir) / f"trainer-{rank}.log"
        self._log = log.open("a", buffering=1)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(self._log.fileno(), stream.fileno())
        # "Apex is not installed" and the like, at every import; the log is for what matters.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
        # On a deadline the driver asks for the stacks of all threads; they land in this rank's log.
        faulthandler.register(signal.SIGUSR1, file=self._log, all_threads=True)

    def place(self) -> Place:
        gpus: tuple[str, ...] = ()
        if self.settings.use_gpu:
            import torch

            gpus = (str(torch.cuda.get_device_properties(0).uuid),)
        return Place(f"trainer rank {self.rank}", socket.gethostname(), os.getpid(), gpus)

    def open_meeting(self) -> tuple[str, int]:
        """Rank 0 only: host and port at which the others will find it."""
        import ray

        from megatron_gptoss.parallel.groups import open_meeting

        s = self.settings
        self.store = open_meeting(s.first_port, s.num_ports, world=s.shape.world, timeout_s=s.trainer.step_timeout_s)
        return ray.util.get_node_ip_address(), self.store.port

    def start(self, host: str, port: int) -> int:
        """Join the world, build the model, load the first weights. Returns the number of parameters on this rank."""
        import torch

        plain_loader = torch.storage._load_from_bytes
        from megatron_gptoss.model import cpu

        cpu.install()  # before Megatron builds anything
        from megatron_gptoss.checkpoint.training_state import load_training_state
        from megatron_gptoss.parallel.groups import init_groups, join_meeting
        from megatron_gptoss.trainer.step import Trainer

        # Megatron puts its own loader into every tensor that this process pickles; the driver would have to import Megatron to read one.
        torch.storage._load_from_bytes = plain_loader
        s = self.settings
        torch.set_num_threads(s.trainer.threads_per_rank)
        if s.use_gpu:
            torch.cuda.set_device(0)  # Ray shows each actor its own device only
        init_groups(
            s.shape,
            rank=self.rank,
            store=self.store if self.rank == 0 else join_meeting(host, port, world=s.shape.world, timeout_s=s.trainer.step_timeout_s),
            timeout_s=s.trainer.step_timeout_s,
            seed=s.seed,
            backend="nccl" if s.use_gpu else "gloo",
        )
        self.trainer = Trainer(
            s.model, s.trainer, s.shape, s.optimizer, total_updates=s.total_updates, fault=s.fault, diagnose=s.diagnose, seed=s.seed
        )
        if s.first_weights.kind == "checkpoint":
            load_training_state(Path(s.first_weights.path), model=self.trainer.model)
        else:
            self.trainer.load_hf(self._first_tensors())
        self.trainer.weights_changed()
        if s.trace_dir:
            SPANS.open(Path(s.trace_dir) / f"trainer-{self.rank}.jsonl", barrier=torch.cuda.synchronize if s.use_gpu else None)
        if s.keep_reference:
            self.trainer.keep_reference()
        self.critic = self._make_critic(s.critic) if s.critic is not None else None
        return sum(p.numel() for p in self.trainer.module.parameters())

    def _make_critic(self, own: CriticSettings) -> Critic:
        from megatron_gptoss.trainer.critic import Critic

        s, policy = self.settings, self.trainer.module
        return Critic(policy, s.model, s.trainer, s.shape, own.optimizer, total_updates=own.total_updates, diagnose=s.diagnose)

    def _first_tensors(self):
        from megatron_gptoss.checkpoint.hf_files import read_hf_tensors
        from megatron_gptoss.model.random_init import random_hf_tensors

        s = self.settings
        if s.first_weights.kind == "hf":
            return read_hf_tensors(Path(s.first_weights.path))
        return random_hf_tensors(s.model, s.seed, "cuda" if s.use_gpu else "cpu")

    def resume(self, path: str) -> Progress:
        """Weights, moments, schedule and random states of a training checkpoint."""
        from megatron_gptoss.checkpoint.training_state import load_training_state

        t = self.trainer
        progress = load_training_state(Path(path), model=t.model, optimizer=t.optimizer, schedule=t.schedule, critic=self.critic)
        t.skipped_in_a_row = progress.skipped_in_a_row
        return progress

    def score(
        self, minibatches: Sequence[Minibatch], temperature: float, reference: bool = False, router_replay: str = "none"
    ) -> list[list[TokenScores]]:
        """Of the ranks that share a model only the first answers; all have the same."""
        scores = [self.trainer.score(m, temperature=temperature, reference=reference, router_replay=router_replay) for m in minibatches]
        shape = self.settings.shape
        return scores if self.rank == shape.first_rank(shape.data_index(self.rank)) else []

    def update(self, minibatches: Sequence[Minibatch], how: Update, old: Sequence[Sequence[TokenScores]] | None) -> StepStats:
        with SPANS("update"):
            return self._own_scores(self.trainer.update(minibatches, how, old))

    def values(self, minibatches: Sequence[Minibatch]) -> list[list[Tensor]]:
        """As `score`: of the ranks that share a model only the first answers."""
        assert self.critic is not None
        values = [self.critic.values(m) for m in minibatches]
        shape = self.settings.shape
        return values if self.rank == shape.first_rank(shape.data_index(self.rank)) else []

    def update_critic(self, minibatches: Sequence[Minibatch], rl: RlConfig) -> CriticStats:
        assert self.critic is not None
        return self.critic.update(minibatches, rl)

    def measure(self, minibatch: Minibatch, how: Update) -> StepStats:
        return self._own_scores(self.trainer.measure(minibatch, how))

    def _own_scores(self, stats: StepStats) -> StepStats:
        """As `score`: of the ranks that share a model only the first sends its samples' scores."""
        shape = self.settings.shape
        return stats if self.rank == shape.first_rank(shape.data_index(self.rank)) else replace(stats, scores=())

    def break_model(self, fault: str) -> None:
        """The policy computes with this fault (model/faults.py) until it is mended; its weights stay."""
        from megatron_gptoss.model.faults import break_model

        self._mend.append(break_model(self.trainer.module, fault))

    def mend_model(self) -> None:
        """The last fault goes."""
        self._mend.pop()()

    def compare_pieces(self, minibatch: Minibatch, temperature: float, head_limit: float) -> list[PieceGap]:
        """Each piece of the policy beside the reference, on what passes through it while this minibatch is scored."""
        from megatron_gptoss.checkpoint.weight_map import export_hf
        from megatron_gptoss.model.pieces import compare, watched

        t = self.trainer
        with watched(t.module) as seen:
            logp = [scores.logp_N for scores in t.score(minibatch, temperature=temperature)]
        return compare(seen, export_hf(t.module, self.settings.model), self.settings.model, minibatch, logp, temperature, head_limit)

    def peak_memory(self) -> PeakMemory | None:
        """The most this rank's GPU held since it started; None on a CPU."""
        import torch

        if not self.settings.use_gpu:
            return None
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return PeakMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free, reserved)

    def export_weights(self) -> ExportedWeights | None:
        """Put the policy's weights into the object store. Collective; only rank 0 returns something."""
        import ray

        from megatron_gptoss.sync.gather import gather_buckets
        from megatron_gptoss.sync.verify import MASK, digest
        from megatron_gptoss.sync.wire import to_bytes

        total, count, wire = 0, 0, []
        for bucket in gather_buckets(self.trainer.module, self.settings.model):
            if self.rank == 0:
                total, count = (total + digest(bucket)) & MASK, count + len(bucket)
                wire.append(to_bytes(bucket))
        return ExportedWeights(ray.put(wire), count, total) if self.rank == 0 else None

    @property
    def sender(self) -> Sender:
        from megatron_gptoss.sync.send import Sender

        if self._sender is None:
            self._sender = Sender(self.trainer.module, self.settings.model)
        return self._sender

    def lend_buffers(self, dtype: str, bucket_bytes: int) -> SharedBuffers:
        """Handles for an engine on this rank's GPU."""
        return self.sender.lend(dtype, bucket_bytes)

    def free_cache(self) -> None:
        """Give the GPU back what this rank only keeps for later: gradients' buffers, and what PyTorch has cached. An engine may ask for
        room before there is a trainer: one that starts first, and does not come up at once."""
        import torch

        for passes in (getattr(self, "trainer", None), self.critic):
            if passes is not None:
                passes.give_gradients_back()
        if self.settings.use_gpu:
            torch.cuda.empty_cache()

    def send_weights(self, transfer: Transfer, slots: tuple[int, ...] | None) -> Sent | None:
        """Collective; see sync.send.Sender.send."""
        return self.sender.send(transfer, slots)

    def save(self, path: str, progress: Progress, needed_bytes: int, background: bool) -> None:
        """Begin a checkpoint; it is complete when `finish_save` returns. CheckpointError when it cannot even begin."""
        from megatron_gptoss.checkpoint.background import Planner
        from megatron_gptoss.checkpoint.training_state import begin_save

        self.planner = self.planner or Planner()
        t = self.trainer
        self.saving = begin_save(
            Path(path),
            config=self.settings.model,
            model=t.model,
            optimizer=t.optimizer,
            schedule=t.schedule,
            critic=self.critic,
            progress=progress,
            needed_bytes=needed_bytes,
            background=background,
            timeout_s=self.settings.trainer.step_timeout_s,
            planner=self.planner,
        )

    def save_is_over(self) -> bool:
        """Whether the checkpoint is complete, or has failed. Rank 0 knows it of all ranks."""
        return self.saving.done()

    def finish_save(self) -> float:
        """Wait for the checkpoint that was begun. Seconds its writing took; CheckpointError when it came to nothing."""
        return self.saving.wait()


Actor = Any  # a Ray actor handle of TrainerWorker
