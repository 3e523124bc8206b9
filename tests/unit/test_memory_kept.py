"""What a layer keeps for backward, as predicted, is what autograd saves: the storages are counted, to the byte but for a few dozen. And
when backward has run, nothing of a microbatch is left: where engines share the GPU its memory is theirs.

In a process of its own, since TRITON_INTERPRET is read when triton is imported, and the grouped experts run in the interpreter here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_gptoss.config.fit import changed_config
from megatron_gptoss.config.rank_memory import flow, kept_of_layer
from megatron_gptoss.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
TOKENS, LAYERS = 64, (2, 4)  # both kinds of layers once, then twice: the difference is free of embedding and head


def child(folder: Path) -> None:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from megatron_gptoss.config.schema import DiagnoseConfig, TrainerConfig
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from megatron_gptoss.parallel.shape import ParallelShape

    torch.set_num_threads(1)
    shape = ParallelShape(world=1)
    init_groups(shape, rank=0, init_method=f"file://{folder}/meet", timeout_s=60, seed=0, backend="gloo")
    from megatron_gptoss.checkpoint.weight_map import load_hf
    from megatron_gptoss.model.build import attention_options, build_model
    from megatron_gptoss.model.gpt_oss import packed_params
    from tests.helpers.made import Made
    from tests.helpers.tiny_model import TINY, packed_batch, strong_tensors

    def saved_bytes(layers: int, experts: str, recompute: str) -> int:
        model = TINY.model_copy(update={"num_hidden_layers": layers})
        built = build_model(model, shape, experts=experts, recompute=recompute)
        load_hf(built, model, strong_tensors(model, 0))
        built.train()
        parameters = {p.untyped_storage().data_ptr() for p in built.parameters()}
        found: dict[int, torch.UntypedStorage] = {}  # the storages themselves, so that no address is used twice

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                found[storage.data_ptr()] = storage
            return tensor

        tokens, positions, cu_seqlens = packed_batch([TOKENS // 4] * 4, model.vocab_size, 1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            built(tokens, positions, packed_seq_params=packed_params(cu_seqlens, TOKENS // 4), head=lambda hidden, _: hidden.sum())
        return sum(storage.nbytes() for storage in found.values())

    def left_behind(attention: str, experts: str, rotary: str, recompute: str) -> list[tuple[str, int]]:
        """What the second of two microbatches made and is there still when backward has run: operator and shape, bytes."""
        options = attention_options(TrainerConfig(attention=attention), DiagnoseConfig())
        built = build_model(TINY, shape, attention=options, experts=experts, rotary=rotary, recompute=recompute)
        load_hf(built, TINY, strong_tensors(TINY, 0))
        built.train()

        def both_ways(seed: int, made: Made) -> None:
            tokens, positions, cu_seqlens = packed_batch([TOKENS // 4] * 4, TINY.vocab_size, seed)
            with made:
                packed = packed_params(cu_seqlens, TOKENS // 4)
                built(tokens, positions, packed_seq_params=packed, head=lambda hidden, _: hidden.square().sum()).backward()
            for parameter in built.parameters():
                parameter.grad = None

        both_ways(1, first := Made())
        both_ways(2, second := Made())
        # What was made once and for all, such as the table of rotations, is no part of a microbatch.
        return second.alive({StorageWeakRef(tensor.untyped_storage()) for tensor in built.parameters()} | first.found.keys())

    result = {
        f"{experts} {recompute}": [saved_bytes(layers, experts, recompute) for layers in LAYERS]
        for experts in ("loop", "grouped")
        for recompute in ("none", "selective", "full")
    }
    result["left behind"] = {
        f"{' '.join(backends)} {recompute}": left_behind(*backends, recompute)
        for backends in (("reference", "loop", "reference"), ("triton", "grouped", "fused"))
        for recompute in ("none", "selective", "full")
    }
    (folder / "result.json").write_text(json.dumps(result))
    destroy_groups()


def test_what_a_layer_keeps_is_what_autograd_saves(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    from tests.helpers.tiny_model import TINY

    fields = {f"model.{name}": getattr(TINY, name) for name in TINY.model_fields_set}
    config = changed_config(Config(), {**fields, "trainer.tokens_per_microbatch": TOKENS})
    result = json.loads((tmp_path / "result.json").read_text())
    for case, left in result.pop("left behind").items():
        assert sum(size for _, size in left) < 8 * TOKENS, f"{case}: of a microbatch is left {left}"
    for case, (few, many) in result.items():
        experts, recompute = case.split()
        planned = changed_config(config, {"trainer.experts": experts, "trainer.recompute": recompute})
        predicted = kept_of_layer(planned, flow(planned), recompute)
        if recompute != "full":  # on a CPU, PyTorch's two norms also keep what they normalised; on a GPU they are one kernel each
            predicted += 2 * TOKENS * TINY.hidden_size * 4
        measured = (many - few) / (LAYERS[1] - LAYERS[0])
        assert abs(measured - predicted) <= 32, f"{case}: predicted {predicted}, measured {measured}"


if __name__ == "__main__":
    child(Path(sys.argv[1]))
