"""The smallest schedule: one stage on one rank.

F and B of each microbatch follow one another, so one microbatch of activations is alive
at a time and gradients accumulate in microbatch order, which is the order that every other
schedule must reproduce bitwise.
"""

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.passes import Order
from megatron_lite.pipeline.schedules.one_f_one_b import one_f_one_b
from megatron_lite.pipeline.schedules.options import Options


def single(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order the computations of a model that is not cut in depth.

    With pairs it is 1F1B of one rank: F0, F1&B0, F2&B1, ...; two microbatches are alive.

    Raises:
        ValueError: more than one stage, or no microbatch.
    """
    if num_ranks != 1 or chunks != 1:
        raise ValueError(f"one stage on one rank, not {chunks} on each of {num_ranks}")
    if num_microbatches < 1:
        raise ValueError("a step needs at least one microbatch")
    if options.paired:
        return one_f_one_b(1, 1, num_microbatches, options)
    work = [
        Action(kind, 0, microbatch)
        for microbatch in range(num_microbatches)
        for kind in (Kind.F, Kind.B)
    ]
    return Order((0,), [work], (1,))
