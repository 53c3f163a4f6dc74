"""From computations to a complete table: the passes that every schedule goes through.

A generator only says in which order each rank computes. The transfers are put in along one
global order of all computations: a message is sent and received at one and the same place
of that order. Each rank's list is then a projection of it, so the table cannot deadlock,
even if every send waited for its receive, and messages of a channel keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megatron_lite.pipeline.actions import COMPUTE, Action, Kind, Schedule
from megatron_lite.pipeline.costs import Costs, equal_costs
from megatron_lite.pipeline.simulate import play

Rows: TypeAlias = list[list[Action]]


@dataclass(frozen=True)
class Order:
    """What a generator makes: the computations of every rank, in order.

    Attributes:
        bounds: per rank the most activations alive, in (stage, microbatch) pairs.
    """

    placement: tuple[int, ...]
    rows: Rows
    bounds: tuple[int, ...] = ()


def drop_padding(rows: Rows, num_microbatches: int) -> Rows:
    """Leave out the microbatches that do not exist.

    Generators whose rule needs a certain number of microbatches make the table of the next
    legal number; a table stays valid when whole microbatches are taken out of it.
    """
    return [
        [action for action in row if (action.microbatch or 0) < num_microbatches] for row in rows
    ]


def insert_transfers(rows: Rows, placement: Sequence[int], costs: Costs | None = None) -> Rows:
    """Add sends, receives and local hops to the computations.

    An output leaves at once: its SEND or LOCAL directly follows the computation, and the
    RECV stands in the other rank's list after what that rank starts before it.

    Args:
        costs: whose clock orders the computations of different ranks; equal costs if None.

    Raises:
        ValueError: the computations wait for each other in a circle.
    """
    last = len(placement) - 1
    timeline = play(rows, placement, costs or equal_costs(len(placement)))
    if timeline.stuck:
        stuck = ", ".join(f"rank {rank} at {action}" for rank, action in timeline.stuck.items())
        raise ValueError(f"the computations wait for each other: {stuck}")
    result: Rows = [[] for _ in rows]
    for slot in timeline.slots:
        action, rank = slot.action, slot.rank
        row = result[rank]
        row.append(action)
        stage = action.stage
        if stage is None or action.kind not in _PRODUCERS:
            continue
        forward = action.kind is Kind.F
        following = stage + 1 if forward else stage - 1
        if not 0 <= following <= last:
            continue
        other = placement[following]
        if other == rank:
            kind = Kind.LOCAL_F if forward else Kind.LOCAL_B
            row.append(Action(kind, stage, action.microbatch))
        else:
            send, receive = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
            row.append(Action(send, stage, action.microbatch))
            result[other].append(Action(receive, following, action.microbatch))
    return result


_PRODUCERS = frozenset((Kind.F, Kind.I, Kind.B))


def insert_closing(rows: Rows, placement: Sequence[int]) -> Rows:
    """Add REDUCE after each stage's last weight gradient, then NORM and the STEPs.

    Tied ends need nothing here: on one rank they are one gradient, whose bucket is complete
    with the last use-site's contribution; on two, the copies are added while NORM waits for
    the reductions, when nobody needs this rank's input gradients any more.
    """
    result: Rows = []
    for rank, row in enumerate(rows):
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        last = {
            action.stage: index
            for index, action in enumerate(row)
            if action.kind is Kind.W or action.kind is Kind.B
        }
        ends = {index: stage for stage, index in last.items()}
        closed: list[Action] = []
        for index, action in enumerate(row):
            closed.append(action)
            if index in ends:
                closed.append(Action(Kind.REDUCE, ends[index]))
        closed.append(Action(Kind.NORM))
        closed += [Action(Kind.STEP, stage) for stage in stages]
        result.append(closed)
    return result


def insert_unshards(rows: Rows) -> Rows:
    """Gather each stage's parameters before its first computation, drop them after its last."""
    result: Rows = []
    for row in rows:
        first: dict[int | None, int] = {}
        last: dict[int | None, int] = {}
        for index, action in enumerate(row):
            if action.kind in COMPUTE:
                first.setdefault(action.stage, index)
                last[action.stage] = index
        gathered: list[Action] = []
        for index, action in enumerate(row):
            if first.get(action.stage) == index and action.kind in COMPUTE:
                gathered.append(Action(Kind.UNSHARD, action.stage))
            gathered.append(action)
            if last.get(action.stage) == index and action.kind in COMPUTE:
                gathered.append(Action(Kind.RESHARD, action.stage))
        result.append(gathered)
    return result


def assemble(
    name: str,
    order: Order,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    unshard: bool = False,
) -> Schedule:
    """Make the complete table of an order of computations.

    Args:
        costs: expected; they only decide where receives are posted.
        unshard: parameters are sharded and gathered around the step.

    Raises:
        ValueError: no rank order of the computations exists, or there is nothing to do.
    """
    if num_microbatches < 1:
        raise ValueError("a step needs at least one microbatch")
    rows = insert_transfers(order.rows, order.placement, costs)
    if unshard:
        rows = insert_unshards(rows)
    rows = insert_closing(rows, order.placement)
    return Schedule(
        name,
        num_microbatches,
        order.placement,
        tuple(tuple(row) for row in rows),
        order.bounds,
    )
