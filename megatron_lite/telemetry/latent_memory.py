"""What multi-latent attention keeps for its backward pass, in closed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.telemetry.memory import ActivationShape


def latent_channels(shape: ActivationShape) -> int:
    """Channels of a token inside the tensor region: q and k put together, the output of the up
    projection that v is a part of, the context."""
    model, latent = shape.model, shape.model.latent
    assert latent is not None
    heads = model.num_attention_heads // shape.parallel.tp
    return heads * (2 * model.kv_channels + latent.qk_head_dim + 2 * latent.v_head_dim)


def latents_bytes(shape: ActivationShape) -> int:
    """The latents of one layer, before and behind their norms, of this rank's slice of tokens."""
    model, latent = shape.model, shape.model.latent
    assert latent is not None
    shared = latent.qk_pos_emb_head_dim  # a view of the whole is kept
    channels = latent.q_lora_rank + latent.kv_lora_rank + shared
    statistics = 0
    if model.qk_norm:
        channels += latent.q_lora_rank + latent.kv_lora_rank
        statistics = shape.statistics * (2 if latent.q_lora_rank else 1)
    return shape.stream_tokens * (channels * shape.narrow + statistics * shape.wide)


def deferred_latent_bytes(shape: ActivationShape) -> int:
    """Inputs and output gradients of the projections, between I and W."""
    model, latent = shape.model, shape.model.latent
    assert latent is not None
    heads, hidden = model.num_attention_heads // shape.parallel.tp, model.hidden_size
    keys_and_values = latent.qk_head_dim + latent.v_head_dim
    inside = heads * (model.kv_channels + keys_and_values + latent.v_head_dim) + hidden
    outside = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_pos_emb_head_dim + hidden
    inside += latent.kv_lora_rank + (latent.q_lora_rank or hidden)
    if not latent.q_lora_rank and not shape.parallel.sequence_parallel:
        outside -= hidden  # one tensor is the input of both
    return (inside * shape.tokens + outside * shape.stream_tokens) * shape.narrow
