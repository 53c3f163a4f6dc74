"""What a schedule may be told beyond ranks, chunks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.pipeline.costs import Costs, Time


@dataclass(frozen=True)
class Options:
    """Wishes; each schedule reads those that concern it.

    Attributes:
        group_size: microbatches that follow one another on a chunk before the next chunk
            (interleaved schedules); at least the number of ranks, which is the default.
        costs: expected times; equal stages when None.
        memory_limit: most activations per rank in microbatches of a whole rank (u), one
            for all or one per rank, for `auto`.
        unshard: parameters are sharded; gather them around the step.
        paired: a forward and a backward of different microbatches run at the same time
            where the schedule knows such pairs (`schedules.PAIRED`).
    """

    group_size: int | None = None
    costs: Costs | None = None
    memory_limit: Time | Sequence[Time] | None = None
    unshard: bool = False
    paired: bool = False


DEFAULT = Options()
