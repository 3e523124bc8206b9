"""The gradients of a training world's last update, whole, whatever layout it has."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_gptoss.checkpoint.weight_map import export_hf


def whole_gradients(trainer) -> dict[str, Tensor]:
    """Under Hugging Face's names, the same on all ranks. Collective.

    After an update a rank's buffer holds the sum over data-parallel ranks only in its own part; elsewhere its own gradients are left.
    Clipping scales them, so ask for none.
    """
    ddp = trainer.model
    for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            parts = list(bucket.grad_data.chunk(ranks.size()))
            dist.all_gather(parts, parts[ranks.rank()].clone(), group=ranks)
    return {name: g.clone() for name, g in export_hf(ddp, trainer.model_config, value=lambda p: p.main_grad)}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """(largest deviation of a tensor in the Euclidean norm, over the norm of theirs; its name)."""
    assert ours.keys() == theirs.keys()
    return max((float((ours[name] - theirs[name]).norm() / theirs[name].norm()), name) for name in theirs)
