"""A trainer rank's part in an update: gather, change the layout, write into a bucket, hand the bucket over.

In: this rank's model and a `Transfer`. Out: `Sent`. All ranks take part, in the same order, since tensors are divided among them; the lead
rank broadcasts, or each rank serves the workers on its own GPU. An update that is given up ends early for those who wait, and the ranks
still walk through the whole model together, so that none waits for another in a collective.
"""

from __future__ import annotations

from torch import nn

from megatron_gptoss.checkpoint.weight_map import export_hf
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.sync.broadcast import BroadcastOutlet, Members
from megatron_gptoss.sync.buckets import fill, plan_of, skip
from megatron_gptoss.sync.plan import SyncPlan
from megatron_gptoss.sync.shared import Lender, SharedOutlet
from megatron_gptoss.sync.transfer import Laps, Sent, SharedBuffers, SyncAborted, Transfer, Watch, join_store
from megatron_gptoss.sync.verify import BucketDigests

Outlet = BroadcastOutlet | SharedOutlet


class Sender:
    """What a rank keeps between updates: its connection, or the buffers it lends."""

    def __init__(self, module: nn.Module, model: ModelConfig) -> None:
        self.module, self.model = module, model
        self.device = next(module.parameters()).device
        self.members = Members()
        self.lender: Lender | None = None

    def lend(self, dtype: str, bucket_bytes: int) -> SharedBuffers:
        """Handles of this rank's buffers for one more engine."""
        num_bytes = plan_of(self.model, dtype, bucket_bytes).buffer_bytes
        if self.lender is None or self.lender.num_bytes < num_bytes:
            self.lender = Lender(num_bytes, self.device)
        return self.lender.lend()

    def send(self, transfer: Transfer, slots: tuple[int, ...] | None) -> Sent | None:
        """Collective. `slots`: shared: of the workers that this rank serves. Broadcast: () on the lead, None on the others.

        A rank that hands nothing over returns None. Never raises because of a receiver.
        """
        laps = Laps(self.device)
        plan = plan_of(self.model, transfer.dtype, transfer.bucket_bytes)
        tensors = export_hf(self.module, self.model, contiguous=False)
        digests = BucketDigests(plan, self.device)
        problem, outlet, watch = "", None, None
        if slots is not None and (slots or transfer.kind == "broadcast"):
            watch = Watch(join_store(transfer), transfer)
            watch.store.set(transfer.begun, "")
            try:
                outlet = self._outlet(transfer, plan, slots, watch)
            except SyncAborted as error:
                problem = str(error)
            laps.mark("meet")
        for bucket in plan.buckets:
            buffer = None
            if outlet is not None and not problem:
                try:
                    buffer = outlet.buffer(bucket)
                except (SyncAborted, RuntimeError) as error:
                    problem = str(error)
                laps.mark("wait for a buffer")
            if outlet is None or buffer is None:
                skip(bucket, tensors)
                continue
            fill(plan, bucket, buffer, tensors)
            laps.mark("gather and pack")
            digests.add(bucket, buffer)
            laps.mark("digest")
            try:
                outlet.filled(bucket)
            except RuntimeError as error:  # Gloo: a peer has closed its end
                problem = str(error)
        for _ in tensors:
            raise AssertionError("the plan ends before the weights")
        if outlet is not None and not problem:
            try:
                outlet.finish()
            except (SyncAborted, RuntimeError) as error:
                problem = str(error)
            laps.mark("wait for the last")
        if problem:
            self.members.close()
        if slots is None or (not slots and transfer.kind == "shared"):
            return None
        if problem:
            return Sent(0, problem)
        digest = digests.total()  # waits for the device
        return Sent(digest, "", laps.seconds())

    def _outlet(self, transfer: Transfer, plan: SyncPlan, slots: tuple[int, ...], watch: Watch) -> Outlet:
        if transfer.kind == "broadcast":
            return BroadcastOutlet(self.members.get(transfer, 0, self.device, watch), plan, watch)
        assert self.lender is not None, "nothing was lent"
        return SharedOutlet(self.lender, transfer.number, slots, watch)
