"""The MoE layers that `moe.py` times: ours, `transformers`' blocks, plain torch.

All have the same weights (softmax over the chosen k, SiLU-gated experts) and the same tokens,
so that their results can be compared before they are timed. A step is a forward and a backward
pass with weight gradients, ours into fp32 main gradients, peers' into `.grad`. Peers know no
expert parallelism: on several ranks each has all experts and its own tokens, and gradients
are not reduced, which favours those that hold experts more than once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.plan import ParallelShape
from megatron_lite.expert.layer import moe
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Groups, build_groups, local_groups
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.ops.norm import accumulation_dtype

Step = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Size:
    """One mixture: `family` names the block of `transformers` that computes the same."""

    family: str
    tokens: int
    h: int
    f: int
    experts: int
    k: int

    def __str__(self) -> str:
        shape = f"h {self.h} f {self.f} e {self.experts} k {self.k}"
        return f"{self.family} {shape}, {self.tokens} tokens"


SIZES = {
    "cpu": (Size("mixtral", 1024, 512, 1024, 8, 2), Size("qwen3-moe", 1024, 512, 192, 64, 8)),
    "cuda": (
        Size("mixtral", 4096, 4096, 14336, 8, 2),
        Size("qwen3-moe", 8192, 2048, 768, 128, 8),
    ),
    "quick": (Size("mixtral", 32, 32, 48, 4, 2), Size("qwen3-moe", 32, 32, 16, 8, 4)),
}


@dataclass(frozen=True)
class Layer:
    """Weights of a layer and the tokens of one rank.

    Attributes:
        size: of it.
        x, grad: [t, 1, h] tokens and the gradient of the result.
        router: [e, h]; gate, up: [e, f, h]; down: [e, h, f].
    """

    size: Size
    x: Tensor
    grad: Tensor
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def draw(size: Size, rank: int, dtype: torch.dtype, device: str) -> Layer:
    """Weights are the same on all ranks, tokens are not."""

    def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return (scale * torch.randn(*shape, generator=generator, device=device)).to(dtype)

    e, h, f = size.experts, size.h, size.f
    return Layer(
        size,
        normal(100 + rank, size.tokens, 1, h),
        normal(200 + rank, size.tokens, 1, h),
        normal(1, e, h, scale=h**-0.5),
        normal(2, e, f, h, scale=h**-0.5),
        normal(3, e, f, h, scale=h**-0.5),
        normal(4, e, h, f, scale=f**-0.5),
    )


# ---- ours ----------------------------------------------------------------------------------
class _Mains:
    """Main gradients in the accumulation dtype."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._mains = {
            id(p): torch.zeros_like(p, dtype=accumulation_dtype(p.dtype), requires_grad=False)
            for p in params
        }

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer of a parameter."""
        return self._mains[id(param)]

    def written(self, param: nn.Parameter) -> None:
        """Nobody waits for it."""


def groups_of(ep: int, rank: int, world: int) -> Groups:
    """Groups in which tokens are divided over all ranks and experts over `ep`; collective."""
    if world == 1:
        return local_groups()
    sizes = (world, 1, 1, ep, 1, world, world // ep, 1, 1)
    parallel = ParallelShape(*sizes, False, "tp-cp-ep-dp-pp")
    return build_groups(build_grids(parallel), rank, 1)


def _shape(size: Size, dispatcher: str) -> ExpertShape:
    return ExpertShape(
        num_experts=size.experts,
        topk=size.k,
        ffn_hidden_size=size.f,
        layers=(0,),
        dispatcher=dispatcher,
    )


def our_step(layer: Layer, groups: Groups, dispatcher: str, native: bool) -> Step:
    """Our layer on the experts of this rank."""
    ep = groups.ep

    def own(weight: Tensor) -> nn.Parameter:
        return nn.Parameter(weight.chunk(ep.size)[ep.rank].clone())

    params = {
        "router.weight": nn.Parameter(layer.router.clone()),
        "experts.linear_gate.weight": own(layer.gate),
        "experts.linear_up.weight": own(layer.up),
        "experts.linear_fc2.weight": own(layer.down),
    }
    parts = ExpertParts(
        shape=_shape(layer.size, dispatcher),
        layer=0,
        gated=True,
        activation="silu",
        params=params,
        tp=groups.tp,
        tp_cp=groups.tp_cp,
        block=groups.expert_block,
        etp=groups.etp,
        ep=ep,
    )
    mains = _Mains(list(params.values()))
    places = torch.arange(layer.x.shape[0], device=layer.x.device)
    x = layer.x.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        mb = MicrobatchContext(
            step=0,
            microbatch=0,
            stage=0,
            training=True,
            seed=1,
            sample_ids=places[:1],
            positions=places,
            full_positions=places,
            loss_weights=None,
            denominators={},
            wgrads=WeightGradientStore(mains),
            native=native,
        )
        out = moe(parts, x, True, mb)
        (grad,) = torch.autograd.grad(out, x, layer.grad)
        return out.detach(), grad

    return step


# ---- peers ---------------------------------------------------------------------------------
def _with_gradients(
    run: Callable[[Tensor], Tensor], params: Sequence[Tensor], layer: Layer
) -> Step:
    """Forward and backward; gradients of parameters are accumulated like ours."""
    x = layer.x.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        x.grad = None
        out = run(x)
        out.backward(layer.grad)
        grad: Any = x.grad
        return out.detach(), grad

    for param in params:
        param.requires_grad_()
    return step


def hf_step(layer: Layer, implementation: str) -> Step:
    """The block of `transformers` by one of its implementations of experts."""
    size = layer.size
    common: dict[str, Any] = {
        "hidden_size": size.h,
        "num_experts_per_tok": size.k,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 8,
    }
    if size.family == "mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config: Any = MixtralConfig(
            intermediate_size=size.f, num_local_experts=size.experts, **common
        )
        block: Any = MixtralSparseMoeBlock
    else:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            moe_intermediate_size=size.f, num_experts=size.experts, norm_topk_prob=True, **common
        )
        block = Qwen3MoeSparseMoeBlock
    config._experts_implementation = implementation
    module = block(config).to(layer.x.device, layer.x.dtype).train()
    with torch.no_grad():
        module.gate.weight.copy_(layer.router)
        module.experts.gate_up_proj.copy_(torch.cat([layer.gate, layer.up], 1))
        module.experts.down_proj.copy_(layer.down)
    return _with_gradients(module, list(module.parameters()), layer)


def torch_step(layer: Layer) -> Step:
    """What one writes with torch's grouped product."""
    router, down = layer.router.clone(), layer.down.clone()
    gate_up = torch.cat([layer.gate, layer.up], 1)
    k, experts = layer.size.k, layer.size.experts
    grouped = getattr(functional, "grouped_mm", None) or torch._grouped_mm

    def run(x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = (tokens @ router.t()).float().softmax(-1)
        probs, ids = scores.topk(k, dim=-1)
        probs = (probs / probs.sum(-1, keepdim=True)).to(x.dtype)
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=experts).cumsum(0).int()
        source = order // k
        rows = tokens.index_select(0, source)
        gate, up = grouped(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        rows = grouped(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        rows = rows * probs.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, source, rows).view_as(x)

    return _with_gradients(run, [router, gate_up, down], layer)


def contestants(size: Size, rank: int, world: int, dtype: torch.dtype, device: str) -> list[Any]:
    """(name, step) of everyone; ours first. Every rank calls it.

    Comm: creation of groups.
    """
    layer = draw(size, rank, dtype, device)
    steps: list[Any] = [("ours", our_step(layer, groups_of(1, rank, world), "alltoall", True))]
    if world > 1:
        spread = groups_of(world, rank, world)
        for dispatcher in ("alltoall", "allgather"):
            steps.append(
                (f"ours ep{world} {dispatcher}", our_step(layer, spread, dispatcher, True))
            )
    else:
        steps.append(("ours, no native", our_step(layer, groups_of(1, 0, 1), "alltoall", False)))
    if importlib.util.find_spec("transformers") is not None:
        for family, implementation in product([size.family], ("eager", "grouped_mm")):
            steps.append((f"hf {family} {implementation}", hf_step(layer, implementation)))
    return [*steps, ("torch grouped_mm", torch_step(layer))]
