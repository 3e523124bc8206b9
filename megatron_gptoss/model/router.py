"""GPT-OSS's router: top K of the experts' logits, softmax over the chosen ones.

In: hidden states of this rank's tokens. Out: for Megatron's token dispatchers probabilities [T, E], zero where not chosen, and the map
of the chosen, bool [T, E]. Weight and bias keep their own type; logits, softmax and gradients are computed in float32. No balancing loss,
no jitter, no capacity. Which experts a token goes to can be recorded and replayed from outside: replay.py.

Ties: of equal logits the lower expert index wins, on every device. torch.topk promises no order there, so logits and indices are composed
into one integer key, and no two keys are equal.

Differs from Hugging Face in bfloat16: there logits are rounded to bfloat16, which makes ties, before the choice. Here they are not.

Shape legend: T tokens of this rank, C hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gptoss.model.replay import remember_routes_in_checkpoints, take_experts

# What 16 bits make of a router's logits: through its input, in standard deviations of a token's logits (docs/self_test.md says how it was
# found), and of each logit itself, where an engine rounds it.
ROUNDING_OF_INPUT, ROUNDING_OF_LOGIT = 0.02, 2.0**-9


def router_spec() -> Any:
    """Builder of the router, for MoESubmodules.router."""
    return GptOssRouter


def choose_experts(logits_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: the experts with the largest logits, largest first; of equal ones the lower index first. NaN counts as largest, so that
    it reaches the loss and is seen there. Half types, float32 (one integer top-k) or float64 (a stable sort)."""
    logits_TE = logits_TE.detach()
    if logits_TE.dtype == torch.float64:  # its bits leave no room for an index
        return torch.sort(logits_TE, dim=-1, descending=True, stable=True).indices[:, :top_k]
    num_experts = logits_TE.shape[-1]
    # Adding zero turns -0.0 into 0.0: they are equal and must have equal bits.
    floats = torch.nan_to_num(logits_TE.float(), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits = floats.view(torch.int32)
    # IEEE floats order like integers once the magnitude bits of the negative ones are flipped.
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    backwards_E = torch.arange(num_experts - 1, -1, -1, device=bits.device)
    keys_TK = torch.topk(order * num_experts + backwards_E, top_k, dim=-1, sorted=True).values
    return num_experts - 1 - keys_TK.remainder(num_experts)


class _Gate(torch.autograd.Function):
    """x W^T + b with factors, sums and gradients in float32 (float64 for float64 inputs), holding only x as it came for backward."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_EC: Tensor, bias_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_EC)
        ctx.wide, ctx.bias_dtype = torch.promote_types(x_TC.dtype, torch.float32), bias_E.dtype
        return torch.addmm(bias_E.to(ctx.wide), x_TC.to(ctx.wide), weight_EC.to(ctx.wide).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TC, weight_EC = ctx.saved_tensors
        grad_x = (grad_TE @ weight_EC.to(ctx.wide)).to(x_TC.dtype)
        grad_weight = (grad_TE.t() @ x_TC.to(ctx.wide)).to(weight_EC.dtype)
        return grad_x, grad_weight, grad_TE.sum(0).to(ctx.bias_dtype)


def router_logits(x_TC: Tensor, weight_EC: Tensor, bias_E: Tensor) -> Tensor:
    """[T, E] in float32, or float64 for float64 inputs."""
    return _Gate.apply(x_TC, weight_EC, bias_E)  # pyright: ignore[reportReturnType]


def softmax_of_chosen(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """[T, K]: softmax over the chosen experts' logits alone. Gradients flow to these logits and to no other."""
    return torch.softmax(logits_TE.gather(1, experts_TK), dim=-1)


@dataclass
class ChoiceNoise:
    """Gaussian noise on the logits that the choice sees; probabilities stay those of the clean logits. To study what different routes do.

    It draws from a generator of its own, which recomputation does not rewind: like rounding that differs from run to run, unlike dropout.
    """

    std: float  # in units of the logits
    generator: torch.Generator  # on the routers' device
    like_rounding: bool = False  # `std` in units of what 16 bits make of the logits

    def __call__(self, logits_TE: Tensor) -> Tensor:
        logits_TE = logits_TE.detach()
        noise_TE = torch.empty_like(logits_TE).normal_(0.0, self.std, generator=self.generator)
        if self.like_rounding:
            noise_TE *= ROUNDING_OF_INPUT * logits_TE.std(dim=-1, keepdim=True) + ROUNDING_OF_LOGIT * logits_TE.abs()
        return logits_TE + noise_TE


class GptOssRouter(Router):
    """Megatron's parameters (`weight` [E, C], `bias` [E], marked as sequence-parallel, so that finalize_model_grads sums their gradients
    over the tensor-parallel ranks, each of which routes its own tokens), with GPT-OSS's routing."""

    ignore_bias = False  # wrong on purpose (faults.py)

    def __init__(self, config: Any, pg_collection: ProcessGroupCollection | None = None, is_mtp_layer: bool = False) -> None:
        _refuse_other_routers(config)
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.noise: ChoiceNoise | None = None
        remember_routes_in_checkpoints()

    @property
    def layer(self) -> int:
        """Which layer of the whole model this is, from 0."""
        assert self.layer_number is not None, "Megatron numbers a router after building it"
        return self.layer_number - 1

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [..., C] -> logits [T, E], experts [T, K] int64, probabilities [T, K], the last two in the order of the choice."""
        x_TC = hidden.reshape(-1, hidden.shape[-1])
        top_k: int = self.config.moe_router_topk
        bias_E: Any = torch.zeros_like(self.bias) if self.ignore_bias else self.bias  # pyright: ignore[reportArgumentType]
        logits_TE = router_logits(x_TC, self.weight, bias_E)

        def own() -> Tensor:
            return choose_experts(logits_TE if self.noise is None else self.noise(logits_TE), top_k)

        experts_TK = take_experts(self.layer, logits_TE, top_k, own)
        return logits_TE, experts_TK, softmax_of_chosen(logits_TE, experts_TK)

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("GptOssRouter routes in forward")  # the base class is abstract without it

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [s, b, C] -> probabilities float32 [T, E] and map bool [T, E], T = s b. The mask is for balancing losses only."""
        logits_TE, experts_TK, probs_TK = self.route(input)
        probs_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, probs_TK)
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, experts_TK, True)
        return probs_TE, chosen_TE


def routers_of(model: torch.nn.Module) -> list[GptOssRouter]:
    """The routers of this rank's layers, in order."""
    return [module for module in model.modules() if isinstance(module, GptOssRouter)]


def router_layers(model: torch.nn.Module) -> tuple[int, ...]:
    """Which layers this rank has routers for: what `Routes.cut(layers=...)` takes on a pipeline stage."""
    return tuple(router.layer for router in routers_of(model))


def rounding_noise(router: GptOssRouter) -> ChoiceNoise:
    """As large as another order of sums in 16 bits may make it: choices that it changes are near-ties."""
    seed = 1_000_003 * dist.get_rank() + 1000 * router.layer
    return ChoiceNoise(1.0, torch.Generator(device=router.weight.device).manual_seed(seed), like_rounding=True)


def inject_choice_noise(model: torch.nn.Module, std: float, seed: int) -> None:
    """Give every router noise of its own, or none when std is 0."""
    for router in routers_of(model):
        generator = torch.Generator(device=router.weight.device).manual_seed(seed + 1000 * router.layer)
        router.noise = ChoiceNoise(std, generator) if std else None


def _refuse_other_routers(config: Any) -> None:
    """Raises ValueError when the configuration asks for something that this router would silently leave out."""
    wanted = {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_z_loss_coeff": None,
        "moe_input_jitter_eps": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_force_load_balancing": False,
        "moe_router_force_biased": None,
        "moe_router_fusion": False,
        "moe_expert_capacity_factor": None,
        "moe_enable_routing_replay": False,  # Megatron's replay; ours is replay.py
        "add_bias_linear": True,
    }
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise ValueError(f"GPT-OSS's router needs {field} = {value!r}, and the configuration has {getattr(config, field)!r}")
