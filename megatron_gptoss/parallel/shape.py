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
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; (): `layers_of_stages` divides them

    @property
    def data(self) -> int:
        """Ranks that see different data (expert-parallel ranks included: they also see different tokens)."""
        return self.world // (self.tensor * self.pipeline * self.context)

    def data_index(self, rank: int) -> int:
        """Which part of the data a rank sees. Megatron counts ranks tensor first, then context, data, pipeline."""
        return rank // (self.tensor * self.context) % self.data

    def first_rank(self, data_index: int) -> int:
        """The lowest of the ranks that see this part of the data."""
        return data_index * self.tensor * self.context

    @property
    def padding_multiple(self) -> int:
        """Packed tokens must be a multiple of this: context ranks hold equal shards, tensor ranks equal parts of a shard."""
        return self.tensor * self.context

    def layers_of_stages(self, num_layers: int) -> list[range]:
        """Global layer indices, from 0, of every pipeline stage. Raises ValueError when `stage_layers` does not fit.

        Without `stage_layers` (a run's plan always gives them) the first and the last stage get the fewest: they also hold the embedding
        and the output layer.
        """
        counts = list(self.stage_layers)
        if not counts:
            base, rest = divmod(num_layers, self.pipeline)
            # Spare layers go to the middle first, then to the first stage: an embedding costs less than an output layer.
            order = [*range(1, self.pipeline - 1), 0, self.pipeline - 1]
            counts = [base + (stage in order[:rest]) for stage in range(self.pipeline)]
        if len(counts) != self.pipeline or sum(counts) != num_layers or min(counts) < 1:
            raise ValueError(
                f"stages of {counts} layers do not fit pipeline = {self.pipeline} and {num_layers} layers: "
                f"one number for each stage, each at least 1, with {num_layers} as their sum"
            )
        starts = [sum(counts[:stage]) for stage in range(self.pipeline)]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def check(self) -> None:
        """Raise ValueError, naming the rule, when the sizes do not fit each other."""
        for name in ("world", "tensor", "pipeline", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel size {name} = {getattr(self, name)} must be at least 1")
        model_ranks = self.tensor * self.pipeline * self.context
        if self.world % model_ranks:
            raise ValueError(f"world = {self.world} is not a multiple of tensor x pipeline x context = {model_ranks}")
        if self.stage_layers and len(self.stage_layers) != self.pipeline:
            raise ValueError(f"stage_layers = {self.stage_layers} names {len(self.stage_layers)} stages, pipeline = {self.pipeline}")
        # GPT-OSS's experts have biases, and Megatron supports those only with whole experts (expert_tensor_parallel_size = 1), so the
        # expert groups are cut from all ranks of a pipeline stage.
        if (self.world // self.pipeline) % self.expert:
            raise ValueError(f"expert = {self.expert} does not divide the {self.world // self.pipeline} ranks of a pipeline stage")
