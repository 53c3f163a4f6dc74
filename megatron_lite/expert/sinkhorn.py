"""Sinkhorn's balanced assignment of a microbatch's tokens to experts.

Rows and columns of exp(logits) are scaled in turn until every token weighs the same and
every expert gets the same; the choice follows the scaled matrix. Without gradient: the
weights of the chosen are the caller's. Sources: Sinkhorn and Knopp 1967; Clark et al.,
"Unified scaling laws for routed language models" (2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4
FLOOR = 1e-8
MOST_ROUNDS = 100


def sinkhorn(logits: Tensor) -> Tensor:
    """Scale exp(logits) to equal row and column sums.

    Args:
        logits: [T, E] of a whole microbatch, tokens in global order.

    Returns:
        [T, E], same dtype; rows sum to about 1 / T, columns to 1 / E.
    """
    # A row's scale drops out in the first round, so its largest entry may be 1.
    weight = (logits - logits.amax(1, keepdim=True)).exp()
    tokens, experts = weight.shape
    column = weight.new_ones(experts)
    row = weight.new_ones(tokens)
    for _ in range(MOST_ROUNDS):
        before = column
        row = 1.0 / tokens / (weight @ column + FLOOR)
        column = 1.0 / experts / (row @ weight + FLOOR)
        # One number to the host per round: the same on all ranks, which hold the same rows.
        if not bool((column - before).abs().mean() > TOLERANCE):
            break
    return torch.outer(row, column) * weight
