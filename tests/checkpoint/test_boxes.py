"""Boxes tile or they do not, and the fault names an element."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint.boxes import Region, intersect, tiling_fault


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape and a random guillotine tiling of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    regions: list[Region] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offset, extent = regions.pop(draw(st.integers(0, len(regions) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, extent[dim]))
        for low, size in ((0, cut), (cut, extent[dim] - cut)):
            regions.append(
                (
                    (*offset[:dim], offset[dim] + low, *offset[dim + 1 :]),
                    (*extent[:dim], size, *extent[dim + 1 :]),
                )
            )
    return shape, draw(st.permutations(regions))


@given(tilings())
@settings(max_examples=200, deadline=None)
def test_every_guillotine_tiling_is_accepted(tiling: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, regions = tiling
    assert tiling_fault(shape, regions) is None


@given(tilings(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_dropped_or_doubled_box_is_a_fault(
    tiling: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    shape, regions = tiling
    solid = [region for region in regions if all(region[1])]
    region = data.draw(st.sampled_from(solid))
    assert tiling_fault(shape, [r for r in solid if r != region]) is not None
    assert "in 2 files" in str(tiling_fault(shape, [*solid, region]))


def test_equal_volume_does_not_hide_a_gap_behind_an_overlap() -> None:
    regions = [((0, 0), (2, 2)), ((0, 1), (2, 2))]
    assert tiling_fault((2, 4), regions) is not None


@pytest.mark.parametrize("region", [((3,), (2,)), ((-1,), (2,)), ((0, 0), (4, 1))])
def test_a_box_outside_is_a_fault(region: Region) -> None:
    assert "outside" in str(tiling_fault((4,), [region]))


def test_an_empty_tensor_needs_one_box() -> None:
    assert tiling_fault((0, 3), []) == "no region"
    assert tiling_fault((0, 3), [((0, 0), (0, 3))]) is None


def test_a_scalar_in_two_files_is_a_fault() -> None:
    assert tiling_fault((), [((), ())]) is None
    assert tiling_fault((), [((), ()), ((), ())]) is not None


def test_sixteen_thousand_boxes_take_well_under_a_second() -> None:
    regions = [((i * 2, j * 3), (2, 3)) for i, j in itertools.product(range(128), range(128))]
    assert tiling_fault((256, 384), regions) is None


def test_intersection_is_none_where_boxes_only_touch() -> None:
    assert intersect(((0,), (2,)), ((2,), (2,))) is None
    assert intersect(((0, 1), (3, 3)), ((2, 0), (3, 3))) == ((2, 1), (1, 2))
