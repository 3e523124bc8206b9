"""From a configuration to a job in Slurm's queue.

In: `Loaded`, the verb, the number of nodes, the site's settings (launch/site.env). Out: the command that submits it and the job's number,
or one message: what the plan says cannot fit never reaches the queue. What happens in the job is launch/job.sh's.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron_gptoss
from megatron_gptoss.config.load import Loaded
from megatron_gptoss.config.placement import place
from megatron_gptoss.config.plan import RunPlan
from megatron_gptoss.config.preflight import check_engine_memory, check_inputs, check_memory, check_run_target
from megatron_gptoss.errors import ConfigError, MachineError

SUBMIT_TIMEOUT_S = 60


@dataclass(frozen=True)
class Submission:
    home: Path  # the folder that holds launch/
    site: Path
    verb: str  # "train" | "sft"
    nodes: int
    arguments: tuple[str, ...]  # as typed: configuration files and flags

    @property
    def script(self) -> Path:
        return self.home / "launch" / f"{self.verb}.sbatch"

    @property
    def command(self) -> list[str]:
        return ["sbatch", "--parsable", f"--nodes={self.nodes}", str(self.script), *self.arguments]

    def shell(self) -> str:
        """What one would type. The settings are exported first: sbatch reads SBATCH_*, the job the rest."""
        home, site = shlex.quote(str(self.home)), shlex.quote(str(self.site))
        return f"set -a; . {site}; GPTOSS_HOME={home} GPTOSS_SITE={site}; set +a; {shlex.join(self.command)}"


def prepare(verb: str, nodes: int, arguments: Sequence[str]) -> Submission:
    home = Path(os.environ.get("GPTOSS_HOME", Path(megatron_gptoss.__file__).parents[1])).absolute()
    submission = Submission(
        home, Path(os.environ.get("GPTOSS_SITE", home / "launch" / "site.env")).absolute(), verb, nodes, tuple(arguments)
    )
    if not submission.script.is_file():
        raise MachineError(f"{submission.script} is not there. Set GPTOSS_HOME to a checkout of this project, which holds launch/.")
    if not submission.site.is_file():
        raise ConfigError(
            f"no site settings: {submission.site} is not there. Copy {home / 'launch' / 'site.env.example'} to it and change what is your "
            "cluster's, or set GPTOSS_SITE to your own file."
        )
    return submission


def check_fits(loaded: Loaded, plan: RunPlan, submission: Submission) -> str:
    """Raises for what cannot run on so many nodes; returns a remark, "" when there is none."""
    if plan.not_built:
        raise ConfigError("; ".join(plan.not_built))
    check_memory(loaded)
    if submission.verb == "train":
        check_engine_memory(loaded)
    if plan.shortfall:
        alone = place(loaded.config.model_copy(update={"cluster": loaded.config.cluster.model_copy(update={"nodes": 0})}))
        raise ConfigError(f"{plan.shortfall}. Use --nodes {alone.num_nodes}, or fewer ranks or engines.")
    per_node = site_value(submission.site, "SBATCH_GPUS_PER_NODE")
    wanted = loaded.config.cluster.gpus_per_node
    if plan.device == "cuda" and per_node != str(wanted):
        raise ConfigError(
            f"{loaded.show('cluster.gpus_per_node')}, and SBATCH_GPUS_PER_NODE = {per_node or 'nothing'} ({submission.site}). "
            "They must be equal."
        )
    check_run_target(loaded, plan, submission.verb)
    check_inputs(loaded.config)  # as `gptoss plan` does: nothing is downloaded on a login node
    idle = sorted(set(range(submission.nodes)) - {*plan.placement.trainer, *(plan.placement.engines if submission.verb == "train" else ())})
    return f"{len(idle)} of {submission.nodes} nodes would have nothing to do" if idle else ""


def site_value(site: Path, name: str) -> str:
    """What the shell makes of one setting; the environment counts where the file says nothing."""
    line = f'. {shlex.quote(str(site))} && printf %s "${{{name}:-}}"'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"{site} is not a file that bash can read: {done.stderr.strip()}")
    return done.stdout


def submit(submission: Submission) -> str:
    """The job's number. MachineError when Slurm is not here or refuses."""
    try:
        done = subprocess.run(
            ["bash", "-c", submission.shell()], capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MachineError(f"sbatch did not answer within {SUBMIT_TIMEOUT_S} s. Is Slurm's controller up (scontrol ping)?") from None
    if done.returncode == 127:
        raise MachineError("sbatch is not on this machine. Submit from a login node of your cluster, or see what would be done: --dry-run.")
    if done.returncode:
        raise MachineError(f"Slurm refused the job: {_last_line(done.stderr)}. Settings: {submission.site}.{_partitions()}")
    return done.stdout.strip().split(";")[0]


def _last_line(text: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-2:]) or "without a word"


def _partitions() -> str:
    try:
        found = subprocess.run(["sinfo", "-h", "-o", "%R (%G)"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" Partitions here: {', '.join(sorted({line.replace(' ((null))', '') for line in found.splitlines()}))}."
