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

from megatron_lite.pipeline.actions import COMPUTE, Action, Kind, Schedule, pair
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
        [kept for action in row for kept in _without_padding(action, num_microbatches)]
        for row in rows
    ]


def _without_padding(action: Action, num_microbatches: int) -> tuple[Action, ...]:
    kept = tuple(a for a in action.singles if (a.microbatch or 0) < num_microbatches)
    return (action,) if kept == action.singles else kept


def pair_up(forward: Action, backward: Action) -> list[Action]:
    """Make a pair of an F and the B or I after it, if neither can need the other.

    Of different microbatches they never do; of one, the backward needs the forward.
    """
    together = forward.microbatch != backward.microbatch
    return [pair(forward, backward)] if together else [forward, backward]


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
        result[rank].append(action)
        for single in action.singles:
            stage, forward = single.stage, single.kind is Kind.F
            if stage is None or single.kind not in _PRODUCERS:
                continue
            following = stage + 1 if forward else stage - 1
            if not 0 <= following <= last:
                continue
            other = placement[following]
            if other == rank:
                kind = Kind.LOCAL_F if forward else Kind.LOCAL_B
                result[rank].append(Action(kind, stage, single.microbatch))
            else:
                send, receive = _ENDS[forward]
                result[rank].append(Action(send, stage, single.microbatch))
                result[other].append(Action(receive, following, single.microbatch))
    return result


_PRODUCERS = frozenset((Kind.F, Kind.I, Kind.B))
_ENDS = {True: (Kind.SEND_F, Kind.RECV_F), False: (Kind.SEND_B, Kind.RECV_B)}


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
            single.stage: index
            for index, action in enumerate(row)
            for single in action.singles
            if single.kind is Kind.W or single.kind is Kind.B
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
            for stage in _computes(action):
                first.setdefault(stage, index)
                last[stage] = index
        gathered: list[Action] = []
        for index, action in enumerate(row):
            stages = _computes(action)
            gathered += [Action(Kind.UNSHARD, stage) for stage in stages if first[stage] == index]
            gathered.append(action)
            gathered += [Action(Kind.RESHARD, stage) for stage in stages if last[stage] == index]
        result.append(gathered)
    return result


def _computes(action: Action) -> list[int | None]:
    """The stages that an action computes on."""
    return list(dict.fromkeys(a.stage for a in action.singles if a.kind in COMPUTE))


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
