"""The closing reduction of a step: everything on which ranks must agree, once.

One all-reduce over the world carries the gradient norm, non-finite counts, sums for the
log, proof that all ranks are at the same step, and the vote to stop. What follows is a
pure function of the reduced vector, so all ranks take the same branch without another word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.mesh.groups import Group
from megatron_lite.optim.norm import global_norm

# Small enough that sums of squares over 16,384 ranks stay exact in fp64.
STEP_MODULUS = 4096


@dataclass(frozen=True)
class Closing:
    """The reduced vector, read once.

    Attributes:
        grad_norm: of the logical gradient, before clipping.
        non_finite: non-finite gradient elements (native), or blocks that hold one, over all ranks.
        sums: what was summed over ranks for the log: undivided losses, counts.
        vote: summed wish to stop (resilience/signals.py).
        step_agrees: all ranks reduced the same step.
    """

    grad_norm: float
    non_finite: int
    sums: Mapping[str, float]
    vote: float
    step_agrees: bool


def reduce_closing(
    *,
    squares: tuple[Tensor, Tensor],
    sums: Mapping[str, Tensor],
    step: int,
    vote: float,
    world_group: Group,
) -> Closing:
    """Run the closing reduction.

    Args:
        squares: 0-dim fp64 sum of squares of this rank's share of the logical gradient,
            and its count of non-finite elements or blocks.
        sums: name -> 0-dim value to sum over ranks; 0 where a rank would repeat another's.
        step: zero-based; must be equal on all ranks.
        vote: of this rank, such as a signal that arrived.

    Comm: one all-reduce of 5 + len(sums) fp64 elements over the world. Reading the result
        is the step's only wait for the device.
    """
    values = [value.detach().to(torch.float64) for value in sums.values()]
    marker = step % STEP_MODULUS
    numbers = [float(marker), float(marker * marker), vote]
    tail = torch.tensor(numbers, dtype=torch.float64, device=squares[0].device)
    vector = torch.cat([torch.stack([*squares, *values]), tail])
    all_reduce(vector, world_group)
    norm2, non_finite, *rest = vector.tolist()
    total, total_of_squares, voted = rest[len(sums) :]
    return Closing(
        grad_norm=global_norm(norm2),
        non_finite=round(non_finite),
        sums=dict(zip(sums, rest, strict=False)),
        vote=voted,
        # Equality in Cauchy-Schwarz: the steps are all the same number.
        step_agrees=world_group.size * total_of_squares == total * total,
    )
