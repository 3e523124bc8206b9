"""A job is started again: does its run go on, or begin anew?

In: the directory that the job's run has or would have. Out: whether there is something to go on from; nothing that was written is lost.
"""

from __future__ import annotations

from pathlib import Path

from megatron_gptoss.obs.run_dir import is_run_dir, latest_checkpoint


def can_go_on(run_dir: Path) -> bool:
    """True: resume. False: begin; a run that ended before its first whole checkpoint now has another name, NAME-ID.ended-1, -2, ..."""
    if not is_run_dir(run_dir):
        return False
    if latest_checkpoint(run_dir) is not None:
        return True
    count = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.ended-{count}")).exists():
        count += 1
    run_dir.rename(aside)
    return False
