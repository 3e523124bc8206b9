"""Make a checkpoint of GPT-OSS's full shape with random values, as published: MXFP4 experts, everything else in bfloat16.

    python tools/make_synthetic_checkpoint.py synthetic-20b                # 13.8 GB
    python tools/make_synthetic_checkpoint.py small --layers 2 --experts 4

In: sizes. Out: a folder that `gptoss convert`, transformers and vLLM take for openai/gpt-oss-20b: config.json with quantization_config,
safetensors files of at most 5 GB, their index. Values are random and finite, so nothing sensible is computed with them; it is for measuring
and for trying layouts. Written piece by piece: it needs little memory.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from megatron_gptoss.checkpoint import shards
from megatron_gptoss.checkpoint.sources import stored_tensors
from megatron_gptoss.checkpoint.targets import HuggingFaceTarget
from megatron_gptoss.config.schema import ModelConfig
from megatron_gptoss.obs.console import Console

MIB = 1 << 20
SCALES = (118, 123)  # 2^-9 to 2^-4: weights of about 0.01 to 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT-OSS checkpoint of full shape with random values, in MXFP4.")
    parser.add_argument("folder", type=Path, help="to be made; must not exist")
    parser.add_argument("--layers", type=int, default=24, help="even; 24 for 20B, 36 for 120B")
    parser.add_argument("--experts", type=int, default=32, help="32 for 20B, 128 for 120B")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    model = ModelConfig(num_hidden_layers=arguments.layers, num_local_experts=arguments.experts)
    target = HuggingFaceTarget(model, torch.bfloat16, "hf-mxfp4", 5e9, None)
    folder: Path = arguments.folder
    folder.mkdir(parents=True)
    target.begin(folder)
    generator = torch.Generator().manual_seed(arguments.seed)
    done, console = 0, Console()
    with console.progress("writing", max(1, target.num_bytes // MIB), "MiB") as bar:
        for name, shape, is_uint8 in stored_tensors("hf-mxfp4", model):
            place = target.layout.places[name]
            with (folder / place.file).open("r+b") as file:
                file.seek(place.offset)
                for rows in torch.empty(shape, device="meta").split(max(1, shape[0] // 8)):  # an eighth of a tensor in memory
                    file.write(shards.bytes_of(random_values(name, tuple(rows.shape), is_uint8, generator)))
            done += place.num_bytes
            bar.update(done // MIB)
    target.finish(folder, [], {"eos_token_id": 200002, "pad_token_id": 199999})
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    console.say(f"{folder}: {target.num_bytes / 1e9:.2f} GB")


def random_values(name: str, shape: tuple[int, ...], is_uint8: bool, generator: torch.Generator) -> torch.Tensor:
    if is_uint8:
        low, high = SCALES if name.endswith("_scales") else (0, 256)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
    values = torch.empty(shape).normal_(0, 0.02, generator=generator)
    return (values + 1 if name.endswith("norm.weight") else values).bfloat16()


if __name__ == "__main__":
    main()
