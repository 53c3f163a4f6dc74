"""1F1B and its zero-bubble forms ZB-H1 and ZB-H2: one stage per rank.

After a warm-up of forwards each rank alternates one forward and one backward. 1F1B
(Narayanan et al., PipeDream-Flush) has the bubble (p-1)(F+I+W) at p activations; splitting
the backward and filling gaps with W (Qi et al., Zero Bubble) leaves (p-1)(F+I-W) at the
same memory (H1), or (p-1)(F+I-2W) with a longer warm-up at 2p-1 activations (H2).
"""

from dataclasses import replace

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.passes import Order
from megatron_lite.pipeline.placement import looping
from megatron_lite.pipeline.schedules.interleaved import interleaved
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes


def one_f_one_b(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order the computations of 1F1B: p-1-r warm-up forwards on rank r; any m.

    With pairs it is interleaved 1F1B of one stage per rank, with 2(p-1-r) + 1 warm-up
    forwards: a pair ends as a whole, so that with p-r of them a forward that leaves in one
    pair comes back as a backward one pair too late, and every second slot is idle.
    """
    check_sizes("1f1b", num_ranks, chunks, num_microbatches, legal_chunks=1)
    if options.paired:
        return interleaved(num_ranks, 1, num_microbatches, replace(options, group_size=None))
    rows = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, num_ranks - 1 - rank)
        row = [Action(Kind.F, rank, mb) for mb in range(warm_up)]
        for mb in range(num_microbatches):
            if mb + warm_up < num_microbatches:
                row.append(Action(Kind.F, rank, mb + warm_up))
            row.append(Action(Kind.B, rank, mb))
        rows.append(row)
    bounds = tuple(min(num_microbatches, num_ranks - rank) for rank in range(num_ranks))
    return Order(looping(num_ranks, 1), rows, bounds)


def zb_h1(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order ZB-H1: 1F1B with I, each W as many I later as the rank has before it; any m."""
    check_sizes("zb-h1", num_ranks, chunks, num_microbatches, legal_chunks=1)
    rows = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, num_ranks - 1 - rank)
        row = [Action(Kind.F, rank, mb) for mb in range(warm_up)]
        for mb in range(num_microbatches):
            if mb + warm_up < num_microbatches:
                row.append(Action(Kind.F, rank, mb + warm_up))
            row.append(Action(Kind.I, rank, mb))
            if mb >= rank:
                row.append(Action(Kind.W, rank, mb - rank))
        rows.append(row + _rest(rank, num_microbatches, lag=rank))
    bound = min(num_microbatches, num_ranks)
    return Order(looping(num_ranks, 1), rows, (bound,) * num_ranks)


def zb_h2(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order ZB-H2: 2(p-r)-1 warm-up forwards, W 2r backwards late; any m, no gap from 2p-1."""
    check_sizes("zb-h2", num_ranks, chunks, num_microbatches, legal_chunks=1)
    rows = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, 2 * (num_ranks - rank) - 1)
        row = [Action(Kind.F, rank, mb) for mb in range(warm_up)]
        for mb in range(num_microbatches):
            row.append(Action(Kind.I, rank, mb))
            if mb >= 2 * rank:
                row.append(Action(Kind.W, rank, mb - 2 * rank))
            if mb + warm_up < num_microbatches:
                row.append(Action(Kind.F, rank, mb + warm_up))
        rows.append(row + _rest(rank, num_microbatches, lag=2 * rank))
    bound = min(num_microbatches, 2 * num_ranks - 1)
    return Order(looping(num_ranks, 1), rows, (bound,) * num_ranks)


def _rest(stage: int, num_microbatches: int, lag: int) -> list[Action]:
    """The weight gradients that are left when all input gradients are done."""
    first = max(0, num_microbatches - lag)
    return [Action(Kind.W, stage, mb) for mb in range(first, num_microbatches)]
