"""How close the choices of routers are: what rounding could turn over.

A token whose k-th and next scores lie closer than two layouts may differ goes to another
expert in one of them, and nothing after it is equal any more. A run that is to be compared
must have no such token, nor one that only rounding keeps out of a full expert. Gaps are in
units of the range of the scores that were compared, whatever kind of score they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_lite.expert import capacity, router


@torch.no_grad()
def smallest_gap(scores: Tensor, k: int) -> float:
    """The smallest difference of the k-th and the next largest score of a row.

    Args:
        scores: [..., n]; infinite where there is nothing to choose.
        k: chosen of each row.

    Returns:
        In units of the row's range; 0 for a row of equal scores, infinite without a choice.
    """
    if not 0 < k < scores.shape[-1] or not scores.numel():
        return math.inf
    ordered = scores.double().sort(dim=-1, descending=True).values
    lowest = torch.where(ordered.isfinite(), ordered, torch.inf).amin(-1)
    extent = (ordered[..., 0] - lowest).clamp(min=torch.finfo(torch.float64).tiny)
    gaps = (ordered[..., k - 1] - ordered[..., k]) / extent  # infinite behind the last finite one
    return float(gaps.min())


def smallest_overflow(ids: Tensor, weights: Tensor, room: int) -> float:
    """The smallest gap between who is kept and who is dropped, over the experts.

    Args:
        ids: [T, k], chosen experts.
        weights: [T, k], by which a full expert keeps.
        room: of each expert.
    """
    chosen, flat = ids.flatten(), weights.flatten()
    rows = [flat[chosen == expert] for expert in chosen.unique().tolist()]
    return min((smallest_gap(row, room) for row in rows), default=math.inf)


@contextmanager
def watched_choices() -> Iterator[list[float]]:
    """Collect the smallest gap of every choice that routers make inside the block."""
    found: list[float] = []
    largest, kept_choices = router.largest, capacity.kept_choices

    def choose(scores: Tensor, k: int) -> Tensor:
        found.append(smallest_gap(scores, k))
        return largest(scores, k)

    def keep(
        ids: Tensor, weights: Tensor, num_experts: int, room: int, policy: str, *more: Any
    ) -> Any:
        if policy == "probs":
            found.append(smallest_overflow(ids, weights, room))
        return kept_choices(ids, weights, num_experts, room, policy, *more)

    router.largest, capacity.kept_choices = choose, keep  # type: ignore[assignment]
    try:
        yield found
    finally:
        router.largest, capacity.kept_choices = largest, kept_choices
