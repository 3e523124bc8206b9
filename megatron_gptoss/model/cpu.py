"""The smallest shim that lets Megatron-Core 0.19.2 run on a host without a GPU.

In: nothing. Out: torch.cuda's bookkeeping answers for the host, and the Megatron modules that say device="cuda" get the host.
With a GPU present `install()` does nothing. It changes no mathematics.

TORCHDYNAMO_DISABLE=1 must be in the environment before torch is imported: Megatron wraps many functions in torch.compile, which on a CPU
means minutes of g++ and, in bf16, other numbers. `install()` refuses to go on without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_gptoss.errors import MachineError

_installed = False


def install() -> None:
    """Patch torch.cuda and Megatron for this process, once. Raises MachineError when TorchDynamo is on and there is no GPU."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        raise MachineError("Megatron on a CPU needs TORCHDYNAMO_DISABLE=1 in the environment before Python starts")
    _answer_for_the_host()
    _patch_megatron()
    _installed = True


def _answer_for_the_host() -> None:
    """torch.cuda's questions about devices, streams and random states, answered for the host."""
    cuda: Any = torch.cuda
    host = torch.device("cpu")
    cuda.current_device = lambda: host  # Megatron passes the answer on as a device= argument, nothing else
    cuda.synchronize = lambda *_args: None
    cuda.Stream, cuda.Event = _NoStream, _NoEvent
    cuda.current_stream = lambda *_args: _NoStream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_args: torch.get_rng_state()

    # Megatron's optimizers sort parameters by comparing type() with "torch.cuda.FloatTensor" and its bf16 and fp16 siblings.
    tensor: Any = torch.Tensor
    real_type = tensor.type

    @functools.wraps(real_type)
    def type_with_cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and "cuda" not in answer else answer

    tensor.type = type_with_cuda_name
    tensor.cuda = lambda self, *_args, **_kwargs: self  # the distributed optimizer, before it gathers moments for a checkpoint


def _patch_megatron() -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # Written with device="cuda" spelled out. Each of these modules gets its own `torch`, so that nobody else's is touched.
    # (A TorchFunctionMode cannot do this: modes are off inside backward, where recomputation runs.)
    for module in (utils, clip_grads, optimizer, schedules):
        module.torch = _TorchOnHost()  # type: ignore[attr-defined]

    patched: Any = random  # recomputation saves and restores the device's random state
    patched._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    patched._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Megatron's own converts split sizes to numpy only when they are on a GPU, and all_to_all_single refuses tensors as sizes.
    patched = token_dispatcher
    patched.maybe_move_tensor_to_cpu = to_host


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _TorchOnHost:
    """The torch module as a Megatron module sees it: device="cuda" means the host."""

    zeros = staticmethod(_on_host(torch.zeros))
    tensor = staticmethod(_on_host(torch.tensor))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _NoEvent:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...


class _NoStream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _NoEvent()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0
