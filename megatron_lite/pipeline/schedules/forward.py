"""The evaluation table: every microbatch once forward, on the placement of a schedule.

Each rank does what arrives first, the later stage first when two are ready, so that
microbatches leave the pipeline as early as possible and few outputs wait.
"""

from collections.abc import Sequence

from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.passes import Rows, insert_transfers


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Return the table of a forward pass.

    Args:
        placement: stage -> rank, that of the training schedule.
    """
    num_ranks, num_stages = max(placement) + 1, len(placement)
    rows: Rows = [[] for _ in range(num_ranks)]
    free = [0] * num_ranks
    count = [0] * num_stages  # microbatches forwarded by each stage
    ends: dict[tuple[int, int], int] = {}
    for _ in range(num_stages * num_microbatches):
        start, _, stage = min(
            (max(free[placement[s]], ends.get((s - 1, count[s]), 0)), -s, s)
            for s in range(num_stages)
            if count[s] < num_microbatches and (s == 0 or (s - 1, count[s]) in ends)
        )
        rank = placement[stage]
        rows[rank].append(Action(Kind.F, stage, count[stage]))
        free[rank] = ends[stage, count[stage]] = start + 1
        count[stage] += 1
    complete = insert_transfers(rows, placement)
    return Schedule(
        "forward",
        num_microbatches,
        tuple(placement),
        tuple(map(tuple, complete)),
        forward_only=True,
    )
