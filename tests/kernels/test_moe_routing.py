"""Routing of csrc/moe/routing.cu: the order of a stable sort, without sorting.

| result                            | bound |
|-----------------------------------|-------|
| counts, offsets, rows, splits     | equal |
"""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe_routes import SOURCES, check_route, draw_ids, route
from tests.sim import build


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(SOURCES)


@pytest.fixture(params=["fwd", "rev", "rand:5"])
def ordered(request: pytest.FixtureRequest, kernels: build.Kernels) -> Iterator[build.Kernels]:
    with kernels.options(order=request.param):
        yield kernels


@pytest.mark.parametrize(
    "tokens, experts, k, align",
    [(1, 1, 1, 1), (1, 8, 2, 16), (77, 3, 2, 1), (700, 64, 8, 16), (1500, 5, 1, 128),
     (33, 2, 5, 4), (600, 300, 4, 8)],
)  # fmt: skip
def test_routing_is_a_stable_order_by_expert(
    ordered: build.Kernels, tokens: int, experts: int, k: int, align: int
) -> None:
    ids = draw_ids(np.random.default_rng(tokens), tokens, experts, k, 0.1)
    check_route(route(ordered, ids, experts, align), ids, experts, align)


@pytest.mark.parametrize("align", [1, 16])
def test_no_tokens_all_dropped_and_all_to_one_expert(kernels: build.Kernels, align: int) -> None:
    for ids in (
        np.zeros((0, 2), int),
        np.full((70, 2), -1),
        np.full((1100, 1), 3),
        np.array([[7, -1], [0, 7]]),
        np.array([[8, -7], [2**31 - 1, -(2**31)]]),  # not experts: dropped as well
    ):
        check_route(route(kernels, ids, 8, align), ids, 8, align)


def test_rows_beyond_the_last_expert_are_padding(kernels: build.Kernels) -> None:
    ids = draw_ids(np.random.default_rng(0), 20, 4, 2, 0.0)
    check_route(route(kernels, ids, 4, 8, rows=1000), ids, 4, 8)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 900), st.integers(1, 40), st.integers(1, 6),
       st.sampled_from([1, 2, 7, 32]), st.floats(0, 1))  # fmt: skip
def test_drawn_routings(
    kernels: build.Kernels, seed: int, tokens: int, experts: int, k: int, align: int, drop: float
) -> None:
    ids = draw_ids(np.random.default_rng(seed), tokens, experts, k, drop)
    check_route(route(kernels, ids, experts, align), ids, experts, align)


def test_more_chunks_than_threads_in_the_scan(kernels: build.Kernels) -> None:
    ids = draw_ids(np.random.default_rng(1), 512 * 260 + 3, 2, 1, 0.1)
    check_route(route(kernels, ids, 2, 1), ids, 2, 1)


@pytest.mark.parametrize("ranks", [1, 2, 6, 12])
def test_split_sizes_sum_the_experts_of_each_rank(kernels: build.Kernels, ranks: int) -> None:
    counts = build.placed(np.arange(12, dtype=np.int64) * 2**31)
    splits = build.poisoned(ranks, np.int64)
    kernels.call("launch_moe_splits", counts, 12, ranks, splits)
    np.testing.assert_array_equal(splits, counts.reshape(ranks, -1).sum(1))


def test_split_sizes_of_many_experts_per_rank(kernels: build.Kernels) -> None:
    counts, splits = build.placed(np.arange(200, dtype=np.int64)), build.poisoned(2, np.int64)
    kernels.call("launch_moe_splits", counts, 200, 2, splits)
    np.testing.assert_array_equal(splits, counts.reshape(2, -1).sum(1))


def test_wrong_sizes_are_refused(kernels: build.Kernels) -> None:
    ids = np.zeros((10, 2), int)
    for experts, align, rows in ((0, 1, 20), (4, 0, 20), (4, 8, 47), (8193, 1, 20), (4, 1, 2**31)):
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call("launch_moe_route", build.placed(ids.astype(np.int32)), 20, experts,
                         align, rows, None, None, None, None, None)  # fmt: skip
    with pytest.raises(build.SimError, match="returned 1"):
        kernels.call("launch_moe_splits", None, 10, 3, None)


def test_routing_bytes(kernels: build.Kernels) -> None:
    tokens, experts, k = 2048, 8, 2
    n, rows, chunks = tokens * k, tokens * k, tokens * k // 512
    ids = build.placed(draw_ids(np.random.default_rng(3), tokens, experts, k, 0).astype(np.int32))
    counts = kernels.count(
        "launch_moe_route", ids, n, experts, 1, rows, build.poisoned(experts, np.int64),
        build.poisoned(experts + 1, np.int64), build.poisoned((experts, chunks), np.int32),
        build.poisoned(n, np.int32), build.poisoned(rows, np.int32),
    )  # fmt: skip
    moved = counts["global_load_bytes"] + counts["global_store_bytes"]
    assert moved <= 1.05 * (12 * n + 4 * rows + 24 * experts * chunks + 48 * experts)
