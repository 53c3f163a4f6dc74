"""The dense MLP of one layer: column-parallel in (gate and up fused), row-parallel out."""

from __future__ import annotations

from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.parts import LayerParts
from megatron_lite.ops.activation import activate


def mlp(layer: LayerParts, x: Tensor, mb: MicrobatchContext) -> Tensor:
    """MLP of one layer without the second linear's bias.

    Args:
        layer: parameters and what uses them.
        x: [s_local, b, h], normed.
        mb: the microbatch.

    Returns:
        [s_local, b, h], to which the caller adds the bias.

    Comm: that of one column- and one row-parallel linear.
    """
    shape = layer.stage.shape
    inner = layer.column_linear("mlp.linear_fc1", x, mb)
    inner = activate(
        inner,
        shape.activation,
        shape.gated,
        mb.native,
        shape.activation_limit,
        shape.linear_offset,
    )
    return layer.row_linear("mlp.linear_fc2", inner, mb)
