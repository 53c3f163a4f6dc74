"""ZB-V: two chunks in a V, no bubble at equal costs with the memory of 1F1B.

Rank r holds stages r and 2p-1-r. The order is the hand-made one for F = I = W (Qi et al.,
Pipeline Parallelism with Controllable Memory, 2024), which is full from m = 2p-1 on; fewer
microbatches run in the order that they would have among 2p-1.
"""

from collections.abc import Iterator

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.passes import Order, drop_padding
from megatron_lite.pipeline.placement import v_shape
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes


def zbv(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order the computations of ZB-V; any number of microbatches."""
    check_sizes("zbv", num_ranks, chunks, num_microbatches, legal_chunks=2)
    padded = max(num_microbatches, 2 * num_ranks - 1)
    rows = [list(_row(num_ranks, rank, padded)) for rank in range(num_ranks)]
    bound = min(2 * num_microbatches, 2 * num_ranks)
    rows = drop_padding(rows, num_microbatches)
    return Order(v_shape(num_ranks), rows, (bound,) * num_ranks)


def _row(num_ranks: int, rank: int, num_microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    f_down, f_up = Count(Kind.F, down), Count(Kind.F, up)
    i_down, i_up = Count(Kind.I, down), Count(Kind.I, up)
    w_down, w_up = Count(Kind.W, down), Count(Kind.W, up)
    for _ in range(2 * (num_ranks - rank) - 1):
        yield f_down.next()
    for _ in range(rank):
        yield f_up.next()
        yield f_down.next()
    for _ in range(num_ranks - rank):
        yield from (f_up.next(), i_up.next(), w_up.next())
    while f_up.count < num_microbatches:
        if f_down.count < num_microbatches:
            yield f_down.next()
        yield from (i_down.next(), w_down.next())
        yield from (f_up.next(), i_up.next(), w_up.next())
    while i_up.count < num_microbatches:
        yield from (i_down.next(), i_up.next())
    while i_down.count < num_microbatches:
        yield i_down.next()
        if w_down.count < num_microbatches:
            yield w_down.next()
    for late in (w_up, w_down):
        while late.count < num_microbatches:
            yield late.next()


class Count:
    """The next microbatch of one kind of work on one stage."""

    def __init__(self, kind: Kind, stage: int) -> None:
        self.kind, self.stage, self.count = kind, stage, 0

    def next(self) -> Action:
        """Return the next action."""
        self.count += 1
        return Action(self.kind, self.stage, self.count - 1)
