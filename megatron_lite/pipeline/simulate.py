"""When everything happens: the event simulation of a table, and the figures drawn from it.

Each rank executes its list in order; an action starts when the rank is free and what it
needs has arrived. Sends leave when their producer ends, receives cost no time, messages of
one channel follow one another, reductions run beside the computation. A pair starts when
both halves can, and takes what `Costs.time_of` says. With integer or fractional costs all
results are exact. Every figure is defined once, in `Report`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.costs import Costs, Time

_F, _I, _W, _B = Kind.F, Kind.I, Kind.W, Kind.B
_COMPUTE = frozenset((_F, _I, _W, _B, Kind.PAIR))


@dataclass(frozen=True, slots=True)
class Slot:
    """One action in time; for REDUCE and UNSHARD the time of the communication."""

    rank: int
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer in time: leaves when its producer has ended and its channel is free."""

    source: int
    destination: int
    action: Action
    start: Time
    end: Time


@dataclass
class Timeline:
    """A played table.

    Attributes:
        slots: actions by start time, each after everything that it needs.
        messages: transfers between ranks, in the order of their producers.
        stuck: per rank that did not reach its end, the action it waits in.
        closing: when every rank has computed and reduced, so that NORM may start.
    """

    slots: list[Slot] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    stuck: dict[int, Action] = field(default_factory=dict)
    closing: Time = 0


class _Player:
    """The state of an event simulation; `play` is its only user."""

    def __init__(self, rows: Sequence[Sequence[Action]], placement: Sequence[int], costs: Costs):
        self.rows, self.placement, self.costs = rows, placement, costs
        self.last = len(placement) - 1
        self.position = [0] * len(rows)
        self.free: list[Time] = [0] * len(rows)
        self.beside: list[Time] = [0] * len(rows)  # the data-parallel communicator is free
        self.channel: dict[tuple[int, int, bool], Time] = {}
        self.arrived: dict[tuple[bool, int, int], Time] = {}
        self.waiting: dict[tuple[bool, int, int], int] = {}
        self.gathered: dict[int, Time] = {}
        self.heap: list[tuple[Time, int]] = []
        self.timeline = Timeline()

    def offer(self, rank: int) -> None:
        """Queue the rank's next computation, once what it needs has a time of arrival."""
        row, k = self.rows[rank], self.position[rank]
        while k < len(row) and row[k].kind not in _COMPUTE:
            self.start_beside(rank, row[k])
            k += 1
        self.position[rank] = k
        if k == len(row):
            return
        start = self.free[rank]
        for action in row[k].singles:
            stage, microbatch = action.stage, action.microbatch
            assert stage is not None and microbatch is not None
            if action.kind is not _W:
                forward = action.kind is _F
                source = stage - 1 if forward else stage + 1
                if 0 <= source <= self.last:
                    key = (forward, source, microbatch)
                    arrival = self.arrived.get(key)
                    if arrival is None:
                        self.waiting[key] = rank
                        return
                    start = max(start, arrival)
            if stage in self.gathered:
                start = max(start, self.gathered[stage])
        heapq.heappush(self.heap, (start, rank))

    def start_beside(self, rank: int, action: Action) -> None:
        """Start what runs beside the computation."""
        if action.kind in (Kind.REDUCE, Kind.UNSHARD):
            start = max(self.free[rank], self.beside[rank])
            is_reduce = action.kind is Kind.REDUCE
            end = start + (self.costs.reduce if is_reduce else self.costs.unshard)
            self.beside[rank] = end
            if not is_reduce:
                assert action.stage is not None
                self.gathered[action.stage] = end
            self.timeline.slots.append(Slot(rank, action, start, end))

    def execute(self, rank: int, start: Time) -> None:
        """Run the rank's next computation and tell whoever waits for its output."""
        action = self.rows[rank][self.position[rank]]
        end = start + self.costs.time_of(action)
        self.free[rank] = end
        self.position[rank] += 1
        self.timeline.slots.append(Slot(rank, action, start, end))
        for single in action.singles:
            if single.kind is not _W:
                self.hand_over(rank, single, end)
        self.offer(rank)

    def hand_over(self, rank: int, action: Action, end: Time) -> None:
        """Note when the output arrives at the stage that needs it."""
        stage, forward = action.stage, action.kind is _F
        assert stage is not None and action.microbatch is not None
        following = stage + 1 if forward else stage - 1
        if not 0 <= following <= self.last:
            return
        other = self.placement[following]
        arrival = end
        if other != rank:
            start = max(end, self.channel.get((rank, other, forward), 0))
            self.channel[rank, other, forward] = start + self.costs.transfer
            arrival = start + self.costs.transfer + self.costs.latency
            send = Action(Kind.SEND_F if forward else Kind.SEND_B, stage, action.microbatch)
            self.timeline.messages.append(Message(rank, other, send, start, arrival))
        key = (forward, stage, action.microbatch)
        self.arrived[key] = arrival
        waiter = self.waiting.pop(key, None)
        if waiter is not None and waiter != rank:
            self.offer(waiter)


def play(rows: Sequence[Sequence[Action]], placement: Sequence[int], costs: Costs) -> Timeline:
    """Run the lists of all ranks against the clock; a list may hold computations only.

    Ties are broken by rank, so that the result, and whatever order is taken from it, is
    the same everywhere.
    """
    if len(costs.forward) != len(placement):
        raise ValueError(f"costs of {len(costs.forward)} stages for {len(placement)} stages")
    player = _Player(rows, placement, costs)
    for rank in range(len(rows)):
        player.offer(rank)
    while player.heap:
        start, rank = heapq.heappop(player.heap)
        player.execute(rank, start)
    timeline = player.timeline
    timeline.closing = max((*player.free, *player.beside), default=0)
    for rank, row in enumerate(rows):
        if player.position[rank] < len(row):
            timeline.stuck[rank] = row[player.position[rank]]
    return timeline


@dataclass(frozen=True)
class Report:
    """The figures of a table under given costs.

    Attributes:
        makespan: from 0 until every rank has finished its computations and reductions.
        ideal: mean over the ranks of the time their computations take, with the
            exchanges of experts that no pair hides; no table of this placement, these
            costs and these pairs can be faster.
        makespan_bubble: makespan - ideal; what is lost when all ranks wait for the norm
            at the end of the step.
        bubble_fraction: share of all ranks' slots until the makespan in which nothing is
            computed, (makespan - ideal) / makespan.
        bubble_over_ideal: (makespan - ideal) / ideal.
        span_bubble: the largest idle time of a rank between its own first and last
            action; what is lost if no rank waits at the end of the step.
        step_time: makespan, norm and the slowest rank's updates.
        peak_activations: per rank, microbatches of a whole rank (u) alive from F until
            their weight gradient is done.
        peak_deferred: per rank, those of them (u) between I and W, of which only inputs
            and output gradients of the deferred products are kept.
        peak_received: per rank, messages received or posted and not yet consumed.
        num_messages: transfers between ranks per step.
    """

    makespan: Time
    ideal: Time
    makespan_bubble: Time
    bubble_fraction: Time
    bubble_over_ideal: Time
    span_bubble: Time
    step_time: Time
    peak_activations: tuple[Time, ...]
    peak_deferred: tuple[Time, ...]
    peak_received: tuple[int, ...]
    num_messages: int


def simulate(schedule: Schedule, costs: Costs) -> tuple[Timeline, Report]:
    """Play a verified table and draw its figures.

    Raises:
        ValueError: the table cannot run to its end, or the costs are of other stages.
    """
    timeline = play(schedule.ranks, schedule.placement, costs)
    if timeline.stuck:
        rank, action = next(iter(timeline.stuck.items()))
        raise ValueError(f"schedule {schedule.name}: rank {rank} is stuck at {action}")
    ranks = range(len(schedule.ranks))
    busy: list[Time] = [0 for _ in ranks]
    first: list[Time | None] = [None for _ in ranks]
    last: list[Time] = [0 for _ in ranks]
    for slot in timeline.slots:
        if slot.action.kind in _COMPUTE:
            busy[slot.rank] += slot.end - slot.start
            if first[slot.rank] is None:
                first[slot.rank] = slot.start
            last[slot.rank] = slot.end
    total = sum(busy)
    ideal = _divide(total, len(busy))
    makespan = timeline.closing
    bubble = makespan - ideal
    span = max(last[rank] - (first[rank] or 0) - busy[rank] for rank in ranks)
    updates = max(costs.step * len(schedule.stages_of(rank)) for rank in ranks)
    peaks = [peak_live(row) for row in schedule.ranks]
    chunks = [max(1, len(schedule.stages_of(rank))) for rank in ranks]
    return timeline, Report(
        makespan=makespan,
        ideal=ideal,
        makespan_bubble=bubble,
        bubble_fraction=_divide(bubble, makespan) if makespan else 0,
        bubble_over_ideal=_divide(bubble, ideal) if ideal else 0,
        span_bubble=span,
        step_time=makespan + (0 if schedule.forward_only else costs.norm + updates),
        peak_activations=tuple(_divide(peaks[rank][0], chunks[rank]) for rank in ranks),
        peak_deferred=tuple(_divide(peaks[rank][1], chunks[rank]) for rank in ranks),
        peak_received=tuple(peak[2] for peak in peaks),
        num_messages=len(timeline.messages),
    )


def _divide(value: Time, by: Time) -> Time:
    """Divide without leaving the exact numbers."""
    if isinstance(value, float) or isinstance(by, float):
        return value / by
    exact = Fraction(value) / by
    return exact.numerator if exact.denominator == 1 else exact


def live_counts(row: Sequence[Action]) -> list[tuple[int, int, int]]:
    """Count what is alive during each action of a rank's list.

    Returns:
        per action the (stage, microbatch) pairs between F and W, those of them between I
        and W, and the messages between RECV and the computation that consumes them.
    """
    alive = deferred = received = 0
    counts = []
    pending: set[tuple[Kind, int | None, int | None]] = set()
    for whole in row:
        done_alive = done_deferred = done_received = 0
        for action in whole.singles:
            kind = action.kind
            if kind is _F:
                alive += 1
                done_received += _consume(pending, Kind.RECV_F, action)
            elif kind is _W:
                done_alive = done_deferred = 1
            elif kind is _B:
                done_alive = 1
                done_received += _consume(pending, Kind.RECV_B, action)
            elif kind is _I:
                deferred += 1
                done_received += _consume(pending, Kind.RECV_B, action)
            elif kind is Kind.RECV_F or kind is Kind.RECV_B:
                pending.add((kind, action.stage, action.microbatch))
                received += 1
        counts.append((alive, deferred, received))
        alive -= done_alive
        deferred -= done_deferred
        received -= done_received
    return counts


def _consume(
    pending: set[tuple[Kind, int | None, int | None]], kind: Kind, consumer: Action
) -> int:
    key = (kind, consumer.stage, consumer.microbatch)
    if key in pending:
        pending.remove(key)
        return 1
    return 0


def peak_live(row: Sequence[Action]) -> tuple[int, int, int]:
    """Return the largest of each of `live_counts`; 0 for an empty list."""
    counts = live_counts(row)
    if not counts:
        return 0, 0, 0
    alive, deferred, received = zip(*counts, strict=True)
    return max(alive), max(deferred), max(received)
