"""DualPipeV: two chunks in a V, forwards and backwards of different microbatches in pairs.

The eight phases are those of DeepSeek's DualPipeV. Without `Options.paired` a pair runs one
after the other, which makes its bubble that of ZB-H1; it pays where a pair's expert
communication hides behind the other half. It keeps 2p+1 activations of half a rank. Defined
from m = 2p on; fewer microbatches run in the order that they would have among 2p.
"""

from collections import deque
from collections.abc import Iterator

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.passes import Order, drop_padding, pair_up
from megatron_lite.pipeline.placement import v_shape
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes
from megatron_lite.pipeline.schedules.zbv import Count


def dualpipev(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order the computations of DualPipeV; any number of microbatches."""
    check_sizes("dualpipev", num_ranks, chunks, num_microbatches, legal_chunks=2)
    padded = max(num_microbatches, 2 * num_ranks)
    rows = [list(_row(num_ranks, rank, padded, options.paired)) for rank in range(num_ranks)]
    bound = min(2 * num_microbatches, 2 * num_ranks + 1)
    rows = drop_padding(rows, num_microbatches)
    return Order(v_shape(num_ranks), rows, (bound,) * num_ranks)


def _row(num_ranks: int, rank: int, num_microbatches: int, paired: bool) -> Iterator[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    forward = {stage: Count(Kind.F, stage) for stage in (down, up)}
    backward = {stage: Count(Kind.I, stage) for stage in (down, up)}
    deferred: deque[Action] = deque()
    below = num_ranks - 1 - rank  # ranks between this one and the turn

    def full(stage: int) -> Action:
        action = backward[stage].next()
        return Action(Kind.B, stage, action.microbatch)

    def split(stage: int) -> Action:
        action = backward[stage].next()
        deferred.append(Action(Kind.W, stage, action.microbatch))
        return action

    def both(one: int, other: int) -> Iterator[Action]:
        halves = forward[one].next(), full(other)
        yield from pair_up(*halves) if paired else halves

    for _ in range(2 * below):
        yield forward[down].next()
    for _ in range(rank + 1):
        yield from (forward[down].next(), forward[up].next())
    for _ in range(below):
        yield from (split(up), deferred.popleft(), forward[up].next())
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        yield from both(down, up)
        yield from both(up, down)
    for _ in range(below):
        yield full(up)
        yield from both(up, down)
    for k in range(2 * (rank + 1)):
        # The second half of these is split; an odd number of ranks above shifts it by one.
        late = k > rank if rank % 2 == 0 else k >= rank + 1
        stage = up if k % 2 == 0 else down
        yield split(stage) if late else full(stage)
    for _ in range(below):
        yield from (deferred.popleft(), split(down))
    yield from deferred
