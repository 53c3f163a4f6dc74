"""Upcycling: what a dense MLP becomes when it is cut into experts and copied.

With granularity g every g experts in a row are one copy of the dense MLP, each a slice of its
inner width; they share the first values of their rows of the router, so a token takes all
slices of a copy or none. Weights are scaled so that the first output is the dense one:
exactly where a token's weights sum to a constant, else for an undecided router. Where the
factor lies is ours: on linear parts only, since no activation but a squared ReLU passes a
factor on. Source: He et al., arXiv 2410.07524 ("virtual groups").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.config.expert_rules import expert_width
from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.layout_rules import ffn_width
from megatron_lite.config.plan import ModelShape

UPCYCLING = "--moe-use-upcycling"
GRANULARITY = "--moe-upcycling-granularity"
# Score of a logit of 0.
_UNDECIDED = {"sigmoid": 0.5, "sqrtsoftplus": math.sqrt(math.log(2.0))}


@dataclass(frozen=True)
class Upcycling:
    """How dense weights become those of experts.

    Attributes:
        granularity: slices that a dense MLP is cut into.
        first: factor of what the activation is not applied to in the first linears, or of all
            of them under a squared ReLU.
        second: factor of the second linear's weight.
        bias: factor of its bias.
    """

    granularity: int
    first: float
    second: float
    bias: float

    @property
    def keeps_values(self) -> bool:
        """Whether experts are plain copies of (slices of) the dense weights."""
        return self.first == self.second == self.bias == 1.0


def weight_sum(experts: ExpertShape) -> float:
    """What the weights of a token's experts sum to; of an undecided router where it varies."""
    if experts.sinkhorn:
        share = _UNDECIDED["sigmoid"] if experts.topk == 1 else experts.topk / experts.num_experts
    elif experts.score_function == "softmax":
        share = experts.topk / experts.num_experts if experts.pre_softmax else 1.0
    else:
        share = 1.0 if experts.topk > 1 else _UNDECIDED[experts.score_function]
    return share * experts.scaling_factor


def plan_upcycling(model: ModelShape, granularity: int) -> Upcycling:
    """Find the factors that keep the output of the dense model.

    A token's slices all count weight_sum / k and each of them is there k / g times.

    Args:
        model: a mixture of experts.
        granularity: g, accepted by the rules.
    """
    assert model.experts is not None
    total = weight_sum(model.experts)
    factor = granularity / total
    first = 1.0
    if model.gated and model.activation_limit == math.inf and not model.linear_offset:
        first = math.sqrt(factor)
    elif not model.gated and model.activation == "squared_relu":
        first = math.cbrt(factor)
    passed_on = first if model.gated else first * first
    return Upcycling(granularity, first, factor / passed_on, 1.0 / total)


def upcycling_fault(f: Facts) -> str:
    """What makes no sense; empty if nothing does."""
    config, g = f.config, f.config.moe_upcycling_granularity
    if not config.moe_use_upcycling:
        return f"{GRANULARITY} {g} needs {UPCYCLING}" if g != 1 else ""
    if config.num_experts is None:
        return f"{UPCYCLING} needs --num-experts"
    if g < 1:
        return f"{GRANULARITY} {g} must be at least 1"
    if config.moe_shared_expert_intermediate_size is not None:
        return (
            f"{UPCYCLING} with --moe-shared-expert-intermediate-size: a dense checkpoint has no "
            "weights for a shared expert, and its output would be added; leave it out"
        )
    for name, value in (
        ("--num-experts", config.num_experts),
        ("--moe-router-topk", config.moe_router_topk),
    ):
        if value % g:
            return (
                f"{GRANULARITY} {g}: {name} {value} must be a multiple of it, or a token would "
                "get some slices of the dense MLP and not others"
            )
    if ffn_width(f) and expert_width(f) * g != ffn_width(f):
        legal = "leave it out" if g == 1 else f"legal: {ffn_width(f) / g:g}"
        return (
            f"{GRANULARITY} {g}: --moe-ffn-hidden-size {expert_width(f)} is not the dense "
            f"--ffn-hidden-size {ffn_width(f)} / {g}; {legal}"
        )
    return _scattered(f)


def _scattered(f: Facts) -> str:
    """Say why a router would not choose the slices of a copy together; empty if it does."""
    config, g = f.config, f.config.moe_upcycling_granularity
    if g == 1:
        return ""
    if "sinkhorn" in config.moe_router_load_balancing_type:
        return f"{GRANULARITY} {g}: Sinkhorn's assignment would scatter the slices; legal: 1"
    groups, chosen = config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    per_group = f.number("num_experts") // max(groups, 1)
    if per_group % g or (config.moe_router_topk // max(chosen, 1)) % g:
        return (
            f"{GRANULARITY} {g}: --moe-router-num-groups {groups} and --moe-router-group-topk "
            f"{chosen} would scatter the slices: experts of a group and experts of a token per "
            f"group must be multiples of {g}"
        )
    return ""


UPCYCLING_RULES: tuple[Rule, ...] = (
    Rule("upcycling", lambda f: bool(upcycling_fault(f)), upcycling_fault),
)
