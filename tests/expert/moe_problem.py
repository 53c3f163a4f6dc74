"""Experts with a given routing: the problem, its answer by a plain loop, a rank's share of it.

Tokens of rank r are the r-th slice of all tokens; expert (ep rank, local) holds a slice of the
inner width by etp rank. The loop over tokens and slots in float64 knows none of this.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.plan import ParallelShape
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh.groups import Groups
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.ops.norm import accumulation_dtype

EARLIER = 2.0**-7  # what main gradients hold before
ROUTINGS = ("random", "dropped", "one", "last", "lone", "none")


@dataclass(frozen=True)
class Layout:
    """Ranks and how experts lie on them."""

    ep: int
    etp: int
    edp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.ep * self.etp * self.edp

    def parallel(self) -> ParallelShape:
        """Every rank has tokens of its own: a data-parallel dense grid."""
        sizes = (1, 1, self.ep, self.etp, self.world, self.edp, 1, 1)
        return ParallelShape(self.world, *sizes, False, "tp-cp-ep-dp-pp")

    def place(self, rank: int) -> tuple[int, int]:
        """(ep rank, etp rank)."""
        return rank // self.etp % self.ep, rank % self.etp

    def __str__(self) -> str:
        return f"ep{self.ep}-etp{self.etp}-edp{self.edp}"


@dataclass(frozen=True)
class Case:
    """What is computed; `tokens` of all ranks together."""

    routing: str = "random"
    k: int = 2
    bias: bool = False
    dtype: torch.dtype = torch.float64
    tokens: int = 24
    experts: int = 8
    h: int = 16
    f: int = 32
    seed: int = 1


@dataclass
class Problem:
    """Inputs in `dtype` (probabilities in the accumulation dtype) and the output's gradient."""

    x: Tensor
    ids: Tensor
    probs: Tensor
    grad: Tensor
    gate: Tensor
    up: Tensor
    fc2: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    fc2_bias: Tensor | None = None


def draw_ids(case: Case, generator: torch.Generator) -> Tensor:
    """[tokens, k]: distinct experts of a token, and what the name of the routing says."""
    ids = torch.rand(case.tokens, case.experts, generator=generator).argsort(1)[:, : case.k]
    if case.routing == "dropped":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    elif case.routing == "one":  # all tokens choose the same experts
        ids = torch.arange(case.k).expand(case.tokens, -1)
    elif case.routing == "crossed":  # each half of the tokens knows one expert, far from it
        ids = torch.full_like(ids, -1)
        ids[:, 0] = case.experts - 1
        ids[case.tokens // 2 :, 0] = 0
    elif case.routing == "last":  # other ranks have nothing to do
        ids = torch.full_like(ids, -1)
        ids[:, -1] = case.experts - 1
    elif case.routing in ("lone", "none"):
        ids = torch.full_like(ids, -1)
        if case.routing == "lone":  # one row in all
            ids[0, -1] = case.experts // 2
    return ids.int().contiguous()


def draw(case: Case) -> Problem:
    """Inputs of all ranks."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return (scale * values).to(case.dtype)

    ids = draw_ids(case, generator)
    probs = torch.rand(ids.shape, dtype=torch.float64, generator=generator)
    probs = probs.to(accumulation_dtype(case.dtype)).masked_fill(ids < 0, 0)
    e, h, f = case.experts, case.h, case.f
    matrices = [normal(e, f, h, scale=h**-0.5) for _ in range(2)]
    matrices.append(normal(e, h, f, scale=f**-0.5))
    biases = [normal(e, f), normal(e, f), normal(e, h)] if case.bias else []
    return Problem(normal(case.tokens, h), ids, probs, normal(case.tokens, h), *matrices, *biases)


@cache
def answer(case: Case) -> dict[str, Tensor]:
    """Output and every gradient in float64, one expert after the other."""
    problem = draw(case)
    tensors = {f.name: getattr(problem, f.name) for f in fields(problem)}
    leaves = {
        name: value.detach().double().requires_grad_()
        for name, value in tensors.items()
        if value is not None and name not in ("ids", "grad")
    }
    out = torch.zeros(problem.x.shape, dtype=torch.float64)
    for e in range(case.experts):
        token, slot = (problem.ids == e).nonzero(as_tuple=True)
        x = leaves["x"][token]
        gate, up = x @ leaves["gate"][e].t(), x @ leaves["up"][e].t()
        if case.bias:
            gate, up = gate + leaves["gate_bias"][e], up + leaves["up_bias"][e]
        rows = (functional.silu(gate) * up) @ leaves["fc2"][e].t()
        if case.bias:
            rows = rows + leaves["fc2_bias"][e]
        out = out.index_add(0, token, rows * leaves["probs"][token, slot].unsqueeze(1))
    grads = torch.autograd.grad(out, list(leaves.values()), problem.grad.double())
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


# ---- one rank ----------------------------------------------------------------------------
class Sink:
    """Main gradients in the accumulation dtype, with something in them already."""

    def __init__(self) -> None:
        self.mains: dict[int, Tensor] = {}
        self.counts: dict[int, int] = {}

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer of a parameter."""
        if id(param) not in self.mains:
            dtype = accumulation_dtype(param.dtype)
            self.mains[id(param)] = torch.full(param.shape, EARLIER, dtype=dtype)
        return self.mains[id(param)]

    def written(self, param: nn.Parameter) -> None:
        """Count contributions."""
        self.counts[id(param)] = self.counts.get(id(param), 0) + 1


def context(wgrads: WeightGradientStore | None, native: bool) -> MicrobatchContext:
    """Of one microbatch."""
    nothing = torch.arange(0)
    return MicrobatchContext(
        step=0,
        microbatch=0,
        stage=0,
        training=True,
        seed=1,
        sample_ids=nothing,
        positions=nothing,
        full_positions=nothing,
        loss_weights=None,
        denominators={},
        wgrads=wgrads,
        native=native,
    )


SHAPE = ExpertShape(
    num_experts=8,
    topk=2,
    ffn_hidden_size=32,
    layers=(0,),
    dispatcher="alltoall",
)

# name of the problem -> (name inside the layer, dim cut over etp)
PARAMS = {
    "gate": ("experts.linear_gate.weight", 1),
    "up": ("experts.linear_up.weight", 1),
    "fc2": ("experts.linear_fc2.weight", 2),
    "gate_bias": ("experts.linear_gate.bias", 1),
    "up_bias": ("experts.linear_up.bias", 1),
    "fc2_bias": ("experts.linear_fc2.bias", None),
}


def own_slice(whole: Tensor, dim: int | None, layout: Layout, rank: int) -> Tensor:
    """What a rank holds of an expert tensor [E, ...]."""
    ep_rank, etp_rank = layout.place(rank)
    part = whole.chunk(layout.ep)[ep_rank]
    return part if dim is None else part.chunk(layout.etp, dim)[etp_rank]


def build_parts(
    case: Case, problem: Problem, layout: Layout, groups: Groups, dispatcher: str
) -> ExpertParts:
    """One layer of this rank."""
    rank = groups.world.rank
    params = {}
    for name, (inner, dim) in PARAMS.items():
        whole = getattr(problem, name)
        if whole is not None:
            params[inner] = nn.Parameter(own_slice(whole, dim, layout, rank).clone())
    shape = replace(
        SHAPE,
        num_experts=case.experts,
        topk=case.k,
        ffn_hidden_size=case.f,
        dispatcher=dispatcher,
    )
    return ExpertParts(
        shape=shape,
        layer=0,
        gated=True,
        activation="silu",
        params=params,
        tp=groups.tp,
        tp_cp=groups.tp_cp,
        block=groups.expert_block,
        etp=groups.etp,
        ep=groups.ep,
    )
