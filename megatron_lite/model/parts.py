"""What every part of a stage is built from: shape, groups, parameters, norms.

`StageParts` is handed down instead of a configuration: resolved numbers, the groups, and a
way to reach this rank's physical parameters by name. Parts hold no tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_lite.config.plan import ModelShape
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.norm import layer_norm, rms_norm


@dataclass(frozen=True, eq=False)
class StageParts:
    """What the parts of one stage share.

    Attributes:
        shape: the architecture.
        tp_group: the tensor-parallel group.
        sequence_parallel: activations outside tensor regions are slices of the sequence.
        params: this rank's physical parameters by name.
        fused_attention: use torch's fused attention kernel.
        recompute: "none", "selective" (the attention core) or "full" (whole layers).
    """

    shape: ModelShape
    tp_group: Group
    sequence_parallel: bool
    params: Mapping[str, nn.Parameter]
    fused_attention: bool
    recompute: str

    def norm(self, name: str, x: Tensor, mb: MicrobatchContext) -> Tensor:
        """Apply the architecture's norm with the parameters NAME.weight (and NAME.bias)."""
        weight, eps, plus = (
            self.params[f"{name}.weight"],
            self.shape.norm_epsilon,
            self.shape.norm_one_plus,
        )
        if self.shape.normalization == "RMSNorm":
            return rms_norm(x, weight, eps, plus, mb)
        return layer_norm(x, weight, self.params[f"{name}.bias"], eps, plus, mb)
