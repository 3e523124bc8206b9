"""A converted checkpoint loads into any layout of ranks, and what any layout saves converts back, bit for bit. 1 to 4 gloo ranks.

The source is MXFP4, so that the whole chain is seen: blocks -> Megatron's files -> each layout -> Megatron's files as that layout divides
them -> blocks, and numbers.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gptoss.checkpoint import sources
from megatron_gptoss.checkpoint.convert import convert
from megatron_gptoss.parallel.shape import ParallelShape
from tests.helpers.checkpoints import assert_same, random_mxfp4, tensors_of
from tests.helpers.tiny_model import TINY

MODEL = TINY.model_copy(update={"num_hidden_layers": 3})
LAYOUTS = {
    "one": ParallelShape(world=1),
    "TP2": ParallelShape(world=2, tensor=2),
    "EP2": ParallelShape(world=2, expert=2),
    "PP2": ParallelShape(world=2, pipeline=2),
    "CP2": ParallelShape(world=2, context=2),
    "EP4": ParallelShape(world=4, expert=4),
    "TP2xEP2": ParallelShape(world=4, tensor=2, expert=2),
    "TP2xPP2xEP2": ParallelShape(world=4, tensor=2, pipeline=2, expert=2),
}


def world(rank: int, size: int, folder: str) -> None:
    """Every layout of a world size: load, gather, save. Rank 0 leaves the gathered tensors."""
    from megatron.core import dist_checkpointing

    from megatron_gptoss.checkpoint.marker import write_marker
    from megatron_gptoss.checkpoint.training_state import load_training_state
    from megatron_gptoss.checkpoint.weight_map import export_hf
    from megatron_gptoss.config.hf_config import write_hf_config
    from megatron_gptoss.model.build import build_model
    from megatron_gptoss.parallel.groups import destroy_groups, init_groups
    from tests.unit.test_model_checkpoint import metadata

    torch.set_num_threads(1)
    for name, shape in LAYOUTS.items():
        if shape.world != size:
            continue
        init_groups(shape, rank=rank, init_method=f"file://{folder}/meet-{name}", timeout_s=120, seed=0, backend="gloo")
        model = build_model(MODEL, shape, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        load_training_state(Path(folder) / "mg", model=SimpleNamespace(module=model))
        loaded = {n: tensor.detach().clone() for n, tensor in export_hf(model, MODEL)}
        saved = Path(folder) / f"saved-{name}"
        if not rank:
            torch.save(loaded, f"{folder}/{name}.pt")
            saved.mkdir()
        dist.barrier()
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata())}, str(saved))
        if not rank:
            write_hf_config(MODEL, saved)
            write_marker(saved, step=0, layout={"world": size})
        dist.barrier()
        destroy_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A source and its conversions: `q` (blocks), `mg` (Megatron's, in pieces of one expert), `hf` (numbers)."""
    folder = tmp_path_factory.mktemp("layouts")
    random_mxfp4(folder / "q", MODEL, low_codes=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", 30_000)
        convert(folder / "q", folder / "mg", "megatron")
    convert(folder / "q", folder / "hf", "hf")
    return folder


@pytest.fixture(scope="module")
def through(folder):
    """Starts the world of a layout when it is first asked for; returns the tensors that it loaded."""
    started = set()

    def of(name: str) -> dict[str, torch.Tensor]:
        size = LAYOUTS[name].world
        if size not in started:
            started.add(size)
            mp.spawn(world, (size, str(folder)), nprocs=size)  # pyright: ignore[reportPrivateImportUsage]
        return torch.load(folder / f"{name}.pt")

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_it_and_saves_what_converts_back(folder, through, layout):
    numbers = tensors_of(folder / "hf")
    assert_same(through(layout), numbers)
    convert(folder / f"saved-{layout}", folder / f"hf-{layout}", "hf")
    assert_same(tensors_of(folder / f"hf-{layout}"), numbers)
    convert(folder / f"saved-{layout}", folder / f"q-{layout}", "hf-mxfp4", scales_from=folder / "q")
    assert_same(tensors_of(folder / f"q-{layout}"), tensors_of(folder / "q"))
