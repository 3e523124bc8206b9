"""What log-probs does a checkpoint give to some tokens? Each kind of folder is computed by what reads it in earnest.

In: a folder and token ids. Out: log-probs of every token but the first, in float32, on the host (or, for Megatron's, on its GPU). Hugging
Face folders, MXFP4 among them, are loaded and computed by transformers; distributed checkpoints by our Megatron model through the same
loader as a run; OpenAI's folders, which nothing installed here can compute, go through our table into transformers' model.

Each is computed in a process of its own (this file, run as a module): its memory goes with it, Megatron on a CPU wants an environment that
is set before Python starts, and what the libraries print stays out of the way.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor

from megatron_gptoss.checkpoint.sources import Source, open_source
from megatron_gptoss.checkpoint.weight_map import entries, hf_shapes
from megatron_gptoss.config.hf_config import write_hf_config
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.errors import CheckpointError

DEFAULT_LENGTH = 160  # longer than the published window of 128
# Two float32 implementations differ by about 4e-6 on small models; a transpose, a half or an expert in the wrong place by more than 1.
SAME = 1e-3


def default_tokens(vocab_size: int) -> list[int]:
    """Ids spread over the vocabulary, the same at every call."""
    return [(7919 * place + 13) % vocab_size for place in range(DEFAULT_LENGTH)]


def read_tokens(file: Path, vocab_size: int) -> list[int]:
    """Ids, separated by spaces, commas or lines; brackets are ignored."""
    try:
        words = file.read_text().translate(str.maketrans("[],", "   ")).split()
        ids = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--tokens {file}: {error}. Token ids are wanted, separated by spaces, commas or lines.") from error
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if len(ids) < 2 or outside:
        what = f"id {outside[0]} is outside the vocabulary of {vocab_size}" if outside else f"{len(ids)} ids, at least 2 are wanted"
        raise CheckpointError(f"--tokens {file}: {what}")
    return ids


def lacks_memory(model: ModelConfig) -> str:
    """Why the model cannot be computed on this host in float32, or ""."""
    # Loaders hold the weights as stored beside the float32 ones for a moment.
    need = 1.6 * 4 * sum(math.prod(shape) for shape in hf_shapes(model).values())
    free = psutil.virtual_memory().available
    return f"it takes about {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free" if need > free else ""


def log_probs(path: Path, tokens: list[int]) -> Tensor:
    """float32 [len(tokens) - 1]. Raises CheckpointError with the last lines of the process that could not."""
    environment = dict(os.environ) | ({} if torch.cuda.is_available() else {"TORCHDYNAMO_DISABLE": "1"})
    command = [sys.executable, "-m", "megatron_gptoss.checkpoint.forward", str(path)]
    done = subprocess.run(command, input=json.dumps(tokens), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CheckpointError(f"{path} cannot be computed: " + " | ".join(done.stderr.strip().splitlines()[-3:]))
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def _log_probs_here(path: Path, tokens: list[int]) -> Tensor:
    source = open_source(path)
    ids = torch.tensor([tokens])
    logits = _megatron(source, ids) if source.kind == "megatron" else _transformers(source)(ids).logits
    logp_TV = logits[0, :-1].float().log_softmax(-1).cpu()
    return logp_TV.gather(1, ids[0, 1:, None])[:, 0]


def _transformers(source: Source) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    if source.kind == "openai":
        with tempfile.TemporaryDirectory() as folder:
            write_hf_config(source.model, Path(folder))
            model = GptOssForCausalLM(GptOssConfig.from_pretrained(folder))
        model.load_state_dict(dict(_tensors(source)), strict=True)
    else:
        how: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)} if source.kind == "hf-mxfp4" else {}
        model = GptOssForCausalLM.from_pretrained(source.path, dtype=source.dtype, **how)
    model.set_attn_implementation("eager")
    return model.float().eval()


def _tensors(source: Source) -> Any:
    for entry in entries(source.model):
        experts = [parts for piece in source.pieces(entry) for parts in source.read(piece)]
        for place, name in enumerate(entry.hf_names):
            yield name, torch.stack([parts[place] for parts in experts]) if entry.row.per_expert else experts[0][place]


def _megatron(source: Source, ids: Tensor) -> Tensor:
    from megatron_gptoss.checkpoint.training_state import load_training_state
    from megatron_gptoss.model.build import build_model
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from megatron_gptoss.parallel.shape import ParallelShape

    shape = ParallelShape(world=1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        init_groups(shape, rank=0, init_method=f"file://{folder}/meet", timeout_s=300, seed=0, backend=backend)
        try:
            model = build_model(source.model, shape, dtype=source.dtype).eval()
            wrapped: Any = SimpleNamespace(module=model)  # as far as loading weights looks into DistributedDataParallel
            load_training_state(source.path, model=wrapped)
            device = next(model.parameters()).device
            if source.dtype != torch.float32:
                widened = build_model(source.model, shape, dtype=torch.float32).eval()
                widened.load_state_dict(model.state_dict())
                model = widened
            return model(ids.to(device), torch.arange(ids.shape[1], device=device)[None])
        finally:
            destroy_groups()


if __name__ == "__main__":
    print(json.dumps(_log_probs_here(Path(sys.argv[1]), json.load(sys.stdin)).tolist()))
