"""Self-attention of one layer: fused q/k/v, head norms, rotary, core, projection.

One column-parallel GEMM makes this rank's query heads and KV heads; with fewer KV heads
than tp ranks, neighbouring ranks compute the same KV head and their gradients of it are
partial sums (the spec says so, the data axis reduces them once per step).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.parts import LayerParts
from megatron_lite.ops.rotary import apply_rotary_pair


@dataclass
class KeyValueCache:
    """Keys and values of the positions seen so far, per layer (sampling only)."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] of new positions and return all of them."""
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k))
            v = torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        return k, v


def self_attention(
    layer: LayerParts,
    x: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    mb: MicrobatchContext,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """Attention of one layer without the projection's bias.

    Args:
        layer: parameters and what uses them.
        x: [s_local, b, h], normed.
        rotary: tables of `mb.full_positions`, or None.
        mb: the microbatch.
        cache: earlier keys and values; extended in place.

    Returns:
        [s_local, b, h], to which the caller adds the bias.

    Comm: that of one column- and one row-parallel linear.
    """
    shape, tp = layer.stage.shape, layer.stage.tp_group.size
    d = shape.kv_channels
    n, g = shape.num_attention_heads // tp, max(shape.num_query_groups // tp, 1)
    qkv = layer.column_linear("self_attention.linear_qkv", x, mb)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in qkv.split((n * d, g * d, g * d), dim=-1))
    if shape.qk_norm:
        q = layer.norm("self_attention.q_layernorm", q, mb)
        k = layer.norm("self_attention.k_layernorm", k, mb)
    if rotary is not None and shape.rotary is not None:
        q, k = apply_rotary_pair(q, k, rotary, shape.rotary.interleaved, mb.native)
    if cache is not None:
        k, v = cache.extend(layer.index, k, v)
    return layer.row_linear("self_attention.linear_proj", layer.attend(q, k, v, mb), mb)
