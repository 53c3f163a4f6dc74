"""Nearest legal values: small arithmetic for the messages of the rules."""

from __future__ import annotations

import math

# Trial division stops here: a hint is not worth a wait. Exact for numbers up to its square.
LARGEST_TRIAL = 2**17


def join_values(values: list[int]) -> str:
    """Form '2 or 4'."""
    return " or ".join(str(value) for value in values)


def find_divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, min(math.isqrt(number), LARGEST_TRIAL) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisors(number: int, value: int) -> str:
    """Name the divisors of `number` next below and above `value`."""
    divisors = find_divisors(number)
    below = [d for d in divisors if d < value][-1:]
    above = [d for d in divisors if d > value][:1]
    exact = [value] if value in divisors else []
    return join_values(exact or below + above)


def nearest_multiples(unit: int, value: int) -> str:
    """Name the positive multiples of `unit` next below and above `value`."""
    below = value // unit * unit
    candidates = [below] if below > 0 else []
    if below != value or not candidates:
        candidates.append(below + unit)
    return join_values(candidates)


def nearest_group_counts(heads: int, tp: int, value: int) -> str:
    """Name the counts of key/value heads nearest to `value` that fit heads and TP."""
    legal = [g for g in find_divisors(heads) if (g % tp == 0 or tp % g == 0) and g != value]
    return join_values(sorted(sorted(legal, key=lambda g: (abs(g - value), g))[:2]))
