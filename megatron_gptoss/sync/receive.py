"""An engine worker's part in an update: take each bucket as it comes, sum it up, and let the model load it in place.

In: the engine's `Receipt`, the plan that the worker computed by itself, and the model's own `load_weights`. Out: what was received. It
imports neither vLLM nor Ray; a worker's process keeps one `Receiver`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_gptoss.sync.broadcast import BroadcastInlet, Members
from megatron_gptoss.sync.buckets import views
from megatron_gptoss.sync.plan import SyncPlan
from megatron_gptoss.sync.shared import Borrowed, SharedInlet
from megatron_gptoss.sync.transfer import Laps, Receipt, Transfer, Watch, join_store
from megatron_gptoss.sync.verify import BucketDigests

Inlet = BroadcastInlet | SharedInlet
Load = Callable[[Iterator[tuple[str, Tensor]]], None]


class Receiver:
    """What a worker keeps between updates: its connection, or the buffers it has opened."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.members = Members()
        self.borrowed: Borrowed | None = None

    def receive(self, receipt: Receipt, worker: int, plan: SyncPlan, load: Load) -> tuple[int, dict[str, float]]:
        """`worker`: of this engine, from 0. `load` is called once, with all tensors of the model in the plan's order; each is a view of a
        buffer, and must be read before the next is asked for.

        Returns the digest and where the time went. Raises SyncAborted, or what `load` raises; the model is then a mixture.
        """
        transfer, laps = receipt.transfer, Laps(self.device)
        watch = Watch(join_store(transfer), transfer)
        try:
            inlet = self._inlet(receipt, worker, plan, watch)
            laps.mark("meet")
            digests = BucketDigests(plan, self.device)
            load(self._tensors(plan, inlet, digests, laps))
            inlet.finish()
            laps.mark("finish")
            return digests.total(), laps.seconds()
        except BaseException:
            self.members.close()
            raise

    def _inlet(self, receipt: Receipt, worker: int, plan: SyncPlan, watch: Watch) -> Inlet:
        transfer: Transfer = receipt.transfer
        if transfer.kind == "broadcast":
            return BroadcastInlet(self.members.get(transfer, receipt.first_rank + worker, self.device, watch), plan, watch)
        source = receipt.sources[worker]
        if self.borrowed is None or self.borrowed.source != source:
            self.borrowed = None  # closed first
            self.borrowed = Borrowed(source, self.device)
        return SharedInlet(self.borrowed, transfer.number, receipt.slots[worker], watch)

    @staticmethod
    def _tensors(plan: SyncPlan, inlet: Inlet, digests: BucketDigests, laps: Laps) -> Iterator[tuple[str, Tensor]]:
        for bucket in plan.buckets:
            buffer = inlet.bucket(bucket)
            laps.mark("wait for a bucket")
            digests.add(bucket, buffer)  # before loading, which may change a tensor
            laps.mark("digest")
            yield from views(plan, bucket, buffer)
            laps.mark("load")
            inlet.loaded(bucket)
