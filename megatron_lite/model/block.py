"""One Transformer layer: x + drop(attention(norm(x))), then x + drop(mlp(norm(x)))."""

from __future__ import annotations

from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.attention import KeyValueCache, self_attention
from megatron_lite.model.mlp import mlp
from megatron_lite.model.parts import StageParts
from megatron_lite.ops.dropout import bias_dropout_residual


def transformer_layer(
    parts: StageParts,
    layer: int,
    x: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    mb: MicrobatchContext,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """Run one layer; [s_local, b, h] -> [s_local, b, h].

    Args:
        parts: shape, groups, parameters.
        layer: global layer index.
        x: hidden states.
        rotary: tables of the full sequence's positions, or None.
        mb: the microbatch.
        cache: earlier keys and values (sampling).
    """
    prefix, dropout = f"decoder.layers.{layer}", parts.shape.hidden_dropout
    normed = parts.norm(f"{prefix}.input_layernorm", x, mb)
    x = bias_dropout_residual(
        self_attention(parts, layer, normed, rotary, mb, cache),
        parts.params.get(f"{prefix}.self_attention.linear_proj.bias"),
        x,
        dropout,
        "attention_output_dropout",
        layer,
        mb,
    )
    normed = parts.norm(f"{prefix}.pre_mlp_layernorm", x, mb)
    return bias_dropout_residual(
        mlp(parts, layer, normed, mb),
        parts.params.get(f"{prefix}.mlp.linear_fc2.bias"),
        x,
        dropout,
        "mlp_output_dropout",
        layer,
        mb,
    )
