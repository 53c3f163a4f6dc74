"""Multi-latent attention: keys and values of all heads from one small latent per token.

Down projections make the latents, on every tensor rank alike (under sequence parallelism each
for its tokens); column-parallel up projections make this rank's heads from them. A part of
every head carries the position: of queries its own, of keys one that all heads share. Source:
DeepSeek-AI, DeepSeek-V2 (2024); the rotary part pairs neighbouring channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.attention import KeyValueCache
from megatron_lite.model.parts import LayerParts
from megatron_lite.ops.rotary import apply_rotary_pair


def latent_attention(
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
        rotary: tables of `mb.full_positions`.
        mb: the microbatch.
        cache: earlier keys and values, of whole heads; extended in place.

    Returns:
        [s_local, b, h], to which the caller adds the bias.

    Comm: that of two column-parallel linears (of the latents' widths) and a row-parallel one,
        and for the shared key that of `enter_region`.
    """
    latent = layer.stage.shape.latent
    assert latent is not None and rotary is not None
    q = _queries(layer, x, mb)
    k, k_rotary, v = _keys_and_values(layer, x, mb)
    q, q_rotary = q.split((latent.qk_head_dim, latent.qk_pos_emb_head_dim), dim=-1)
    q_rotary, k_rotary = apply_rotary_pair(q_rotary, k_rotary, rotary, True, mb.native)
    q = torch.cat((q, q_rotary), dim=-1)
    k = torch.cat((k, k_rotary.expand(-1, -1, k.shape[2], -1)), dim=-1)
    if cache is not None:
        k, v = cache.extend(layer.index, k, v)
    return layer.row_linear("self_attention.linear_proj", layer.attend(q, k, v, mb), mb)


def _queries(layer: LayerParts, x: Tensor, mb: MicrobatchContext) -> Tensor:
    """[s, b, n, d] of this rank's heads, the rotary part last."""
    shape, latent = layer.stage.shape, layer.stage.shape.latent
    assert latent is not None
    if latent.q_lora_rank == 0:
        q = layer.column_linear("self_attention.linear_q_proj", x, mb)
    else:
        low = layer.replicated_linear("self_attention.linear_q_down_proj", x, mb)
        if shape.qk_norm:
            low = layer.norm("self_attention.q_layernorm", low, mb)
        q = layer.column_linear("self_attention.linear_q_up_proj", low, mb)
    return q.unflatten(-1, (-1, shape.kv_channels))


def _keys_and_values(
    layer: LayerParts, x: Tensor, mb: MicrobatchContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys without and [s, b, 1, d_rotary] with positions, values; of this rank's heads."""
    shape, latent = layer.stage.shape, layer.stage.shape.latent
    assert latent is not None
    low = layer.replicated_linear("self_attention.linear_kv_down_proj", x, mb)
    low, shared = low.split((latent.kv_lora_rank, latent.qk_pos_emb_head_dim), dim=-1)
    if shape.qk_norm:
        low = layer.norm("self_attention.kv_layernorm", low, mb)
    kv = layer.column_linear("self_attention.linear_kv_up_proj", low, mb)
    kv = kv.unflatten(-1, (-1, latent.qk_head_dim + latent.v_head_dim))
    k, v = kv.split((latent.qk_head_dim, latent.v_head_dim), dim=-1)
    return k, layer.enter(shared).unsqueeze(2), v
