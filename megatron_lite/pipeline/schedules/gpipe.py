"""GPipe: all forwards, then all backwards.

Bubble (p-1)(F+I+W); every rank keeps all m microbatches alive. Huang et al., GPipe (2019);
the backwards run in microbatch order, not in reverse, so that gradients add up as in one
process.
"""

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.passes import Order
from megatron_lite.pipeline.placement import looping
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes


def gpipe(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order the computations of GPipe; any number of microbatches."""
    check_sizes("gpipe", num_ranks, chunks, num_microbatches, legal_chunks=1)
    rows = [
        [Action(kind, rank, mb) for kind in (Kind.F, Kind.B) for mb in range(num_microbatches)]
        for rank in range(num_ranks)
    ]
    return Order(looping(num_ranks, 1), rows, (num_microbatches,) * num_ranks)
