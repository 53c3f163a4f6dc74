"""V-Half and V-Min: V-shaped schedules at about a half and a third of 1F1B's memory.

Both repeat one building block: F and I of a microbatch in slots that follow from the rank,
the next microbatch six slots later, W in the two slots that remain (Qi et al., Pipeline
Parallelism with Controllable Memory, 2024). The order below follows the block, except that
a rank that would wait does what is ready: W, an I, and with V-Half an F, within the bound
on activations. V-Min is sane for F = I = W only; else it falls behind more with every
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.costs import equal_costs
from megatron_lite.pipeline.passes import Order, Rows
from megatron_lite.pipeline.placement import v_shape
from megatron_lite.pipeline.schedules.fill import Filling, fill_waits
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes

PERIOD = 6  # slots per microbatch: F, I and W of two chunks

# (ranks, rank) -> slots of F down, F up, I up, I down of microbatch 0
Block: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]


def v_half(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order V-Half: at most (p+2) div 2 microbatches alive; any number of microbatches."""
    check_sizes("v-half", num_ranks, chunks, num_microbatches, legal_chunks=2)

    def block(p: int, r: int) -> tuple[int, int, int, int]:
        shift = 3 if p % 2 == 0 else 0
        return 2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2

    bound = min(2 * num_microbatches, 2 * ((num_ranks + 2) // 2))
    return _order(num_ranks, num_microbatches, block, bound, early_forwards=True)


def v_min(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order V-Min: at most (p+4) div 3 microbatches alive; any number of microbatches."""
    check_sizes("v-min", num_ranks, chunks, num_microbatches, legal_chunks=2)

    def block(p: int, r: int) -> tuple[int, int, int, int]:
        shift = 2 if p % 3 == 0 else 0
        return r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1

    bound = min(2 * num_microbatches, 2 * ((num_ranks + 4) // 3))
    return _order(num_ranks, num_microbatches, block, bound, early_forwards=False)


def _order(
    num_ranks: int, num_microbatches: int, block: Block, bound: int, early_forwards: bool
) -> Order:
    placement = v_shape(num_ranks)
    rows: Rows = []
    for rank in range(num_ranks):
        work = (
            (Kind.F, rank),
            (Kind.F, 2 * num_ranks - 1 - rank),
            (Kind.I, 2 * num_ranks - 1 - rank),
            (Kind.I, rank),
        )
        timed = [
            (slot + PERIOD * mb, Action(kind, stage, mb))
            for slot, (kind, stage) in zip(block(num_ranks, rank), work, strict=True)
            for mb in range(num_microbatches)
        ]
        timed.sort(key=lambda item: item[0])
        rows.append([action for _, action in timed])
    bounds = (bound,) * num_ranks
    filling = Filling(early_inputs=True, early_forwards=early_forwards)
    filled = fill_waits(rows, placement, bounds, equal_costs(2 * num_ranks), filling)
    assert filled is not None, "the block keeps its bound"
    return Order(placement, filled, bounds)
