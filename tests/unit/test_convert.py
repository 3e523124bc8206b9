"""Conversions lose nothing, invent nothing, survive being killed, and refuse what is not whole. One process, tiny models.

Layouts of several ranks: tests/dist/test_convert_layouts.py. Engines and the command line: tests/e2e/test_convert_vllm.py.
"""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_gptoss.checkpoint import convert as converting
from megatron_gptoss.checkpoint import sources, targets
from megatron_gptoss.checkpoint.convert import convert, plan_parts
from megatron_gptoss.checkpoint.hf_files import write_hf_folder
from megatron_gptoss.checkpoint.mxfp4 import dequantise
from megatron_gptoss.checkpoint.sources import open_source
from megatron_gptoss.checkpoint.targets import LOSSES, MXFP4_CONFIG
from megatron_gptoss.checkpoint.verify import verify
from megatron_gptoss.checkpoint.weight_map import EXTRA_STATES, entries, hf_shapes, stored_shapes
from megatron_gptoss.errors import CheckpointError
from tests.helpers.checkpoints import assert_same, openai_folder, random_mxfp4, tensors_of, write_source
from tests.helpers.tiny_model import SQUARE, TINY, our_model, strong_tensors

ROOT = Path(__file__).parents[2]


# ---- nothing is lost --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, SQUARE], ids=["tiny", "square"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_to_megatron_and_back_is_bit_equal(tmp_path, monkeypatch, model, dtype):
    monkeypatch.setattr(sources, "PIECE_BYTES", 30_000)  # one or two experts a piece
    original = write_source(tmp_path / "hf", model, dtype=dtype)
    convert(tmp_path / "hf", tmp_path / "mg", "megatron")
    convert(tmp_path / "mg", tmp_path / "back", "hf", max_shard_bytes=60e3)
    assert_same(tensors_of(tmp_path / "back"), original)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "mg"], "something was left behind"
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 5
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in original.values())


def test_mxfp4_to_numbers_and_back_is_byte_equal(tmp_path, monkeypatch):
    """Random codes: one block in ten thousand has no magnitude above 3 and would get a smaller scale; here there is none."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 30_000)
    random_mxfp4(tmp_path / "q")
    packed = tensors_of(tmp_path / "q")
    convert(tmp_path / "q", tmp_path / "hf", "hf")
    numbers = tensors_of(tmp_path / "hf")
    assert {n: tuple(t.shape) for n, t in numbers.items()} == hf_shapes(TINY)
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(numbers[name], dequantise(packed[f"{name}_blocks"], packed[f"{name}_scales"]).transpose(1, 2))
    done = convert(tmp_path / "hf", tmp_path / "again", "hf-mxfp4")
    assert_same(tensors_of(tmp_path / "again"), packed)
    assert len(done.losses) == 4 and all(loss.max_abs == 0 == loss.relative for loss in done.losses.values())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == MXFP4_CONFIG


def test_mxfp4_through_megatron_keeps_even_blocks_that_fit_at_several_scales(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 30_000)
    random_mxfp4(tmp_path / "q", low_codes=True)
    convert(tmp_path / "q", tmp_path / "mg", "megatron")
    convert(tmp_path / "mg", tmp_path / "canonical", "hf-mxfp4")
    convert(tmp_path / "mg", tmp_path / "again", "hf-mxfp4", scales_from=tmp_path / "q")
    packed, canonical = tensors_of(tmp_path / "q"), tensors_of(tmp_path / "canonical")
    assert_same(tensors_of(tmp_path / "again"), packed)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(canonical[f"{name}_scales"], packed[f"{name}_scales"])
    numbers = [dequantise(t[f"{name}_blocks"], t[f"{name}_scales"]) for t in (canonical, packed)]
    assert torch.equal(*numbers), "canonical blocks hold the same numbers"


def test_what_quantising_costs_is_written_down_by_tensor(tmp_path):
    original = write_source(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "q", "hf-mxfp4")
    packed, report = tensors_of(tmp_path / "q"), json.loads((tmp_path / "q" / LOSSES).read_text())
    assert report.keys() == done.losses.keys() == {n for n in original if n.endswith(("gate_up_proj", "down_proj"))}
    for name, loss in report.items():
        numbers = dequantise(packed[f"{name}_blocks"], packed[f"{name}_scales"]).transpose(1, 2).double()
        difference = original[name].double() - numbers
        assert loss["max_abs"] == pytest.approx(difference.abs().max().item())
        assert loss["relative"] == pytest.approx((difference.square().sum() / original[name].double().square().sum()).sqrt().item())
        assert 0.05 < loss["relative"] < 0.15  # four bits


def test_openai_folder_is_the_published_one_under_other_names(tmp_path):
    random_mxfp4(tmp_path / "q", low_codes=True)
    openai_folder(tmp_path / "original", tmp_path / "q")
    assert open_source(tmp_path / "original").model == open_source(tmp_path / "q").model
    convert(tmp_path / "original", tmp_path / "q2", "hf-mxfp4")
    assert_same(tensors_of(tmp_path / "q2"), tensors_of(tmp_path / "q"))
    convert(tmp_path / "original", tmp_path / "hf", "hf")
    convert(tmp_path / "q", tmp_path / "hf2", "hf")
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "hf2"))


# ---- the same as Megatron itself --------------------------------------------------------------------------------------------------------


def test_keys_shapes_and_objects_are_those_of_the_model(one_rank, tmp_path):
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from tests.unit.test_model_checkpoint import metadata

    state = our_model(TINY, one_rank, dict(strong_tensors(TINY, 0))).sharded_state_dict(metadata=metadata())
    theirs = {x.key: x.global_shape for x in state.values() if isinstance(x, ShardedTensor)}
    assert theirs == stored_shapes(TINY)
    assert {x.key for x in state.values() if isinstance(x, ShardedObject)} == set(EXTRA_STATES)
    write_source(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "mg", "megatron")
    written = open_source(tmp_path / "mg").files.metadata.state_dict_metadata
    objects = {x.unique_key for x in state.values() if isinstance(x, ShardedObject)}
    assert written.keys() == theirs.keys() | objects | {"common_state/shard_0_1"}


def test_a_model_loads_what_was_converted_and_what_it_saves_converts_back(one_rank, tmp_path):
    """Through Megatron's own loader and saver, in both directions."""
    from types import SimpleNamespace

    from megatron.core import dist_checkpointing

    from megatron_gptoss.checkpoint.marker import write_marker
    from megatron_gptoss.checkpoint.training_state import load_training_state
    from megatron_gptoss.config.hf_config import write_hf_config
    from tests.unit.test_model_checkpoint import metadata

    original = write_source(tmp_path / "hf", dtype=torch.float32)
    convert(tmp_path / "hf", tmp_path / "mg", "megatron")
    model = our_model(TINY, one_rank, dict(strong_tensors(TINY, 9)))
    progress = load_training_state(tmp_path / "mg", model=SimpleNamespace(module=model))
    assert progress.step == 0
    expected = dict(our_model(TINY, one_rank, original).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name

    saved = tmp_path / "saved"
    saved.mkdir()
    extra = {"optimizer": {"exp_avg": torch.ones(3)}}
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata()), **extra}, str(saved))
    write_hf_config(TINY, saved)
    write_marker(saved, step=1, layout={"world": 1})
    convert(saved, tmp_path / "back", "hf")
    assert_same(tensors_of(tmp_path / "back"), original)


# ---- killed, and a disk that is full ----------------------------------------------------------------------------------------------------

DEEP = TINY.model_copy(update={"num_hidden_layers": 6})
SMALL_PIECES = 30_000
# In a process of its own, with one worker: dies in the middle of writing the part with this number.
DIES = """
import os, signal, sys
from pathlib import Path
from megatron_gptoss.checkpoint import megatron_files, sources, targets
from megatron_gptoss.checkpoint.convert import convert

source, target, kind, last = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
sources.PIECE_BYTES = 30_000
dying = False

def cut(write):
    def cut_write(where, data, *rest):
        if not dying:
            return write(where, data, *rest)
        write(where, bytes(data)[: len(data) // 2], *rest)
        os.kill(os.getpid(), signal.SIGKILL)
    return cut_write

def watched(write):
    def watched_write(self, folder, part, source):
        global dying
        dying = part.number == last
        return write(self, folder, part, source)
    return watched_write

os.pwrite = cut(os.pwrite)
megatron_files.ChunkFile.write = cut(megatron_files.ChunkFile.write)
for kind_of_target in (targets.HuggingFaceTarget, targets.MegatronTarget):
    kind_of_target.write = watched(kind_of_target.write)
convert(source, target, kind, workers=1, max_shard_bytes=200e3)
"""


def spy_on_parts(monkeypatch) -> list[int]:
    """The numbers of all parts that are written from now on."""
    written: list[int] = []
    for kind in (targets.HuggingFaceTarget, targets.MegatronTarget):
        real = kind.write

        def write(self, folder, part, source, real=real):
            written.append(part.number)
            return real(self, folder, part, source)

        monkeypatch.setattr(kind, "write", write)
    return written


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".metadata"}


@pytest.mark.parametrize("kind", ["hf", "megatron", "hf-mxfp4"])
def test_killed_at_30_and_70_percent_only_the_torn_part_is_done_again(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL_PIECES)
    if kind == "hf":
        random_mxfp4(tmp_path / "source", DEEP)
    else:
        write_source(tmp_path / "source", DEEP)
    convert(tmp_path / "source", tmp_path / "straight", kind, max_shard_bytes=200e3)
    total = len(plan_parts(open_source(tmp_path / "source")))
    assert total > 20
    for share in (0.3, 0.7):
        last = int(share * total)
        command = [sys.executable, "-c", DIES, str(tmp_path / "source"), str(tmp_path / "result"), kind, str(last)]
        died = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert not (tmp_path / "result").exists() and (tmp_path / ".result.converting").is_dir()
        assert len((tmp_path / ".result.converting.jsonl").read_text().splitlines()) == 1 + last
    written = spy_on_parts(monkeypatch)
    done = convert(tmp_path / "source", tmp_path / "result", kind, max_shard_bytes=200e3)
    assert sorted(written) == list(range(last, total)) and done.parts_found == last
    assert contents(tmp_path / "result") == contents(tmp_path / "straight")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result", "source", "straight"]


def interrupted(tmp_path, monkeypatch, kind="hf", after=4) -> int:
    """A conversion of write_source that ended after some parts, its temporary folder still there."""
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL_PIECES)

    def stop(folder, made, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converting, "_publish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "source", tmp_path / "result", kind, workers=1)
    journal = tmp_path / ".result.converting.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: 1 + after]) + lines[1 + after][:30])  # and one line torn in the middle
    return len(lines) - 1


def test_a_finished_part_whose_bytes_have_changed_is_done_again(tmp_path, monkeypatch):
    write_source(tmp_path / "source", DEEP)
    total = interrupted(tmp_path, monkeypatch)
    record = json.loads((tmp_path / ".result.converting.jsonl").read_text().splitlines()[3])
    file, at, *_ = record["written"][-1]
    with (tmp_path / ".result.converting" / file).open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1]))
    written = spy_on_parts(monkeypatch)
    convert(tmp_path / "source", tmp_path / "result", "hf")
    assert sorted(written) == sorted([record["part"], *range(4, total)])
    assert_same(tensors_of(tmp_path / "result"), tensors_of(tmp_path / "source"))


def test_half_of_another_conversion_is_not_continued(tmp_path, monkeypatch, capsys):
    write_source(tmp_path / "source", DEEP)
    total = interrupted(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "source")
    write_source(tmp_path / "source", DEEP, seed=8)
    written = spy_on_parts(monkeypatch)
    convert(tmp_path / "source", tmp_path / "result", "hf")
    assert sorted(written) == list(range(total)) and "starting over" in capsys.readouterr().out
    assert_same(tensors_of(tmp_path / "result"), tensors_of(tmp_path / "source"))


def test_two_conversions_into_one_folder_are_refused(tmp_path):
    import fcntl

    write_source(tmp_path / "hf")
    (tmp_path / ".result.converting").mkdir()
    with (tmp_path / ".result.converting.jsonl").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process"):
            convert(tmp_path / "hf", tmp_path / "result", "hf-mxfp4")


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_a_full_disk_is_said_clearly_and_the_same_call_goes_on_when_there_is_room(tmp_path, monkeypatch, small_disk, kind):
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL_PIECES)
    write_source(tmp_path / "source", DEEP)
    written = spy_on_parts(monkeypatch)
    real = converting._require_room

    def then_somebody_else_takes_it(folder, target, num_bytes):
        real(folder, target, num_bytes)
        (small_disk / "film").write_bytes(bytes(3 << 20))

    with monkeypatch.context() as patch:
        patch.setattr(converting, "_require_room", then_somebody_else_takes_it)
        with pytest.raises(CheckpointError, match=r"the disk is full: .* MiB are free.*the same command goes on"):
            convert(tmp_path / "source", small_disk / "result", kind, workers=1)
    assert not (small_disk / "result").exists() and len(written) > 3
    (small_disk / "film").unlink()
    before = len(written)
    done = convert(tmp_path / "source", small_disk / "result", kind)
    assert done.parts_found == before - 1 and not set(written[before:]) & set(written[: before - 1])
    verify(tmp_path / "source", small_disk / "result").check()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, small_disk):
    write_source(tmp_path / "source", DEEP)
    (small_disk / "film").write_bytes(bytes(3 << 20))
    with pytest.raises(CheckpointError, match=r"the disk is full: it takes 1\.8 MiB, 0\.0 MiB are there"):
        convert(tmp_path / "source", small_disk / "result", "megatron")
    assert [p.name for p in small_disk.iterdir()] == ["film"]


# ---- bad input --------------------------------------------------------------------------------------------------------------------------


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2) + "\n")


def overwrite(folder: Path, name: str, value: float) -> None:
    """One number of one tensor, where it lies."""
    source = open_source(folder)
    place = source.places[name]
    with (folder / place.file).open("r+b") as handle:
        handle.seek(place.offset + place.num_bytes - 2)
        handle.write(torch.tensor([value]).bfloat16().view(torch.uint8).numpy().tobytes())


def point_index(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


def repeat_header(file: Path, shape: list[int]) -> None:
    """A shape in the header that the bytes do not bear out."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    next(v for k, v in header.items() if k != "__metadata__")["shape"] = shape
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


SHARD = "model-00004-of-00012.safetensors"
NORM = "model.layers.1.input_layernorm.weight"
BAD = {
    "missing shard": (lambda f: (f / SHARD).unlink(), f"index.json names {SHARD}, missing in"),
    "index names a file that is not there": (lambda f: point_index(f, NORM, "model-00099.safetensors"), "names model-00099"),
    "index names the wrong file": (lambda f: point_index(f, NORM, SHARD), f"1 tensors are not where it says, the first of them {NORM}"),
    "no index and no file": (lambda f: [p.unlink() for p in f.glob("model*")], "neither model.safetensors.index.json nor any"),
    "index that is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "not a safetensors index"),
    "truncated": (lambda f: cut(f / SHARD, (f / SHARD).stat().st_size - 10), f"{SHARD}: cut off: it has"),
    "truncated in the header": (lambda f: cut(f / SHARD, 50), f"{SHARD}: no safetensors file, or cut off within its header"),
    "empty file": (lambda f: cut(f / SHARD, 0), f"{SHARD}: no safetensors file"),
    "something else": (lambda f: (f / SHARD).write_bytes(b"\x10" + bytes(7) + b"not json at all!"), f"{SHARD}: no safetensors file"),
    "shape that does not fit its bytes": (lambda f: repeat_header(f / SHARD, [7]), "its shape and dtype ask for 14"),
    "wrong vocabulary": (lambda f: edit_json(f / "config.json", vocab_size=161), "config.json says vocab_size = 161"),
    "wrong vocabulary of the tokenizer": (
        lambda f: edit_json(f / "tokenizer.json", added_tokens=[{"id": 160}]), "token 160, and config.json says vocab_size = 160"),
    "fewer layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=1, layer_types=["sliding_attention"]), "17 unexpected"),
    "more layers": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=3, layer_types=["sliding_attention", "full_attention"] * 2)
        or edit_json(f / "config.json", layer_types=["sliding_attention", "full_attention", "sliding_attention"]), "17 missing"),
    "NaN": (lambda f: overwrite(f, NORM, float("nan")), f"{NORM} has NaN or infinite numbers"),
    "infinity": (lambda f: overwrite(f, "lm_head.weight", float("inf")), "lm_head.weight has NaN"),
    "not GPT-OSS": (lambda f: edit_json(f / "config.json", model_type="mixtral"), "model_type = 'mixtral', GPT-OSS has 'gpt_oss'"),
    "another quantisation": (lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"}), "says 'gptq'"),
    "packed by its config only": (lambda f: edit_json(f / "config.json", quantization_config=MXFP4_CONFIG), "8 missing: .*_blocks"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_exit_code_2_and_nothing_written(tmp_path, monkeypatch, capsys, case):
    from megatron_gptoss.cli import main

    spoil, words = BAD[case]
    write_source(tmp_path / "hf")
    spoil(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    arguments = ["convert", str(tmp_path / "hf"), str(tmp_path / "out" / "mg"), "--to", "megatron"]
    monkeypatch.setattr(sys, "argv", ["gptoss", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("CheckpointError: ") and said.err.count("\n") == 1 and "Traceback" not in said.err
    assert re.search(words, said.err), said.err
    assert list((tmp_path / "out").iterdir()) == []


def spoil_scale(folder: Path) -> None:
    source = open_source(folder)
    place = source.places["model.layers.1.mlp.experts.down_proj_scales"]
    with (folder / place.file).open("r+b") as handle:
        handle.seek(place.offset + 5)
        handle.write(b"\xff")


def spoil_chunk(folder: Path) -> None:
    """A NaN in Megatron's files, put there by Megatron's own format."""
    storage = open_source(folder).files.metadata.storage_data
    info = next(v for k, v in storage.items() if k.fqn.endswith("router.bias"))
    file = folder / info.relative_path
    data = bytearray(file.read_bytes())
    part = bytes(data[info.offset : info.offset + info.length])
    import io

    stored = torch.load(io.BytesIO(part)).flatten().view(torch.uint8).numpy().tobytes()
    at = info.offset + part.index(stored)
    data[at : at + 2] = b"\xc0\x7f"
    file.write_bytes(data)


def spoil_metadata(folder: Path) -> None:
    """Nothing of it is left but its size."""
    (folder / ".metadata").write_bytes(bytes((folder / ".metadata").stat().st_size))


BAD_OTHERS = {
    "MXFP4 scale of 255": ("q", spoil_scale, "down_proj_scales has a scale of 255"),
    "Megatron NaN": ("mg", spoil_chunk, "router.bias has NaN or infinite numbers in layer 0"),
    "Megatron torn": ("mg", lambda f: (f / "__0_3.distcp").unlink(), "__0_3.distcp is missing"),
    "Megatron cut": ("mg", lambda f: cut(f / "__0_3.distcp", 500), "__0_3.distcp has 500 bytes"),
    "Megatron without marker": ("mg", lambda f: (f / "COMPLETE").unlink(), "is torn: it has no file COMPLETE"),
    "Megatron of another size": ("mg", lambda f: edit_json(f / "config.json", num_local_experts=8), "misshaped: .*router.weight"),
    "Megatron's index is something else": ("mg", spoil_metadata, "metadata: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_OTHERS)
def test_bad_input_of_the_other_kinds(tmp_path, case):
    kind, spoil, words = BAD_OTHERS[case]
    if kind == "q":
        random_mxfp4(tmp_path / "bad")
    else:
        write_source(tmp_path / "hf")
        convert(tmp_path / "hf", tmp_path / "bad", "megatron")
    spoil(tmp_path / "bad")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "bad", tmp_path / "out" / "x", "hf")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_there_is_never_overwritten_and_a_file_is_no_folder(tmp_path):
    write_source(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="never overwritten"):
        convert(tmp_path / "hf", tmp_path / "there", "megatron")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(tmp_path / "hf", tmp_path / "file" / "x", "megatron")


def test_blocks_that_do_not_fill_a_row_are_refused(tmp_path):
    odd = TINY.model_copy(update={"intermediate_size": 48})
    write_source(tmp_path / "hf", odd)
    with pytest.raises(CheckpointError, match="32 numbers in a block, which does not divide intermediate_size = 48"):
        convert(tmp_path / "hf", tmp_path / "q", "hf-mxfp4")


# ---- verify -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf", "hf-mxfp4", "megatron"])
@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_verify_sees_every_tensor_and_one_changed_bit(tmp_path, kind, dtype):
    write_source(tmp_path / "source", dtype=torch.float32)
    convert(tmp_path / "source", tmp_path / "result", kind, dtype=dtype)
    verdict = verify(tmp_path / "source", tmp_path / "result")
    verdict.check()
    assert {t.name: t.shape_result for t in verdict.tensors} == hf_shapes(TINY) and not verdict.missing and not verdict.unexpected
    assert len({t.sha256_result for t in verdict.tensors}) == len(verdict.tensors)
    rows = dict(verdict.rows())
    assert rows["sinks"] == rows["router biases"] == rows["expert biases, down"] == rows["expert biases, gate and up"] == "2 of 2 equal"

    name = "model.layers.1.self_attn.sinks"
    if kind == "megatron":
        other = dict(strong_tensors(TINY, 3))
        other[name] = other[name].flip(0)
        shutil.rmtree(tmp_path / "result")
        write_hf_folder(tmp_path / "changed", TINY, other.items())
        convert(tmp_path / "changed", tmp_path / "result", kind, dtype=dtype)
    else:
        place = open_source(tmp_path / "result").places[name]
        with (tmp_path / "result" / place.file).open("r+b") as handle:
            handle.seek(place.offset)
            byte = handle.read(1)[0]
            handle.seek(place.offset)
            handle.write(bytes([byte ^ 1]))
    verdict = verify(tmp_path / "source", tmp_path / "result")
    assert verdict.different == [name] and dict(verdict.rows())["sinks"].startswith("1 of 2 equal, not model.layers.1")
    with pytest.raises(CheckpointError, match=f"1 different: {name}"):
        verdict.check()


def test_peak_of_parts_in_work_stays_below_the_room():
    """Whatever asks to enter: the sum is bounded, nobody is lost, and one that is too large goes alone."""
    import threading

    room, lock, inside, seen = converting.Room(100), threading.Lock(), [], []

    def work(size):
        room.enter(size)
        with lock:
            inside.append(size)
            seen.append(list(inside))
        threading.Event().wait(0.002)
        with lock:
            inside.remove(size)
        room.leave(size)

    threads = [threading.Thread(target=work, args=(size,)) for size in [30, 60, 100, 250, 10, 40, 90, 5] * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 40 and all(sum(together) <= 100 or len(together) == 1 for together in seen)


def test_every_entry_is_in_exactly_one_part(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 30_000)
    write_source(tmp_path / "hf")
    pieces = [piece for part in plan_parts(open_source(tmp_path / "hf")) for piece in part.pieces]
    for entry in entries(TINY):
        own = [piece.experts for piece in pieces if piece.entry == entry]
        if entry.row.per_expert:
            assert sorted(expert for experts in own for expert in experts) == list(range(TINY.num_local_experts))
        else:
            assert own == [range(0)]
