"""The cost-aware schedule: list scheduling from F, I and W times within a memory limit.

Every fixed schedule of the same ranks and chunks is played against the expected costs, and
so are these schedules with their waits filled anew for these costs, and orders that a
greedy scheduler makes under several policies; the
fastest within the limit wins, the one with less memory among equals. So the result is
never slower than the best fixed schedule, by the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.costs import Costs, Time, equal_costs
from megatron_lite.pipeline.passes import Order
from megatron_lite.pipeline.placement import looping, v_shape
from megatron_lite.pipeline.schedules.fill import Filling, fill_waits
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes
from megatron_lite.pipeline.simulate import peak_live, play


@dataclass(frozen=True)
class Policy:
    """How the greedy scheduler chooses.

    Attributes:
        warm_up: forwards that a rank does before backwards have preference, as a multiple
            of the stages between it and the last one; None: as memory allows.
        patience: a W is not started if something better is known to come within this part
            of its time.
        keep: activations that each earlier chunk leaves free for the later ones.
    """

    warm_up: Fraction | None
    patience: Fraction
    keep: int


POLICIES = tuple(
    Policy(warm_up, patience, keep)
    for warm_up, patience, keep in product(
        (None, Fraction(1), Fraction(3, 2), Fraction(2)), (Fraction(0), Fraction(1)), (1, 2)
    )
)

FILLINGS = tuple(
    Filling(early, early and forwards, patience)
    for early, forwards, patience in (
        (False, False, 0),
        (False, False, 1),
        (True, False, 1),
        (True, True, 0),
        (True, True, 1),
    )
)


def auto(
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    options: Options,
    fixed: Mapping[str, Callable[[int, int, int, Options], Order]],
) -> tuple[str, Order]:
    """Choose the fastest order within the memory limit.

    Args:
        fixed: the schedules to compare with, by name.

    Returns:
        the name of what was chosen, and the order.

    Raises:
        ValueError: no order keeps the limit; the message has the smallest one possible.
    """
    check_sizes("auto", num_ranks, chunks, num_microbatches)
    costs = (options.costs or equal_costs(num_ranks * chunks)).in_whole_numbers()
    limits = _limits(num_ranks, chunks, num_microbatches, options)
    best: tuple[Time, int, str, Order] | None = None
    smallest: int | None = None
    for name, order in _candidates(
        num_ranks, chunks, num_microbatches, options, costs, limits, fixed
    ):
        peaks = [peak_live(row)[0] for row in order.rows]
        smallest = max(peaks) if smallest is None else min(smallest, max(peaks))
        if any(peak > limit for peak, limit in zip(peaks, limits, strict=True)):
            continue
        timeline = play(order.rows, order.placement, costs)
        if timeline.stuck:
            continue
        key = (timeline.closing, max(peaks))
        if best is None or key < best[:2]:
            best = (*key, name, Order(order.placement, order.rows, tuple(peaks)))
    if best is None:
        raise ValueError(
            f"schedule auto: no order keeps a memory limit of "
            f"{', '.join(str(float(Fraction(limit, chunks))) for limit in limits)} microbatches "
            f"per rank; the smallest that is possible is {float(Fraction(smallest or 0, chunks))}"
        )
    return best[2], best[3]


def _limits(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> list[int]:
    """Most activations per rank in (stage, microbatch) pairs."""
    limit = options.memory_limit
    if limit is None:
        return [num_microbatches * chunks] * num_ranks
    per_rank = list(limit) if isinstance(limit, Sequence) else [limit] * num_ranks
    if len(per_rank) != num_ranks:
        raise ValueError(
            f"schedule auto: {len(per_rank)} memory limits for {num_ranks} ranks; give one, or one "
            "per rank"
        )
    if not all(0 < value < float("inf") for value in per_rank):
        raise ValueError("schedule auto: a memory limit is a positive number of microbatches")
    return [min(int(value * chunks), num_microbatches * chunks) for value in per_rank]


def _candidates(
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    options: Options,
    costs: Costs,
    limits: Sequence[int],
    fixed: Mapping[str, Callable[[int, int, int, Options], Order]],
) -> Iterator[tuple[str, Order]]:
    for name, generate in fixed.items():
        try:
            order = generate(num_ranks, chunks, num_microbatches, options)
            yield name, order
        except ValueError:
            continue  # not made for these sizes
        for filling in FILLINGS:
            rows = fill_waits(order.rows, order.placement, limits, costs, filling)
            if rows is not None:
                yield f"{name}, waits filled", Order(order.placement, rows)
    placements = [looping(num_ranks, chunks)]
    if chunks == 2 and num_ranks > 1:
        placements.append(v_shape(num_ranks))
    for placement in placements:
        for policy in POLICIES:
            made = schedule_greedily(placement, num_microbatches, costs, limits, policy)
            if made is not None:
                yield "greedy", made


@dataclass
class _Rank:
    """One rank while its list is being made."""

    stages: tuple[int, ...]
    limit: int
    free: Time = 0
    alive: int = 0
    backwards: int = 0
    deferred: deque[Action] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)


def schedule_greedily(
    placement: tuple[int, ...],
    num_microbatches: int,
    costs: Costs,
    limits: Sequence[int],
    policy: Policy,
) -> Order | None:
    """Let each rank do the best that is ready whenever it is free.

    Returns:
        the order, or None if the memory limit leaves a rank without anything it may do.
    """
    scheduler = _Greedy(placement, num_microbatches, costs, limits, policy)
    return scheduler.run()


class _Greedy:
    """State of the greedy scheduler."""

    def __init__(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        costs: Costs,
        limits: Sequence[int],
        policy: Policy,
    ) -> None:
        self.placement, self.costs, self.policy = placement, costs, policy
        self.num_microbatches, self.last = num_microbatches, len(placement) - 1
        self.ranks = [
            _Rank(
                tuple(stage for stage, holder in enumerate(placement) if holder == rank),
                limits[rank],
            )
            for rank in range(len(limits))
        ]
        self.forwards = [0] * len(placement)
        self.inputs = [0] * len(placement)  # I done per stage
        self.ends: dict[tuple[bool, int, int], Time] = {}

    def run(self) -> Order | None:
        """Repeat the earliest choice of all ranks until nothing is left."""
        choices = [self.choose(rank) for rank in self.ranks]
        while True:
            known = [
                (choice[0], number) for number, choice in enumerate(choices) if choice is not None
            ]
            if not known:
                break
            start, number = min(known)
            choice = choices[number]
            assert choice is not None
            action = choice[1]
            self.execute(self.ranks[number], start, action)
            touched = {number}
            if action.kind is not Kind.W and action.stage is not None:
                other = action.stage + (1 if action.kind is Kind.F else -1)
                if 0 <= other <= self.last:
                    touched.add(self.placement[other])
            for other in sorted(touched):
                choices[other] = self.choose(self.ranks[other])
        if any(done < self.num_microbatches for done in self.inputs):
            return None
        return Order(self.placement, [rank.row for rank in self.ranks])

    def arrival(self, forward: bool, stage: int, microbatch: int) -> Time | None:
        """When the input of an F or I is there; None while unknown."""
        source = stage - 1 if forward else stage + 1
        if not 0 <= source <= self.last:
            return 0
        end = self.ends.get((forward, source, microbatch))
        if end is None or self.placement[source] == self.placement[stage]:
            return end
        return end + self.costs.latency + self.costs.transfer

    def choose(self, rank: _Rank) -> tuple[Time, Action] | None:
        """The best action among those that can start first, W only if nothing comes soon."""
        options = list(self.options(rank))
        start = min((option[0] for option in options), default=None)
        if rank.deferred:
            weight = rank.deferred[0]
            assert weight.stage is not None
            patience = self.policy.patience * self.costs.weight_grad[weight.stage]
            if start is None or start > rank.free + patience:
                return rank.free, weight
        if start is None:
            return None
        best = min(option for option in options if option[0] == start)
        return start, best[3]

    def options(self, rank: _Rank) -> Iterator[tuple[Time, int, int, Action]]:
        """Yield (start, preference, order, action) of each F and I whose input has a time."""
        backward_first = self.prefers_backward(rank)
        for position, stage in enumerate(rank.stages):
            mb = self.inputs[stage]
            if mb < self.forwards[stage]:
                arrival = self.arrival(False, stage, mb)
                if arrival is not None:
                    start = max(rank.free, arrival)
                    yield start, 0 if backward_first else 1, stage, Action(Kind.I, stage, mb)
            mb = self.forwards[stage]
            later = len(rank.stages) - 1 - position
            if mb < self.num_microbatches and rank.alive < rank.limit - self.policy.keep * later:
                arrival = self.arrival(True, stage, mb)
                if arrival is not None:
                    start = max(rank.free, arrival)
                    preference = 1 if backward_first else 0
                    yield start, preference, self.last - stage, Action(Kind.F, stage, mb)

    def prefers_backward(self, rank: _Rank) -> bool:
        """Whether the rank's warm-up is over."""
        if self.policy.warm_up is None:
            return True
        ahead = sum(self.forwards[stage] - self.inputs[stage] for stage in rank.stages)
        below = self.last - rank.stages[0]
        return ahead > self.policy.warm_up * below

    def execute(self, rank: _Rank, start: Time, action: Action) -> None:
        """Put the action at the end of the rank's row."""
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None and microbatch is not None
        rank.row.append(action)
        if action.kind is Kind.W:
            rank.deferred.popleft()
            rank.alive -= 1
            rank.free = start + self.costs.weight_grad[stage]
        elif action.kind is Kind.F:
            rank.free = start + self.costs.forward[stage]
            rank.alive += 1
            self.forwards[stage] += 1
            self.ends[True, stage, microbatch] = rank.free
        else:
            rank.free = start + self.costs.input_grad[stage]
            rank.deferred.append(Action(Kind.W, stage, microbatch))
            self.inputs[stage] += 1
            self.ends[False, stage, microbatch] = rank.free
