"""Covering sets contain every legal pair, are small, and never change."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.verify.axes import (
    data_axis,
    independent_names,
    sequence_axis,
    subsets_by_depth,
    tensor_axis,
)
from megatron_lite.verify.covering import Row, all_rows, covering_rows


def pairs(rows: list[Row]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    forbidden=st.integers(0, 6),
)
def test_every_legal_pair_is_covered(sizes: list[int], forbidden: int) -> None:
    factors = {str(number): range(size) for number, size in enumerate(sizes)}

    def allowed(row: Row) -> bool:
        return sum(int(str(value)) for value in row.values()) != forbidden

    rows = covering_rows(factors, allowed)
    assert all(allowed(row) for row in rows)
    assert pairs(rows) == pairs(all_rows(factors, allowed))
    assert rows == covering_rows(factors, allowed)


def test_ten_factors_of_three_need_few_rows() -> None:
    factors = {str(number): range(3) for number in range(8)}
    assert len(covering_rows(factors, lambda row: True)) < 25


def test_an_axis_counts_with_the_one_it_needs() -> None:
    axes = (tensor_axis(2), sequence_axis(), data_axis(2))
    names = [
        ["+".join(axis.name for axis in chosen) for chosen in depth]
        for depth in subsets_by_depth(axes)
    ]
    assert names == [["tp", "dp", "tp+sp"], ["tp+dp", "tp+sp+dp"]]
    assert independent_names(axes[:2]) == ("sp",)
