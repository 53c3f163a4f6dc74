"""What the parts of one MoE layer are built from: shape, groups, this rank's parameters.

Handed down instead of a configuration, like the model's own parts, which the expert axis
does not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.expert.running import RunningCounts
from megatron_lite.mesh.groups import Group

DISPATCH_TIMER = "moe-dispatch"  # exchanges of tokens between the ranks of a block: what one waits


@dataclass(frozen=True, eq=False)
class ExpertParts:
    """One MoE layer of one rank.

    Attributes:
        shape: the mixture.
        layer: global number of the layer.
        gated: an expert's first linear has a gate.
        activation: name of the activation.
        params: physical parameters by their name inside the layer's MLP
            ("router.weight", "experts.linear_fc2.weight", ...).
        tp: the tensor group of dense layers, over which tokens are sliced.
        tp_cp: the ranks that hold the tokens of one microbatch.
        block: the ranks that together hold all experts once, etp fastest.
        etp: the tensor group of experts.
        ep: the expert group.
        activation_limit: gate and up are clamped there before the activation.
        linear_offset: added to up.
        running: what the running form of the global loss compares with; None for others.
        copies: slots of a rank behind its own experts, for replicated ones.
    """

    shape: ExpertShape
    layer: int
    gated: bool
    activation: str
    params: Mapping[str, nn.Parameter]
    tp: Group
    tp_cp: Group
    block: Group
    etp: Group
    ep: Group
    activation_limit: float = math.inf
    linear_offset: float = 0.0
    running: RunningCounts | None = None
    copies: int = 0

    @property
    def local_experts(self) -> int:
        """Experts that this rank holds (a slice of)."""
        return self.shape.num_experts // self.ep.size

    @property
    def slots(self) -> int:
        """What this rank multiplies by: its experts and copies of others."""
        return self.local_experts + self.copies

    def state(self, name: str) -> Tensor | None:
        """State of the router, "expert_bias" or "expert_counts"; None where it has none."""
        param = self.params.get(f"router.{name}")
        return None if param is None else param.data
