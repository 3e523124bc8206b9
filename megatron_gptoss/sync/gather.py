"""Full Hugging Face tensors of the policy, gathered from the ranks that divide it, bucket by bucket.

In: this rank's model. Out: buckets of (name, tensor) on every rank; only the lead rank hands them on. It does not send anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_gptoss.checkpoint.weight_map import export_hf, hf_shapes
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.model.gpt_oss import GptOssModel
from megatron_gptoss.sync.plan import plan_buckets
from megatron_gptoss.sync.wire import Bucket

BUCKET_BYTES = 512 * 2**20


def gather_buckets(module: GptOssModel, model: ModelConfig, *, limit_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets in the weight map's order. Collective: every rank must exhaust it."""
    width = next(module.parameters()).element_size()
    sizes = []
    for name, shape in hf_shapes(model).items():
        count = width
        for n in shape:
            count *= n
        sizes.append((name, count))
    tensors = export_hf(module, model)
    for names in plan_buckets(sizes, limit_bytes):
        bucket = [next(tensors) for _ in names]
        assert [n for n, _ in bucket] == names, "the weight map and its shapes disagree about the order"
        yield bucket
