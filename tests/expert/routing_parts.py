"""Routers for tests: a mixture's shape, one layer's parts, a context that keeps gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.mesh.groups import Group, local_group
from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore

SEQUENCE, SAMPLES, HIDDEN, EXPERTS = 12, 3, 16, 8
MICROBATCHES = 4.0

PLAIN = ExpertShape(
    num_experts=EXPERTS,
    topk=2,
    ffn_hidden_size=24,
    layers=(1, 3),
    dispatcher="alltoall",
)
ALL_LOSSES = (("aux_loss", 0.01), ("seq_aux_loss", 0.02), ("global_aux_loss", 0.03))
SIGMOID = replace(PLAIN, score_function="sigmoid", topk=4, expert_bias=True)
SHAPES = {
    "post": replace(PLAIN, balancing=(("aux_loss", 0.01),), z_loss_coeff=0.001),
    "post_one_of_all": replace(PLAIN, topk=EXPERTS, balancing=(("aux_loss", 0.01),)),
    "post_groups": replace(PLAIN, topk=4, num_groups=4, group_topk=2, scaling_factor=2.5),
    "pre": replace(PLAIN, pre_softmax=True, balancing=(("seq_aux_loss", 0.5),)),
    "pre_top_1": replace(PLAIN, pre_softmax=True, topk=1, balancing=ALL_LOSSES),
    "pre_groups": replace(PLAIN, pre_softmax=True, topk=3, num_groups=2, group_topk=1),
    "sigmoid": replace(SIGMOID, balancing=ALL_LOSSES, z_loss_coeff=0.001),
    "sigmoid_top_1": replace(SIGMOID, topk=1, balancing=(("aux_loss", 0.01),)),
    "sigmoid_groups": replace(SIGMOID, num_groups=4, group_topk=2, scaling_factor=2.5),
    "sigmoid_one_group": replace(SIGMOID, topk=3, num_groups=2, group_topk=1),
    "sqrtsoftplus": replace(SIGMOID, score_function="sqrtsoftplus", balancing=ALL_LOSSES),
}


@dataclass(eq=False)
class Sink:
    """Main gradients in the dtype given, with how often each was written."""

    dtype: torch.dtype = torch.float64
    grads: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    writes: int = 0

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer of a parameter."""
        return self.grads.setdefault(param, torch.zeros_like(param.data, dtype=self.dtype))

    def written(self, param: nn.Parameter) -> None:
        """Count contributions."""
        self.writes += 1


def build_parts(
    shape: ExpertShape,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    tp: Group | None = None,
    tp_cp: Group | None = None,
    layer: int = 1,
) -> ExpertParts:
    """Parts with a router only; its bias and counts are not even."""
    generator = torch.Generator().manual_seed(layer)
    if weight is None:
        weight = torch.randn(shape.num_experts, HIDDEN, generator=generator, dtype=torch.float64)
    params = {"router.weight": nn.Parameter(weight.to(dtype))}
    states = {
        "expert_bias": 0.2 * torch.randn(shape.num_experts, generator=generator),
        "expert_counts": torch.randint(1, 50, (shape.num_experts,), generator=generator),
    }
    present = {"expert_bias": shape.expert_bias}
    present["expert_counts"] = shape.coefficient("global_aux_loss") > 0
    for name, state in states.items():
        if present[name]:
            params[f"router.{name}"] = nn.Parameter(state.to(dtype), requires_grad=False)
    one = local_group("one")
    return ExpertParts(
        shape, layer, True, "silu", params, tp or one, tp_cp or one, local_group("block"), one, one
    )


def build_tokens(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """[s, b, h]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SEQUENCE, SAMPLES, HIDDEN, generator=generator, dtype=torch.float64)
    return x.to(dtype)


def context(
    sink: Sink | None,
    positions: Tensor | None = None,
    samples: int = SAMPLES,
    step: int = 3,
    deferred: bool = False,
    microbatches: float = MICROBATCHES,
) -> MicrobatchContext:
    """A microbatch that trains where there is a sink."""
    positions = torch.arange(SEQUENCE) if positions is None else positions
    return MicrobatchContext(
        step=step,
        microbatch=0,
        stage=0,
        training=sink is not None,
        seed=1234,
        sample_ids=torch.arange(samples) + 5,
        positions=positions,
        full_positions=positions,
        loss_weights=None,
        denominators={"moe": torch.tensor(microbatches, dtype=torch.float64)},
        wgrads=None if sink is None else WeightGradientStore(sink, deferred),
    )
