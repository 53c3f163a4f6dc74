"""Pairwise covering sets: every pair of values of two factors meets in at least one row.

Most layout bugs need one axis or two; the whole product grows with every axis, a pairwise
set hardly. Greedy and deterministic: the same factors give the same rows, and a new factor
is a new key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]


def all_rows(factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool]) -> list[Row]:
    """The whole product, without rows that are not allowed."""
    rows = (
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    )
    return [row for row in rows if allowed(row)]


def covering_rows(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool]
) -> list[Row]:
    """Few allowed rows that contain every pair of values that some allowed row contains."""
    rows = all_rows(factors, allowed)
    pairs = [_pairs(row) for row in rows]
    missing = set().union(*pairs) if pairs else set()
    chosen: list[Row] = []
    while missing:
        # The first of the best, so that the result does not depend on anything else.
        best = max(range(len(rows)), key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(rows[best])
        missing -= pairs[best]
    return chosen


def _pairs(row: Row) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(itertools.combinations(row.items(), 2))
