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
    return float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).min())


def smallest_overflow(ids: Tensor, weights: Tensor, room: Tensor) -> float:
    """The smallest gap between who is let in and who is not, over the experts.

    Args:
        ids: [n], the expert that each asks; -1: none.
        weights: [n], by which a full expert chooses.
        room: [E].
    """
    asked = [expert for expert in ids.unique().tolist() if expert >= 0]
    gaps = (smallest_gap(weights[ids == expert], int(room[expert])) for expert in asked)
    return min(gaps, default=math.inf)


@contextmanager
def watched_choices() -> Iterator[list[float]]:
    """Collect the smallest gap of every choice that routers make inside the block."""
    found: list[float] = []
    largest, admitted = router.largest, capacity.admitted

    def choose(scores: Tensor, k: int, further: int = 0) -> Tensor:
        # Behind the chosen the order counts, too: that of the next best experts.
        found.extend(smallest_gap(scores, rank) for rank in range(k, k + further + 1))
        return largest(scores, k, further)

    def admit(ids: Tensor, weights: Tensor | None, room: Tensor) -> Tensor:
        if weights is not None:
            found.append(smallest_overflow(ids, weights, room))
        return admitted(ids, weights, room)

    router.largest, capacity.admitted = choose, admit
    try:
        yield found
    finally:
        router.largest, capacity.admitted = largest, admitted
