"""What actions cost: the input of the simulator and of the cost-aware schedule.

Times are any numbers of one unit; with integers and fractions every result is exact. The
costs are per stage, one of the p * v pieces, so unequal stages need nothing special. A
message takes `latency` plus `transfer`, and only the latter occupies its channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeAlias

Time: TypeAlias = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """Times of a table.

    Attributes:
        forward, input_grad, weight_grad: per stage, of one microbatch; B costs I + W.
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

    def __post_init__(self) -> None:
        lengths = {len(self.forward), len(self.input_grad), len(self.weight_grad)}
        if len(lengths) != 1:
            raise ValueError(f"costs of {sorted(lengths)} stages: F, I and W need the same number")
        times = (*self.forward, *self.input_grad, *self.weight_grad)
        rest = (self.latency, self.transfer, self.reduce, self.unshard, self.norm, self.step)
        # Not `< 0`: a NaN must not pass.
        if not all(0 <= time < float("inf") for time in (*times, *rest)):
            raise ValueError("costs must be finite and not negative")

    def work(self, stages: Sequence[int]) -> Time:
        """Return F + I + W of one microbatch on all these stages."""
        return sum(self.forward[s] + self.input_grad[s] + self.weight_grad[s] for s in stages)

    def in_whole_numbers(self) -> Costs:
        """Return costs in a smaller unit, as integers if all are exact: faster to add."""
        many = (*self.forward, *self.input_grad, *self.weight_grad)
        rest = (self.latency, self.transfer, self.reduce, self.unshard, self.norm, self.step)
        if any(isinstance(time, float) for time in (*many, *rest)):
            return self
        unit = lcm(*(Fraction(time).denominator for time in (*many, *rest)))
        f, i, w = (
            tuple(int(time * unit) for time in times)
            for times in (self.forward, self.input_grad, self.weight_grad)
        )
        return Costs(f, i, w, *(int(time * unit) for time in rest))


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
