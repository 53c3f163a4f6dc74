"""One Transformer layer: x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

The MLP may be a mixture of experts.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.attention import KeyValueCache, self_attention
from megatron_lite.model.latent_attention import latent_attention
from megatron_lite.model.mlp import mlp
from megatron_lite.model.parts import LayerParts


def transformer_layer(
    layer: LayerParts,
    x: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    mb: MicrobatchContext,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """Run one layer; [s_local, b, h] -> [s_local, b, h].

    Args:
        layer: parameters and what uses them.
        x: hidden states.
        rotary: tables of the full sequence's positions, or None.
        mb: the microbatch.
        cache: earlier keys and values (sampling).
    """
    attention = self_attention if layer.stage.shape.latent is None else latent_attention
    mixed = attention(layer, layer.norm("input_layernorm", x, mb), rotary, mb, cache)
    x = layer.add("self_attention.linear_proj", mixed, x, "attention_output_dropout", mb)
    normed = layer.norm("pre_mlp_layernorm", x, mb)
    inner = mlp(layer, normed, mb) if layer.experts is None else layer.mix_experts(normed, mb)
    return layer.add("mlp.linear_fc2", inner, x, "mlp_output_dropout", mb)
