"""Capacity: how many tokens of a microbatch an expert takes, and which ones.

Decided over the whole microbatch, so it depends neither on the layout nor on where an
expert lives. A dropped choice gets id -1 and weight 0; the weights of what is left are not
scaled up. Policies: "probs" keeps the largest weights (equal ones: the earlier token),
"position" the earlier tokens. Source: Lepikhin et al., "GShard" (2020).
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.errors import UserError
from megatron_lite.expert.gathered import gather_rows
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.microbatch import MicrobatchContext

POLICIES = ("probs", "position")


def expert_capacity(shape: ExpertShape, tokens: int) -> int:
    """Rows that an expert takes of a microbatch: ceil(tokens * k / E * factor).

    The factor counts as the decimal number that it was given as: 1.1 times 10 rows are 11.

    Args:
        shape: with a capacity factor.
        tokens: of the microbatch, all of its tensor and context parts.
    """
    if shape.capacity_factor is None:
        raise ValueError("a dropless mixture has no capacity")
    share = Fraction(tokens * shape.topk, shape.num_experts)
    return math.ceil(share * Fraction(repr(float(shape.capacity_factor))))


def kept_choices(
    ids: Tensor, weights: Tensor, num_experts: int, capacity: int, policy: str
) -> Tensor:
    """Tell which choices of a microbatch find room.

    Args:
        ids: [T, k] int64, tokens in global order, no expert twice in a row.
        weights: [T, k], the scores that "probs" compares.
        num_experts: E.
        capacity: rows of an expert; may exceed T.
        policy: "probs" or "position".

    Returns:
        [T, k] bool.

    Raises:
        UserError: no such policy.
    """
    if policy not in POLICIES:
        raise UserError(
            f"--moe-token-drop-policy {policy!r} is not one of {', '.join(map(repr, POLICIES))}"
        )
    flat = ids.flatten()
    order = torch.arange(flat.numel(), device=flat.device)
    if policy == "probs":
        order = torch.argsort(weights.flatten(), descending=True, stable=True)
    # Stable: within an expert the order above stays.
    order = order[torch.argsort(flat[order], stable=True)]
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    first = counts.cumsum(0) - counts
    rank = torch.arange(flat.numel(), device=flat.device) - first[flat[order]]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = rank < capacity
    return kept.view(ids.shape)


def limit_capacity(
    parts: ExpertParts, ids: Tensor, probs: Tensor, length: int, mb: MicrobatchContext
) -> Tensor:
    """Tell which choices of this rank's tokens find room in the microbatch.

    Args:
        ids: [t, k] int64.
        probs: [t, k] combine weights.
        length: positions of the token slice.

    Returns:
        [t, k] bool.

    Comm: one all-gather over tp_cp of 2 k fp64 elements per token and one per position.
    """
    shape = parts.shape
    rows = torch.cat([ids.to(torch.float64), probs.detach().to(torch.float64)], dim=1)
    every, mine = gather_rows(rows, parts, length, mb)
    capacity = expert_capacity(shape, every.shape[0])
    every_id, every_weight = every[:, : shape.topk].long(), every[:, shape.topk :]
    kept = kept_choices(every_id, every_weight, shape.num_experts, capacity, shape.drop_policy)
    return kept[mine]
