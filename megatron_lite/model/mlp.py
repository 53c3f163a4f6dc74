"""The dense MLP of one layer: column-parallel in (gate and up fused), row-parallel out."""

from __future__ import annotations

from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.parts import StageParts
from megatron_lite.ops.activation import activate
from megatron_lite.tensor.linear import column_parallel_linear, row_parallel_linear


def mlp(parts: StageParts, layer: int, x: Tensor, mb: MicrobatchContext) -> Tensor:
    """MLP of one layer without the second linear's bias.

    Args:
        parts: shape, groups, parameters.
        layer: global layer index.
        x: [s_local, b, h], normed.
        mb: the microbatch.

    Returns:
        [s_local, b, h], to which the caller adds the bias.

    Comm: that of one column- and one row-parallel linear.
    """
    prefix = f"decoder.layers.{layer}.mlp"
    inner = column_parallel_linear(
        x,
        parts.params[f"{prefix}.linear_fc1.weight"],
        parts.params.get(f"{prefix}.linear_fc1.bias"),
        parts.tp_group,
        parts.sequence_parallel,
        mb,
    )
    inner = activate(inner, parts.shape.activation, parts.shape.gated, mb.native)
    return row_parallel_linear(
        inner,
        parts.params[f"{prefix}.linear_fc2.weight"],
        parts.tp_group,
        parts.sequence_parallel,
        mb,
    )
