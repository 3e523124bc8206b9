"""How many ranks hold which piece: the deciding half of the parallel layout.

In: sizes. Out: `ParallelShape`. No torch, no process groups (those are made in groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelShape:
    """Sizes of one training world. `world` ranks = tensor x pipeline x context x data; experts are divided inside data x context."""

    world: int
    tensor: int = 1  # ranks that share every matrix
    pipeline: int = 1  # ranks that share the layers
    context: int = 1  # ranks that share a sequence
    expert: int = 1  # ranks that share the experts

    @property
    def data(self) -> int:
        """Ranks that see different data (expert-parallel ranks included: they also see different tokens)."""
        return self.world // (self.tensor * self.pipeline * self.context)

    def check(self) -> None:
        """Raise ValueError, naming the rule, when the sizes do not fit each other."""
        for name in ("world", "tensor", "pipeline", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel size {name} = {getattr(self, name)} must be at least 1")
        model_ranks = self.tensor * self.pipeline * self.context
        if self.world % model_ranks:
            raise ValueError(f"world = {self.world} is not a multiple of tensor x pipeline x context = {model_ranks}")
        # GPT-OSS's experts have biases, and Megatron supports those only with whole experts (expert_tensor_parallel_size = 1), so the
        # expert groups are cut from all ranks of a pipeline stage.
        if (self.world // self.pipeline) % self.expert:
            raise ValueError(f"expert = {self.expert} does not divide the {self.world // self.pipeline} ranks of a pipeline stage")
