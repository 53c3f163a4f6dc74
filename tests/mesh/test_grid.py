"""Rank arithmetic: measured tables of Megatron, round trips, partitions, 16,384 ranks."""

import dataclasses
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.plan import ParallelShape
from megatron_lite.errors import UserError
from megatron_lite.mesh.grid import (
    RANK_ORDERS,
    Grid,
    build_grids,
    kv_replica_count,
    kv_replica_ranks,
)

WORLD_16 = ParallelShape(
    world_size=16,
    tp=2,
    cp=2,
    ep=4,
    etp=1,
    dp=2,
    edp=2,
    pp=2,
    vpp=1,
    sequence_parallel=False,
    order="tp-cp-ep-dp-pp",
)

shapes = st.lists(st.integers(1, 4), min_size=4, max_size=4)


def test_dense_groups_of_16_ranks_are_megatrons() -> None:
    dense = build_grids(WORLD_16).dense
    assert dense.groups(("tp",)) == tuple((r, r + 1) for r in range(0, 16, 2))
    assert dense.groups(("cp",))[:3] == ((0, 2), (1, 3), (4, 6))
    assert dense.groups(("dp",))[:2] == ((0, 4), (1, 5))
    assert dense.groups(("pp",)) == tuple((r, r + 8) for r in range(8))
    assert dense.groups(("dp", "cp"))[0] == (0, 2, 4, 6)
    assert dense.groups(("tp", "pp"))[0] == (0, 1, 8, 9)


def test_expert_groups_of_16_ranks_are_megatrons() -> None:
    grids = build_grids(WORLD_16)
    assert grids.expert.groups(("ep",))[0] == (0, 1, 2, 3)
    assert grids.expert.groups(("edp",))[:2] == ((0, 4), (1, 5))
    assert grids.expert.groups(("pp",)) == grids.dense.groups(("pp",))


def test_the_other_rank_order_puts_pp_before_dp() -> None:
    grids = build_grids(dataclasses.replace(WORLD_16, order="tp-cp-ep-pp-dp"))
    assert grids.dense.axes == ("tp", "cp", "pp", "dp")
    assert grids.dense.groups(("pp",))[:2] == ((0, 4), (1, 5))
    assert grids.dense.groups(("dp",))[:2] == ((0, 8), (1, 9))
    assert grids.expert.groups(("pp",)) == grids.dense.groups(("pp",))


@given(shapes, st.sampled_from([("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp")]))
def test_ranks_and_coordinates_round_trip(sizes: list[int], axes: tuple[str, ...]) -> None:
    grid = Grid(axes, tuple(sizes))
    seen = {tuple(grid.coordinate(rank).values()) for rank in range(grid.world_size)}
    assert len(seen) == grid.world_size
    for rank in range(grid.world_size):
        assert grid.rank_at(grid.coordinate(rank)) == rank


@given(shapes, st.sets(st.sampled_from(["tp", "cp", "dp", "pp"])))
def test_groups_partition_the_ranks_and_vary_only_their_axes(
    sizes: list[int], chosen: set[str]
) -> None:
    grid = Grid(("tp", "cp", "dp", "pp"), tuple(sizes))
    axes = tuple(sorted(chosen))
    groups = grid.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert list(groups) == sorted(groups)
    for ranks in groups:
        assert list(ranks) == sorted(ranks)
        rest = [
            {axis: at for axis, at in grid.coordinate(rank).items() if axis not in chosen}
            for rank in ranks
        ]
        assert all(coordinate == rest[0] for coordinate in rest)
        assert all(grid.group(rank, axes) == ranks for rank in ranks)


@pytest.mark.parametrize("order", RANK_ORDERS)
def test_16384_ranks_take_milliseconds(order: str) -> None:
    shape = ParallelShape(
        world_size=16384,
        tp=8,
        cp=4,
        ep=32,
        etp=1,
        dp=32,
        edp=32,
        pp=16,
        vpp=1,
        sequence_parallel=True,
        order=order,
    )
    start = time.process_time()
    grids = build_grids(shape)
    for rank in range(0, 16384, 16):
        assert rank in grids.dense.group(rank, ("cp", "dp"))
        assert rank in grids.expert.group(rank, ("ep",))
    lookups_s = time.process_time() - start
    assert len(grids.dense.groups(("cp", "dp"))) == 128
    assert len(grids.expert.groups(("edp",))) == 512
    # 2,048 lookups; a scan of all ranks for each would take a hundred times as long.
    assert lookups_s < 1.0


def test_kv_heads_fewer_than_tp_live_on_consecutive_ranks() -> None:
    grid = Grid(("tp", "cp", "dp", "pp"), (8, 1, 2, 1))
    assert [kv_replica_ranks(grid, rank, 2) for rank in (0, 3, 4, 15)] == [
        (0, 1, 2, 3),
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (12, 13, 14, 15),
    ]
    assert kv_replica_ranks(grid, 5, 1) == tuple(range(8))
    assert kv_replica_ranks(grid, 5, 8) == (5,)
    assert kv_replica_ranks(grid, 5, 16) == (5,)


def test_kv_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="6 KV heads cannot be spread over tp=4"):
        kv_replica_count(4, 6)


def test_sizes_that_do_not_make_the_world_are_refused() -> None:
    with pytest.raises(UserError, match=r"tp=2 x cp=2 x dp=3 x pp=2 = 24 ranks.* 16"):
        build_grids(dataclasses.replace(WORLD_16, dp=3))


def test_a_rank_on_two_pipeline_stages_is_refused() -> None:
    shape = dataclasses.replace(WORLD_16, ep=2, edp=4, order="tp-cp-ep-pp-dp")
    with pytest.raises(UserError, match="needs tp x cp = etp x ep"):
        build_grids(shape)


def test_mistaken_lookups_raise() -> None:
    grid = Grid(("tp", "dp"), (2, 2))
    with pytest.raises(ValueError, match="no axis 'pp'"):
        grid.group(0, ("pp",))
    with pytest.raises(ValueError, match="outside 0"):
        grid.coordinate(4)
    with pytest.raises(ValueError, match="does not name the axes"):
        grid.rank_at({"tp": 0})


def test_the_grid_loads_without_torch() -> None:
    modules = "megatron_lite.mesh.grid, megatron_lite.mesh.launch"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
