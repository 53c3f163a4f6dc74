"""What actions cost: the input of the simulator and of the cost-aware schedule.

Times are any numbers of one unit; with integers and fractions every result is exact. The
costs are per stage, one of the p * v pieces, so unequal stages need nothing special. A
message takes `latency` plus `transfer`, and only the latter occupies its channel. A stage of
experts also exchanges tokens inside its block; `Costs.time_of` says when that costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeAlias

from megatron_lite.pipeline.actions import Action, Kind

Time: TypeAlias = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """Times of a table.

    Attributes:
        forward, input_grad, weight_grad: per stage, of one microbatch; B costs I + W.
            Exchanges of experts are not in them.
        exchanges: per stage the times of F's, I's and W's all-to-alls; empty: none.
        latency: alpha of a message between ranks; hops inside a rank are free.
        transfer: beta n, the time for which a message occupies its channel.
        reduce: gradient reduction of a stage over the data-parallel ranks.
        unshard: gathering of a stage's parameters.
        norm: the closing reduction.
        step: update of a stage.
    """

    forward: tuple[Time, ...]
    input_grad: tuple[Time, ...]
    weight_grad: tuple[Time, ...]
    latency: Time = 0
    transfer: Time = 0
    reduce: Time = 0
    unshard: Time = 0
    norm: Time = 0
    step: Time = 0
    exchanges: tuple[tuple[Time, Time, Time], ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.forward), len(self.input_grad), len(self.weight_grad)}
        if len(lengths) != 1:
            raise ValueError(f"costs of {sorted(lengths)} stages: F, I and W need the same number")
        if self.exchanges and len(self.exchanges) != len(self.forward):
            raise ValueError(
                f"exchanges of {len(self.exchanges)} stages for {len(self.forward)} stages"
            )
        times = (*self.forward, *self.input_grad, *self.weight_grad, *sum(self.exchanges, ()))
        rest = (self.latency, self.transfer, self.reduce, self.unshard, self.norm, self.step)
        # Not `< 0`: a NaN must not pass.
        if not all(0 <= time < float("inf") for time in (*times, *rest)):
            raise ValueError("costs must be finite and not negative")

    def time_of(self, action: Action) -> Time:
        """Return how long a computation, or a pair of them, occupies its rank.

        A rank computes one thing at a time and exchanges one thing at a time. An action
        alone does both in turn, c + x. Of a pair, F (c, x) and B (c', x'), neither resource
        can be faster than its work, and neither half than its own chain of both:

            max(c + c', x + x', c + x, c' + x').

        It is reached in the limit of many layers per stage, where one half computes
        whenever the other exchanges; with L layers at most one more layer of it is lost.
        """
        if not action.halves:
            compute, exchange = self._parts(action)
            return compute + exchange
        (c, x), (other_c, other_x) = (self._parts(half) for half in action.halves)
        return max(c + other_c, x + other_x, c + x, other_c + other_x)

    def _parts(self, action: Action) -> tuple[Time, Time]:
        """Return computing and exchanging time of a single computation."""
        stage, kind = action.stage, action.kind
        assert stage is not None
        exchange = self.exchanges[stage] if self.exchanges else (0, 0, 0)
        if kind is Kind.F:
            return self.forward[stage], exchange[0]
        if kind is Kind.I:
            return self.input_grad[stage], exchange[1]
        if kind is Kind.W:
            return self.weight_grad[stage], exchange[2]
        return self.input_grad[stage] + self.weight_grad[stage], exchange[1] + exchange[2]

    def work(self, stages: Sequence[int]) -> Time:
        """Return F + I + W of one microbatch on all these stages, exchanges included."""
        computed = sum(self.forward[s] + self.input_grad[s] + self.weight_grad[s] for s in stages)
        return computed + sum(sum(self.exchanges[s]) for s in stages if self.exchanges)

    def in_whole_numbers(self) -> Costs:
        """Return costs in a smaller unit, as integers if all are exact: faster to add."""
        many = (*self.forward, *self.input_grad, *self.weight_grad, *sum(self.exchanges, ()))
        rest = (self.latency, self.transfer, self.reduce, self.unshard, self.norm, self.step)
        if any(isinstance(time, float) for time in (*many, *rest)):
            return self
        unit = lcm(*(Fraction(time).denominator for time in (*many, *rest)))
        f, i, w = (
            tuple(int(time * unit) for time in times)
            for times in (self.forward, self.input_grad, self.weight_grad)
        )
        exchanges = tuple(
            (int(a * unit), int(b * unit), int(c * unit)) for a, b, c in self.exchanges
        )
        latency, transfer, reduce, unshard, norm, step = (int(time * unit) for time in rest)
        return Costs(f, i, w, latency, transfer, reduce, unshard, norm, step, exchanges)


def equal_costs(
    num_stages: int,
    chunks: int = 1,
    forward: Time = 1,
    input_grad: Time = 1,
    weight_grad: Time = 1,
    *,
    latency: Time = 0,
    transfer: Time = 0,
) -> Costs:
    """Return costs of equal stages, given those of a whole rank (all its chunks)."""

    def share(time: Time) -> Time:
        if isinstance(time, float):
            return time / chunks
        exact = Fraction(time) / chunks
        return exact.numerator if exact.denominator == 1 else exact

    return Costs(
        (share(forward),) * num_stages,
        (share(input_grad),) * num_stages,
        (share(weight_grad),) * num_stages,
        latency,
        transfer,
    )
