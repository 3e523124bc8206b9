"""An engine core with several workers, which dies with its actor.

In: vLLM names this class (`distributed_executor_backend`) and makes it inside the engine core. Out: vLLM's own executor, one process a
worker. A single worker needs none of this: it lives in the engine core, and vllm_worker.py ties both to the actor. With several, only the
workers import that module; without this class a killed actor would leave its engine core behind.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megatron_gptoss.rollout.lifeline import die_with_parent


class WorkersThatDieWithUs(MultiprocExecutor):
    def _init_executor(self) -> None:
        die_with_parent()  # here and not at the import: the actor imports this module too
        super()._init_executor()
