"""The throw-away Slurm cluster (lab.sh) as tests use it: start, submit, watch, break, end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.runs import ROOT, metrics, wait_for

LAB = ROOT / "tests" / "slurm" / "lab.sh"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare")
# Every command has a deadline of its own: a Slurm that has lost a node may let a client wait for ever.
CLIENT_S = 60


def why_not() -> str:
    """Why no such cluster can run here; "" when it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster in namespaces needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} missing: tests/slurm/lab.sh install (Debian, Ubuntu)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"this root may not make namespaces: {probe.stderr.strip()}" if probe.returncode else ""


class Cluster:
    """`folder` is on the file system that all nodes share; a short path, since Ray's sockets and Slurm's spool lie below it."""

    def __init__(self, nodes: int, *, gpus: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gptoss-slurm-", dir="/var/tmp"))
        self.folder.chmod(0o755)  # munge's socket lies below it
        self.names = [f"node{i + 1}" for i in range(nodes)]
        self.environment = {**os.environ, "SLAB": str(self.folder / "lab"), "SLAB_NODES": str(nodes), "SLAB_GPUS": str(gpus)}
        for name in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "RAY_worker_niceness"):
            self.environment.pop(name, None)  # the tests' own settings must not help a run along
        self.home, self.runs = self.folder / "home", self.folder / "runs"
        self.home.mkdir()
        self.runs.mkdir()
        self.site()
        self.lab("up")

    def site(self, **settings: object) -> Path:
        """A site.env for this cluster, with changes; returns its path."""
        values: dict[str, object] = {
            "GPTOSS_VENV": Path(sys.executable).parent.parent,
            "GPTOSS_RUNS": self.runs,
            "GPTOSS_LOCAL_TMP": "/tmp/ray",  # the only folder that each node has for itself
            "GPTOSS_OBJECT_STORE": 200_000_000,
            "GPTOSS_SAVE_S": 200,
            **settings,
        }
        path = self.folder / f"site{len(list(self.folder.glob('site*.env')))}.env" if settings else self.folder / "site.env"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def lab(self, *arguments: str, timeout: float = CLIENT_S, check: bool = True, **more: str) -> str:
        done = subprocess.run(
            ["bash", str(LAB), *arguments], cwd=self.home, env={**self.environment, **more}, capture_output=True, text=True, timeout=timeout
        )
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def sbatch(self, script: str, *arguments: str, options: tuple[str, ...] = (), site: Path | None = None) -> str:
        """Submit launch/SCRIPT as a person does; returns the job's number."""
        line = ["exec", "sbatch", "--parsable", *options, str(ROOT / "launch" / script), *arguments]
        return self.lab(*line, GPTOSS_HOME=str(ROOT), GPTOSS_SITE=str(site or self.folder / "site.env")).strip()

    def stand_in(self, train: str) -> Path:
        """An environment for GPTOSS_VENV whose Ray only answers its port, and whose `gptoss train` is these lines of bash: what the scripts
        make of a driver, without the half minute that a real one takes to start. $run: the directory of the run."""
        folder = Path(tempfile.mkdtemp(prefix="venv", dir=self.folder))
        listen = "import socket, time; s = socket.socket(); s.bind(('', $port)); s.listen(); time.sleep(600)"
        programs = {
            "ray": f'for word; do case $word in --port=*) port=${{word#*=}} ;; esac; done\nexec {sys.executable} -c "{listen}"\n',
            "gptoss": "for word; do case $word in --run.dir=*) run=${word#*=} ;; --run.id=*) run+=/demo-${word#*=} ;; esac; done\n"
            f"[ $1 = train ] || exit 0\n{train}\n",
        }
        (folder / "bin").mkdir()
        for name, text in programs.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
            (folder / "bin" / name).chmod(0o755)
        return folder

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.lab("exec", "scontrol", "show", "job", "-o", number)))

    def output(self, number: str) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.home.glob(f"*-{number}.out")))

    def run(self, number: str) -> Path:
        return self.runs / f"demo-{number}"

    def await_step(self, number: str, step: int, timeout: float) -> None:
        """Until the run has written down this step, or the job is over (which fails the test)."""

        def there() -> bool:
            state = self.job(number)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), f"{state}\n{self.output(number)}"
            file = self.run(number) / "metrics.jsonl"
            return file.exists() and any(json.loads(line)["step"] >= step for line in file.open() if line.endswith("\n"))

        wait_for(there, f"step {step} of job {number}", timeout=timeout, poll=0.5)

    def await_output(self, number: str, text: str, timeout: float) -> None:
        wait_for(lambda: text in self.output(number), f"{text!r} in the output of job {number}", timeout=timeout, poll=0.5)

    def await_end(self, number: str, timeout: float) -> dict[str, str]:
        def over() -> bool:
            return self.job(number)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

        try:
            wait_for(over, f"the end of job {number}", timeout=timeout, poll=1.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.job(number)}\n{self.output(number)}") from None
        return self.job(number)

    def processes(self, node: str) -> list[str]:
        """Command lines on a node, but for those that are the node itself."""
        lines = self.lab("node", node, "ps", "-e", "-o", "args=").splitlines()
        own = ("bash " + str(LAB), "slurmd ", "ps -e")
        return [line for line in lines if not line.startswith(own) and "<defunct>" not in line]

    def await_quiet(self, job: str, nodes: Sequence[str], timeout: float = 60, expected: tuple[str, ...] = ()) -> None:
        """The job is out of the queue, and its nodes have no process that is not their own or `expected`, nor its Ray folder."""
        wait_for(
            lambda: job not in self.lab("exec", "squeue", "-h", "-o", "%i").split(), f"the end of job {job}", timeout=timeout, poll=1.0
        )
        for node in nodes:
            self.await_quiet_node(node, timeout, expected)
            assert not (self.local(node) / f"gptoss-{job}").exists()

    def await_quiet_node(self, node: str, timeout: float, expected: tuple[str, ...] = ()) -> None:
        deadline = time.monotonic() + timeout
        while left := [line for line in self.processes(node) if line not in expected]:
            assert time.monotonic() < deadline, f"after {timeout:.0f} s there is on {node}: {left}"
            time.sleep(1.0)

    def time_limit(self, job: str, minutes: int) -> None:
        self.lab("exec", "scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def minutes(self, job: str) -> int:
        """How long this start of the job has run, whole minutes."""
        *days, hours, minutes, _ = re.split("[-:]", self.job(job)["RunTime"])
        return int(days[0] if days else 0) * 1440 + int(hours) * 60 + int(minutes)

    def local(self, node: str) -> Path:
        """The folder that is /tmp/ray on that node and there only."""
        return self.folder / "lab" / "local" / node / "ray"

    def metrics(self, number: str) -> dict[int, dict]:
        return metrics(self.run(number))

    def down(self) -> None:
        self.lab("down")
        shutil.rmtree(self.folder, ignore_errors=True)
