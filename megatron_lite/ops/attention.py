"""Causal self-attention core: softmax(q k^T * scale) v per head, grouped KV heads.

Without dropout torch's fused kernel runs (never keeps the [s, s] probabilities; FLOPs
4*s*s*d per head, half of it needed under the causal mask). With dropout the probabilities
are formed in fp32 (fp64 under --fp64) and the mask is drawn by logical position,
(head * s + query) * s + key, so that it does not depend on which rank holds the head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.random import decision_counter, flat_words, keep_mask


def attention_mask(
    heads: Tensor, s: int, probability: float, layer: int, mb: MicrobatchContext
) -> Tensor:
    """[b, n, s, s] bool: kept attention probabilities of the heads with these logical numbers."""
    rows = heads[:, None] * s + mb.full_positions[None, :]  # (head * s + query)
    rows = rows.unsqueeze(0).expand(mb.sample_ids.numel(), -1, -1)
    c2 = (mb.sample_ids & 0xFFFFFFFF).view(-1, 1, 1).expand_as(rows)
    counter = decision_counter("attention_dropout", layer, mb.step)
    return keep_mask(flat_words(rows, s, 0, s, c2, counter, mb.seed), probability)


def _explicit(
    q_bnsd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, keep: Tensor | None, probability: float
) -> Tensor:
    """Attention with materialised probabilities; queries end where keys end (bottom-right)."""
    b, n, s_q, d = q_bnsd.shape
    g, s_k = k_bgsd.shape[1], k_bgsd.shape[2]
    wide = accumulation_dtype(q_bnsd.dtype)
    grouped = q_bnsd.reshape(b, g, n // g * s_q, d)
    scores = (grouped @ k_bgsd.transpose(-1, -2)).view(b, n, s_q, s_k).to(wide) / math.sqrt(d)
    visible = torch.ones(s_q, s_k, dtype=torch.bool, device=scores.device).tril(s_k - s_q)
    probs = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    if keep is not None:
        probs = probs * keep * (1.0 / (1.0 - probability))
    probs = probs.to(q_bnsd.dtype).view(b, g, n // g * s_q, s_k)
    return (probs @ v_bgsd).view(b, n, s_q, d)


def causal_attention(
    q_sbnd: Tensor,
    k_sbgd: Tensor,
    v_sbgd: Tensor,
    heads: Tensor,
    probability: float,
    layer: int,
    mb: MicrobatchContext,
    fused: bool = True,
) -> Tensor:
    """Attend causally.

    Args:
        q_sbnd: [s_q, b, n, d], this rank's query heads.
        k_sbgd: [s_k, b, g, d], its KV heads; n divides by g, head i reads KV head i // (n/g).
            With s_k > s_q (cached keys) the queries are the last positions.
        v_sbgd: like k.
        heads: [n] int64 logical numbers of the query heads (dropout).
        probability: of dropping a probability; off outside training.
        layer: global layer index (dropout).
        mb: positions, sample ids, step.
        fused: use torch's fused kernel where no dropout asks for probabilities.

    Returns:
        [s_q, b, n * d], same dtype.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbnd, k_sbgd, v_sbgd))
    dropping = probability > 0.0 and mb.training
    if fused and not dropping and q.shape[2] == k.shape[2]:
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        keep = attention_mask(heads, q.shape[2], probability, layer, mb) if dropping else None
        out = _explicit(q, k, v, keep, probability)
    return out.permute(2, 0, 1, 3).flatten(2)
