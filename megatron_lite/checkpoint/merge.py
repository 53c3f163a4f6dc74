"""Arithmetic of merging: weighted averages, task vectors, and the search for the weights.

Every merge is one linear combination, theta = sum c_i theta_i with the c_i adding up to 1:
an average has c = w; base + sum w_i (theta_i - base) has c = (1 - sum w, w_1, ...), where w
may lie outside of [0, 1]. It is computed in fp64 and rounded once, so w = 0 gives the base
and w = 1 the other model to the bit (model soups, arXiv 2203.05482; task arithmetic,
arXiv 2212.04089). Memory: one tensor in fp64, and one input's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import UserError

SUM_TOLERANCE = 1e-9  # of decimal fractions on a command line that add up to 1
GOLDEN = (math.sqrt(5) - 1) / 2
Point = tuple[float, ...]


def average_coefficients(weights: Sequence[float], *, normalize: bool) -> Point:
    """Return the coefficients of a weighted average.

    Args:
        normalize: divide by the sum; otherwise the sum must be 1.

    Raises:
        UserError: the sum is another one, or 0.
    """
    total = _sum(weights)
    if normalize:
        if abs(total) < SUM_TOLERANCE:
            raise UserError("--weights: their sum is 0, which --normalize cannot divide by")
        return tuple(weight / total for weight in weights)
    if abs(total - 1) > SUM_TOLERANCE:
        raise UserError(
            f"--weights: their sum is {total:g}, and an average needs 1: --normalize divides by "
            "it, --base DIR combines differences from a base instead"
        )
    return tuple(weights)


def offset_coefficients(weights: Sequence[float]) -> Point:
    """Return the coefficients (base first) of base + sum w_i (theta_i - base)."""
    return (1 - _sum(weights), *weights)


def ema_weights(count: int, decay: float) -> Point:
    """Return the weights of an exponential moving average over models, oldest first.

    The average starts as the oldest model and takes 1 - decay of each next one.
    """
    if not 0 <= decay < 1:
        raise UserError(f"--ema-decay {decay:g} must lie in [0, 1)")
    newer = [(1 - decay) * decay ** (count - 1 - index) for index in range(1, count)]
    return (decay ** (count - 1), *newer)


def combine(
    loads: Sequence[Callable[[], Tensor]], coefficients: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Return sum c_i theta_i, added in fp64 and rounded to `dtype`.

    Args:
        loads: read the same tensor of each model; not called where its coefficient is 0.
        coefficients: one for each model.
    """
    total: Tensor | None = None
    for load, coefficient in zip(loads, coefficients, strict=True):
        if coefficient == 0:
            continue
        if total is None:
            total = load().double().mul_(coefficient)  # not 0 + it: that would lose -0.0
        else:
            total.add_(load(), alpha=coefficient)  # promoted: product and sum are in fp64
    if total is None:
        raise ValueError("all coefficients are 0")
    return total.to(dtype)


def load_finite(name: str, load: Callable[[], Tensor]) -> Tensor:
    """Load a tensor of the result.

    Raises:
        UserError: not all of its values are finite.
    """
    value = load()
    if not bool(value.isfinite().all()):
        raise UserError(
            f"{name}: merged, it has values that are no finite numbers: an input has some, or the "
            f"result is beyond {torch.finfo(value.dtype).max:.6g}, the largest of {value.dtype}"
        )
    return value


@dataclass(frozen=True)
class Trial:
    """A point of the search and its loss."""

    weights: Point
    loss: float


def search_weights(
    evaluate: Callable[[Point], float],
    count: int,
    *,
    low: float,
    high: float,
    steps: int,
    rounds: int = 1,
) -> list[Trial]:
    """Look for the weights with the lowest loss; return all trials in order.

    First the base (all 0) and the mean of all models. Then, `rounds` times, each weight in
    turn by golden-section search over [low, high] with the others at the best point so
    far. The loss is assumed to have one valley along each weight; where it has more, one of
    them is found. The best trial is never worse than the base or the mean.

    Args:
        evaluate: loss of the model with these weights; NaN counts as infinite.
        count: number of weights.
        steps: evaluations per weight and round; each narrows the interval to 0.618 of it.
    """
    trials: list[Trial] = []

    def attempt(weights: Point) -> float:
        for trial in trials:
            if trial.weights == weights:
                return trial.loss
        loss = evaluate(weights)
        trials.append(Trial(weights, math.inf if math.isnan(loss) else loss))
        return trials[-1].loss

    attempt((0.0,) * count)
    attempt((1 / (count + 1),) * count)
    for _ in range(rounds):
        for index in range(count):
            best = best_trial(trials).weights

            def along(value: float, best: Point = best, index: int = index) -> float:
                return attempt((*best[:index], value, *best[index + 1 :]))

            _golden_section(along, low, high, steps)
    return trials


def best_trial(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the lowest loss, the first of equals."""
    return min(trials, key=lambda trial: trial.loss)


def _golden_section(f: Callable[[float], float], low: float, high: float, steps: int) -> None:
    """Evaluate `steps` points that close in on a minimum inside [low, high]."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    values: dict[float, float] = {}
    for point in (left, right)[:steps]:
        values[point] = f(point)
    for _ in range(steps - 2):
        if values[left] <= values[right]:
            high, right = right, left
            left = high - GOLDEN * (high - low)
            values[left] = f(left)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
            values[right] = f(right)


def _sum(weights: Sequence[float]) -> float:
    odd = [weight for weight in weights if not math.isfinite(weight)]
    if odd:
        raise UserError(f"--weights {odd[0]}: is no number")
    try:
        return math.fsum(weights)
    except OverflowError:
        raise UserError("--weights: their sum is too large for a number") from None
