"""The story of `gptoss convert`: make the folder, compare it, compute both sides.

In: what the user asked for. Out: a folder and a few lines on the console, or one CheckpointError. How each of it is done is in convert.py,
verify.py and forward.py.
"""

from __future__ import annotations

from pathlib import Path

from megatron_gptoss.checkpoint.convert import Conversion, convert
from megatron_gptoss.checkpoint.forward import SAME, default_tokens, lacks_memory, log_probs, read_tokens
from megatron_gptoss.checkpoint.sources import open_source
from megatron_gptoss.checkpoint.targets import LOSSES, TargetKind
from megatron_gptoss.checkpoint.verify import verify as compare
from megatron_gptoss.errors import CheckpointError
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.run_dir import find_weights, is_run_dir


def convert_and_verify(
    source: Path,
    target: Path,
    kind: TargetKind,
    *,
    dtype: str,
    verify: bool,
    tokens: Path | None,
    scales_from: Path | None,
    max_shard_bytes: float,
    workers: int,
    console: Console,
) -> None:
    """`source` may also be a run directory, which stands for its newest checkpoint."""
    if is_run_dir(source):
        source = find_weights(source).path
    if tokens and not verify:
        raise CheckpointError("--tokens are for --verify only")
    ids = read_tokens(tokens, open_source(source).model.vocab_size) if tokens else []
    if not (verify and target.exists()):
        done = convert(source, target, kind, dtype=dtype, scales_from=scales_from, max_shard_bytes=max_shard_bytes, workers=workers,
                       console=console)  # fmt: skip
        _say(done, source, target, kind, console)
    if not verify:
        return
    opened, made = open_source(source), open_source(target)
    if made.kind != kind:
        raise CheckpointError(f"{target} is of kind {made.kind}, and --to asks for {kind}")
    verdict = compare(source, target, scales_from=scales_from, workers=workers, console=console)
    report = target.with_name(f"{target.name}.verify.json")
    verdict.write(report)
    console.table(f"{target} against {source}", [*verdict.rows(), ("every tensor", str(report))])
    verdict.check()
    lossless = (kind != "hf-mxfp4" or opened.kind == "openai") and made.dtype.itemsize >= opened.dtype.itemsize
    _compute_both(source, target, ids or default_tokens(opened.model.vocab_size), lossless, console)


def _say(done: Conversion, source: Path, target: Path, kind: str, console: Console) -> None:
    rate = done.num_bytes / max(done.seconds, 1e-9) / 1e6
    console.say(f"{source} -> {target} ({kind}): {done.num_bytes / 1e9:.2f} GB in {done.seconds:.1f} s, {rate:.0f} MB/s")
    if done.losses:
        name, worst = max(done.losses.items(), key=lambda pair: pair[1].relative)
        largest, at = max((loss.max_abs, n) for n, loss in done.losses.items())
        console.say(
            f"MXFP4: largest relative error of a tensor {worst.relative:.4f} ({name}), largest error of a number {largest:.3g} ({at}); "
            f"all of them in {target / LOSSES}"
        )


def _compute_both(source: Path, target: Path, tokens: list[int], lossless: bool, console: Console) -> None:
    """The same tokens through both; a difference is an error when the conversion should have lost nothing."""
    lacking = lacks_memory(open_source(source).model)
    if lacking:
        console.alarm(f"log-probs were not compared: the model does not fit on this host ({lacking})")
        return
    with console.waiting("computing the source"):
        before = log_probs(source, tokens)
    with console.waiting("computing the result"):
        after = log_probs(target, tokens)
    difference = (before - after).abs()
    words = f"log-probs of {len(tokens)} tokens: largest difference {difference.max():.1e}, mean {difference.mean():.1e} nats"
    console.say(words + ("" if lossless else " (the conversion rounds numbers, so there is one)"))
    if not difference.max() <= SAME and lossless:
        raise CheckpointError(f"{target} does not compute what {source} computes: {words}; at most {SAME:g} is rounding")
