"""Filling of waits: a given order of F and I, everything else wherever a rank would idle.

Plays the forwards and input gradients of every rank in their order against the clock. A
rank that would wait does a deferred W instead, or an I or F that is ready although it is
not its turn yet, as long as the activations alive stay within the rank's bound. An F that
finds no memory is preceded by a W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.costs import Costs, Time
from megatron_lite.pipeline.passes import Rows

_AHEAD = 12  # so many places of its order a waiting rank looks for something to do


@dataclass(frozen=True)
class Filling:
    """What may be done in a wait.

    Attributes:
        early_inputs: an I whose turn comes later.
        early_forwards: an F whose turn comes later.
        patience: a W is begun if the wait is known to be longer than this many W.
    """

    early_inputs: bool
    early_forwards: bool
    patience: Time = 0


@dataclass
class _Rank:
    """One rank while its order is being made.

    Attributes:
        ahead: F and I still to do, in the given order.
        deferred: W that may be done.
        alive: activations.
    """

    ahead: list[Action]
    bound: int
    deferred: list[Action] = field(default_factory=list)
    alive: int = 0
    free: Time = 0
    row: list[Action] = field(default_factory=list)


def fill_waits(
    rows: Rows,
    placement: Sequence[int],
    bounds: Sequence[int],
    costs: Costs,
    filling: Filling,
) -> Rows | None:
    """Return the complete order of computations, with I and W throughout.

    Args:
        rows: per rank, of which F and I (or B) give the order; W are placed anew.
        bounds: per rank, most activations alive.

    Returns:
        None where the bounds or the order itself leave a rank without anything to do.
    """
    ranks = []
    for row, bound in zip(rows, bounds, strict=True):
        ahead = [
            Action(Kind.F if action.kind is Kind.F else Kind.I, action.stage, action.microbatch)
            for action in row
            if action.kind is not Kind.W
        ]
        ranks.append(_Rank(ahead, bound))
    return _Filler(tuple(placement), ranks, costs, filling).fill()


@dataclass
class _Filler:
    """The state of the play.

    Attributes:
        ends: when the output of an F or I was ready.
    """

    placement: tuple[int, ...]
    ranks: list[_Rank]
    costs: Costs
    filling: Filling
    ends: dict[Action, Time] = field(default_factory=dict)

    def fill(self) -> Rows | None:
        """Repeat the choice that can start first, ties by rank, until nothing is left."""
        choices = [self.choose(rank) for rank in self.ranks]
        while True:
            known = [(at, k, action) for k, (at, action) in enumerate(choices) if action]
            if not known:
                break
            start, k, action = min(known, key=lambda choice: choice[:2])
            self.execute(self.ranks[k], start, action)
            touched = {k}
            assert action.stage is not None
            if action.kind is not Kind.W:
                following = action.stage + (1 if action.kind is Kind.F else -1)
                if 0 <= following < len(self.placement):
                    touched.add(self.placement[following])
            for other in sorted(touched):
                choices[other] = self.choose(self.ranks[other])
        if any(rank.ahead for rank in self.ranks):
            return None
        return [[*rank.row, *rank.deferred] for rank in self.ranks]

    def arrival(self, action: Action) -> Time | None:
        """When what an F or I needs is there; None while that is not known."""
        stage, placement = action.stage, self.placement
        assert stage is not None
        source = stage - 1 if action.kind is Kind.F else stage + 1
        if not 0 <= source < len(placement):
            return 0
        end = self.ends.get(Action(action.kind, source, action.microbatch))
        if end is None or placement[source] == placement[stage]:
            return end
        return end + self.costs.latency + self.costs.transfer

    def choose(self, rank: _Rank) -> tuple[Time, Action | None]:
        """Return what the rank does next and when; no action if it has to wait to know."""
        if not rank.ahead:
            return 0, None
        following, now = rank.ahead[0], rank.free
        weight = rank.deferred[0] if rank.deferred else None
        if following.kind is Kind.F and rank.alive >= rank.bound:
            return now, weight
        arrival = self.arrival(following)
        if arrival is not None and arrival <= now:
            return now, following
        filler = self.find_ready(rank)
        if filler is None and weight is not None and weight.stage is not None:
            least = self.filling.patience * self.costs.weight_grad[weight.stage]
            if arrival is None or arrival - now > least or arrival - now >= least > 0:
                filler = weight
        if filler is not None:
            return now, filler
        return (0, None) if arrival is None else (arrival, following)

    def find_ready(self, rank: _Rank) -> Action | None:
        """Return an I, or an F for which there is memory, that may overtake the next action."""
        if self.filling.early_inputs:
            blocked: set[int | None] = set()
            begun: set[tuple[int | None, int | None]] = set()
            for place, action in enumerate(rank.ahead[:_AHEAD]):
                stage, microbatch = action.stage, action.microbatch
                if action.kind is Kind.F:
                    begun.add((stage, microbatch))
                    continue
                in_order = stage not in blocked and (stage, microbatch) not in begun
                if in_order and place and self.is_ready(rank, action):
                    return action
                blocked.add(stage)
        if self.filling.early_forwards and rank.alive < rank.bound:
            return self.find_forward(rank)
        return None

    def find_forward(self, rank: _Rank) -> Action | None:
        """Return a ready F beside which all that it overtakes would still have memory."""
        alive = rank.alive - len(rank.deferred) + 1  # once all deferred W are done
        overtaken: set[int | None] = set()
        for place, action in enumerate(rank.ahead[:_AHEAD]):
            if action.kind is Kind.F:
                in_order = action.stage not in overtaken
                if place and in_order and self.is_ready(rank, action):
                    return action
                overtaken.add(action.stage)
                alive += 1
                if alive > rank.bound:
                    return None
            else:
                alive -= 1
        return None

    def is_ready(self, rank: _Rank, action: Action) -> bool:
        """Whether the rank can start the action now."""
        arrival = self.arrival(action)
        return arrival is not None and arrival <= rank.free

    def execute(self, rank: _Rank, start: Time, action: Action) -> None:
        """Put the action into the rank's row."""
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        rank.row.append(action)
        if action.kind is Kind.W:
            rank.deferred.pop(0)
            rank.alive -= 1
            rank.free = start + self.costs.weight_grad[stage]
            return
        rank.ahead.remove(action)
        if action.kind is Kind.F:
            rank.alive += 1
            rank.free = start + self.costs.forward[stage]
        else:
            rank.deferred.append(Action(Kind.W, stage, microbatch))
            rank.free = start + self.costs.input_grad[stage]
        self.ends[action] = rank.free
