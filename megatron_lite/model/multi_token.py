"""Multi-token prediction: after the model's own loss, more layers predict tokens further on.

Depth d (from 0) joins the hidden state of position i, normed, with the embedding of token
i + d + 1, normed, sends it through a Transformer layer of its own and predicts token i + d + 2
by the model's output layer. Its hidden states are the next depth's. A target counts where all
targets up to it count, so none lies across the end of a document whose end is masked, nor past
the sequence. Each depth has a denominator of its own. Source: DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.model.parts import LayerParts
from megatron_lite.tensor.linear import replicated_linear


def term_name(depth: int) -> str:
    """Name of a depth's loss, from 1: "mtp_1"."""
    return f"mtp_{depth + 1}"


def shift(tokens: Tensor, by: int) -> Tensor:
    """[s, b] of what comes `by` positions later; 0 past the end."""
    by = min(by, tokens.shape[0])
    return torch.cat((tokens[by:], tokens.new_zeros(by, *tokens.shape[1:])))


def further_weights(weights: Tensor, depth: int) -> Tensor:
    """Weights of a depth's targets: [s, b], the product of those from each target up to its own."""
    found = weights
    for by in range(1, depth + 2):
        found = found * shift(weights, by)
    return found


def join_and_run(
    layer: LayerParts,
    prefix: str,
    pair: Tensor,
    run: Callable[[Tensor], Tensor],
    mb: MicrobatchContext,
) -> Tensor:
    """Hidden states of a depth.

    Args:
        layer: its Transformer layer.
        prefix: of the depth's parameters.
        pair: [2, s_local, b, h]: embeddings, and hidden states of the depth before.
        run: the Transformer layer.
        mb: the microbatch.

    Returns:
        [s_local, b, h], normed.
    """
    stage = layer.stage
    embedded = stage.norm(f"{prefix}.enorm", pair[0], mb)
    hidden = stage.norm(f"{prefix}.hnorm", pair[1], mb)
    joined = torch.cat((embedded, hidden), dim=-1)
    x = replicated_linear(joined, stage.params[f"{prefix}.eh_proj.weight"], None, mb)
    return stage.norm(f"{prefix}.final_layernorm", run(x), mb)
