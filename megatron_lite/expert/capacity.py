"""Capacity: how many tokens of a microbatch an expert takes, and which ones.

Decided over the whole microbatch, so it depends neither on the layout nor on where an
expert lives. Policies: "probs" keeps the largest weights (equal ones: the earlier token),
"position" the earlier tokens. What overflows tries the token's next best experts in turn,
where that is wanted, and is dropped else: id -1 and weight 0; the weights of what is left are
not scaled up. Source: Lepikhin et al., "GShard" (2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.errors import UserError
from megatron_lite.expert.gathered import gather_rows
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.microbatch import MicrobatchContext

POLICIES = ("probs", "position")


@dataclass(frozen=True, eq=False)
class Choices:
    """What tokens want, best first.

    Attributes:
        ids: [t, k] int64, the chosen experts, no expert twice in a row.
        weights: [t, k], what each of them counts; "probs" compares them.
        spare: [t, n] int64, where a choice may go that overflows, none of `ids`; -1: nowhere.
        spare_weights: [t, n], what "probs" compares there.
    """

    ids: Tensor
    weights: Tensor
    spare: Tensor
    spare_weights: Tensor


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


def place_choices(choices: Choices, num_experts: int, capacity: int, policy: str) -> Tensor:
    """Give the choices of a microbatch the rooms that there are.

    First the chosen experts take whom they have room for. Then, for one spare expert after
    the other, every token with an unplaced choice asks for a room there, and gives it to the
    best of these choices.

    Args:
        choices: of all T tokens, in global order.
        num_experts: E.
        capacity: rows of an expert; may exceed T.
        policy: "probs" or "position".

    Returns:
        [T, k] int64: the expert of every choice, -1 where it has none.

    Raises:
        UserError: no such policy.
    """
    if policy not in POLICIES:
        raise UserError(
            f"--moe-token-drop-policy {policy!r} is not one of {', '.join(map(repr, POLICIES))}"
        )
    by_weight = policy == "probs"
    ids = choices.ids
    room = torch.full((num_experts,), capacity, dtype=torch.int64, device=ids.device)
    first = choices.weights.flatten() if by_weight else None
    placed = torch.where(admitted(ids.flatten(), first, room).view(ids.shape), ids, -1)
    for wanted, weights in zip(choices.spare.T, choices.spare_weights.T, strict=True):
        room = capacity - _count(placed, num_experts)
        waiting = placed < 0
        asking = torch.where(waiting.any(1), wanted, -1)
        found = admitted(asking, weights if by_weight else None, room)
        slot = waiting.int().argmax(1, keepdim=True)
        here = torch.where(found.unsqueeze(1), asking.unsqueeze(1), placed.gather(1, slot))
        placed = placed.scatter(1, slot, here)
    return placed


def admitted(ids: Tensor, weights: Tensor | None, room: Tensor) -> Tensor:
    """Tell whom experts let in.

    Args:
        ids: [n] int64, the expert that each asks; -1: none.
        weights: [n], the larger ones go first; None, or where equal: in order.
        room: [E] int64.

    Returns:
        [n] bool.
    """
    order = torch.arange(ids.numel(), device=ids.device)
    if weights is not None:
        order = torch.argsort(weights, descending=True, stable=True)
    # Stable: within an expert the order above stays.
    order = order[torch.argsort(ids[order], stable=True)]
    counts = _count(ids, room.numel())
    asked = ids[order].clamp(min=0)
    first = (ids < 0).sum() + counts.cumsum(0) - counts  # those who ask none come first
    place = torch.arange(ids.numel(), device=ids.device) - first[asked]
    inside = torch.empty_like(ids, dtype=torch.bool)
    inside[order] = (ids[order] >= 0) & (place < room[asked])
    return inside


def _count(ids: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs, [E] int64; -1 is none."""
    bins = ids.new_zeros(num_experts + 1)
    return bins.scatter_add_(0, ids.flatten() + 1, torch.ones_like(ids.flatten()))[1:]


def limit_capacity(
    parts: ExpertParts, choices: Choices, length: int, mb: MicrobatchContext
) -> Tensor:
    """Give this rank's choices the rooms that the microbatch leaves them.

    Args:
        choices: of this rank's t tokens.
        length: positions of the token slice.

    Returns:
        [t, k] int64: the expert of every choice, -1 where it has none.

    Comm: one all-gather over tp_cp of 2 (k + n) fp64 elements per token and one per position.
    """
    shape = parts.shape
    columns = (choices.ids, choices.weights, choices.spare, choices.spare_weights)
    rows = torch.cat([part.detach().to(torch.float64) for part in columns], dim=1)
    every, mine = gather_rows(rows, parts, length, mb)
    widths = [part.shape[1] for part in columns]
    ids, weights, spare, spare_weights = every.split(widths, dim=1)
    together = Choices(ids.long(), weights, spare.long(), spare_weights)
    capacity = expert_capacity(shape, every.shape[0])
    return place_choices(together, shape.num_experts, capacity, shape.drop_policy)[mine]
