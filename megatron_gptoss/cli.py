"""The verbs: `gptoss plan`, `check`, `sft`, `train`, `eval`, `convert`.

In: what the user typed. Out: a run, a table, or one message and an exit code. Everything a person can get wrong is found before torch, ray,
vllm or megatron are imported. What a verb does lives in loop/; what is wrong, in config/.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_gptoss import __version__
from megatron_gptoss.config.load import Flag, Loaded, explain, load, parse_flags
from megatron_gptoss.config.plan import make_plan, run_directory
from megatron_gptoss.errors import ConfigError, DeadlineExpired, EngineFailed, GptossError, TrainerFailed
from megatron_gptoss.obs.console import Console
from megatron_gptoss.obs.plan_table import plan_rows
from megatron_gptoss.obs.run_dir import latest_checkpoint

app = typer.Typer(
    name="gptoss",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # a bug of ours keeps its plain traceback
    help="Reinforcement learning of GPT-OSS with Megatron-Core and vLLM, from a laptop CPU to many H200 nodes.",
    epilog="Begin with `gptoss plan configs/tiny.toml configs/demo.toml`: it says what would run, and needs no GPU.",
)

# Unknown options pass through to parse_flags, which knows every key of the configuration.
FLAGS_PASS = {"ignore_unknown_options": True}
EPILOG = (
    "TOML files are read from left to right, then flags; the last one wins. Every key of every section is a flag, written "
    "--rl.clip_high=0.28 or --rl.clip_high 0.28, anywhere on the line. `gptoss plan CONFIG... --explain rl` lists the keys of a section, "
    "what they may be, and who set them; `--explain rl.clip_high` does it for one key."
)

CONVERT_EPILOG = (
    "The kind of SOURCE is seen from the folder. A conversion that was interrupted goes on when it is called again; TARGET has its name "
    "only when it is whole. Example: gptoss convert gpt-oss-20b gpt-oss-20b-megatron --to megatron --verify"
)

Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG.toml | --SECTION.KEY=VALUE", help="Configuration files and dotted flags.", show_default=False),
]
RESUME_HELP = "Go on with a run directory from its last checkpoint. Without files: with its own config."
INIT_HELP = "Start from the weights of a run directory, a checkpoint or a Hugging Face folder."
LINKS_HELP = "Also measure between these hosts. Call it on each of them at the same time."
MEET_HELP = "Where they meet: a port of the first of them."
READ_HELP = "Check nothing: sum up what this command said on several nodes with --json. Once for each file."
Resume = Annotated[str, typer.Option("--resume", metavar="RUN", help=RESUME_HELP, show_default=False)]
Init = Annotated[str, typer.Option("--init", metavar="PATH", help=INIT_HELP, show_default=False)]
CONTINUE_HELP = "Go on with the run of this name and id if it has a checkpoint, else begin it. For jobs that are started again."
Continue = Annotated[bool, typer.Option("--continue", help=CONTINUE_HELP)]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"megatron-gptoss {__version__}")
        raise typer.Exit


@app.command(context_settings=FLAGS_PASS, epilog=EPILOG)
def plan(
    args: Args = None,
    resume: Resume = "",
    init: Init = "",
    key: Annotated[str, typer.Option("--explain", metavar="KEY", help="Only say what KEY (or a section) is and who set it.")] = "",
) -> None:
    """Say what would run: layout, memory, tokens per step. Starts nothing and needs no GPU."""
    loaded = _load(args, resume, init)
    if key:
        print("\n".join(explain(loaded, key)))
        return
    from megatron_gptoss.config.preflight import check_engine_memory, check_inputs, check_memory, check_run_target, detect_cluster

    made = make_plan(loaded, detect_cluster())
    console = Console()
    console.table("plan", plan_rows(loaded, made))
    if made.shortfall:
        console.say(f"This machine is too small to run it: {made.shortfall}.")
    check_memory(loaded)
    check_engine_memory(loaded)
    check_run_target(loaded, made)
    check_inputs(loaded.config)


@app.command(context_settings=FLAGS_PASS, epilog=EPILOG)
def check(
    args: Args = None,
    resume: Resume = "",
    init: Init = "",
    parity: Annotated[bool, typer.Option("--parity", help="Also start trainer and engines, and compare their log-probs.")] = False,
    software: Annotated[bool, typer.Option("--software", help="Only what an image holds: packages, and a product on the CPU.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    links: Annotated[str, typer.Option("--links", metavar="HOST,HOST,...", help=LINKS_HELP, show_default=False)] = "",
    meet: Annotated[str, typer.Option("--meet", metavar="ADDRESS:PORT", help=MEET_HELP, show_default=False)] = "",
    me: Annotated[str, typer.Option("--as", metavar="HOST", help="Which of them this is.", show_default=False)] = "",
    read: Annotated[list[Path] | None, typer.Option("--read", metavar="NODE.json", help=READ_HELP, show_default=False)] = None,
) -> None:
    """Check this node: software, memory, disk, clock, GPUs, attention backends, links, files. PASS or FAIL each, under two minutes."""
    from megatron_gptoss.config.preflight import detect_cluster
    from megatron_gptoss.launch.check import bad_nodes, check_node, meeting, read_reports, show, show_many

    if read:
        reports = read_reports(read)
        good = not bad_nodes(reports)
        if as_json:
            print(json.dumps({"ok": good, "bad_nodes": bad_nodes(reports), "nodes": [r.as_json() for r in reports]}, indent=1))
        else:
            show_many(reports)
        raise typer.Exit(0 if good else 2)
    loaded = _load(args, resume, init)
    report = check_node(loaded, make_plan(loaded, detect_cluster()), software=software, meeting=meeting(links, meet, me))
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        show(report)
    if report.failed:
        raise typer.Exit(2)
    if parity:
        if resume:
            raise ConfigError(f"gptoss check --parity starts nothing in a run directory. Use --init {resume} for that run's weights.")
        _run("check", args, resume, init)


@app.command(context_settings=FLAGS_PASS, epilog=EPILOG)
def sft(args: Args = None, resume: Resume = "", init: Init = "", go_on: Continue = False) -> None:
    """Warm start: teach the policy the task's format by imitating generated transcripts."""
    _run("sft", args, resume, init, go_on)


@app.command(context_settings=FLAGS_PASS, epilog=EPILOG)
def train(args: Args = None, resume: Resume = "", init: Init = "", go_on: Continue = False) -> None:
    """Train with reinforcement learning: roll out, score, update, sync, once a step."""
    _run("train", args, resume, init, go_on)


@app.command(context_settings=FLAGS_PASS, epilog=EPILOG)
def launch(
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the job.")],
    args: Args = None,
    resume: Resume = "",
    init: Init = "",
    verb: Annotated[Literal["train", "sft"], typer.Option("--verb", help="What the job does.")] = "train",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")] = False,
) -> None:
    """Submit a Slurm job of so many nodes, if the plan says that it fits. Settings of the cluster: launch/site.env."""
    from megatron_gptoss.config.preflight import detect_cluster
    from megatron_gptoss.launch.submit import check_fits, prepare, submit

    names = [text for option, value in (("--resume", resume), ("--init", init)) if value for text in (option, value)]
    submission = prepare(verb, nodes, [*(args or []), *names])
    loaded = _load([*(args or []), "--cluster.address=auto", f"--cluster.nodes={nodes}"], resume, init)
    if remark := check_fits(loaded, make_plan(loaded, detect_cluster()), submission):
        print(remark)
    if dry_run:
        print(submission.shell(), submission.script.read_text(), sep="\n\n", end="")
    else:
        print(f"job {submit(submission)} is in the queue. Its output: gptoss-{verb}-NUMBER.out here; squeue --me says when it runs")


@app.command("eval", context_settings=FLAGS_PASS, epilog=EPILOG)
def evaluate(args: Args = None, resume: Resume = "", init: Init = "") -> None:
    """Mean reward and pass@k, on held-out prompts, of the weights that --init names."""
    _run("eval", args, resume, init)


@app.command(epilog=CONVERT_EPILOG)
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Any checkpoint of GPT-OSS: a folder or a run directory.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to make.")],
    to: Annotated[Literal["hf", "hf-mxfp4", "megatron"], typer.Option("--to", help="What to make.")],
    dtype: Annotated[
        Literal["", "bfloat16", "float32"], typer.Option("--dtype", help="Of plain numbers; the source's own when left out.")
    ] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Compare every tensor and the log-probs; TARGET may be there already.")] = False,
    tokens: Annotated[Path | None, typer.Option("--tokens", metavar="FILE", help="Token ids for --verify.", show_default=False)] = None,
    scales_from: Annotated[
        Path | None,
        typer.Option("--scales-from", metavar="FOLDER", help="Keep an MXFP4 checkpoint's scales where they fit.", show_default=False),
    ] = None,
    shard_gb: Annotated[float, typer.Option("--shard-gb", min=0.001, help="Largest safetensors file, in GB.")] = 5.0,
    workers: Annotated[int, typer.Option("--workers", min=0, help="Threads; 0: twice the CPUs, at most 8.")] = 0,
) -> None:
    """Turn one checkpoint into another: Hugging Face (BF16 or MXFP4), OpenAI's folder, Megatron's distributed checkpoint."""
    from megatron_gptoss.checkpoint.verb import convert_and_verify

    try:
        convert_and_verify(
            source, target, to, dtype=dtype, verify=verify, tokens=tokens, scales_from=scales_from, max_shard_bytes=shard_gb * 1e9,
            workers=workers, console=Console(),
        )  # fmt: skip
    except KeyboardInterrupt:
        print("interrupted. The same command goes on from the parts that are finished", file=sys.stderr)
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point. Expected failures become one message and an exit code; anything else keeps its traceback."""
    try:
        app()
    except GptossError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("megatron_gptoss"):
            raise
        print(f"MachineError: {error}. This environment lacks a package that pyproject.toml names.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`gptoss plan ... | head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


# ---- what the verbs share -----------------------------------------------------------------------------------------------------------

ENTRY = {
    "sft": ("loop.sft", "run_sft"),
    "train": ("loop.train", "run_training"),
    "train, overlapped": ("loop.overlap", "run_overlapped"),
    "eval": ("loop.evaluate", "run_evaluation"),
    "check": ("loop.parity", "run_check"),
}


def _run(command: str, args: list[str] | None, resume: str, init: str, go_on: bool = False) -> None:
    from megatron_gptoss.config.preflight import check_run, detect_cluster

    if not (args or resume):
        raise ConfigError(f"gptoss {command} needs a configuration. Example: gptoss {command} configs/tiny.toml configs/demo.toml")
    loaded = _load(args, resume, init, go_on)
    made = make_plan(loaded, detect_cluster())
    check_run(loaded, made, command)
    overlapped = command == "train" and loaded.config.rollout.max_lag_steps > 0
    module, function = ENTRY["train, overlapped" if overlapped else command]
    try:
        getattr(import_module(f"megatron_gptoss.{module}"), function)(loaded, made)
    except (DeadlineExpired, EngineFailed, TrainerFailed) as error:
        saved = latest_checkpoint(made.run_dir) if command in ("sft", "train") else None
        if saved is None:
            raise
        raise type(error)(f"{error}\n{saved.name} is whole. Go on from it with: gptoss {command} --resume {made.run_dir}") from error
    except KeyboardInterrupt:
        # Here and not in main(): typer would turn it into exit code 130 without a word.
        print(f"interrupted. What was finished is in {made.run_dir}", file=sys.stderr)
        raise typer.Exit(130) from None


def _load(args: list[str] | None, resume: str, init: str, go_on: bool = False) -> Loaded:
    paths, flags = parse_flags(args or [])
    if go_on and not resume:
        from megatron_gptoss.launch.restart import can_go_on

        target = run_directory(load(paths, flags).config, datetime.now())
        if can_go_on(target):
            # Its own config.toml keeps where it once began.
            resume, init, flags = str(target), "", [flag for flag in flags if flag.key != "run.init"]
    flags += [Flag("run.resume", resume, "--resume")] if resume else []
    flags += [Flag("run.init", init, "--init")] if init else []
    own = next((Path(flag.text) / "config.toml" for flag in reversed(flags) if flag.key == "run.resume" and flag.text), None)
    if own is not None and not paths and own.is_file():
        paths = [str(own)]
    return load(paths, flags)


if __name__ == "__main__":
    main()
