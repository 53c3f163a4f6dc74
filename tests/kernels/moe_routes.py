"""Routing of the MoE kernels, by the launcher and by a stable sort in NumPy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.sim import build

Array = NDArray[Any]
SOURCES = tuple(f"csrc/moe/{name}.cu" for name in ("routing", "pack", "combine"))


@dataclass(frozen=True)
class Route:
    """Expert-major order of the assignments."""

    counts: Array
    offsets: Array
    row_of: Array
    source: Array


def capacity(assignments: int, experts: int, align: int) -> int:
    return assignments + min(experts, assignments) * (align - 1)


def route_reference(ids: Array, experts: int, align: int, rows: int) -> Route:
    """By a stable sort, which the kernels do without."""
    flat = ids.reshape(-1)
    valid = (flat >= 0) & (flat < experts)
    counts = np.bincount(flat[valid], minlength=experts)
    offsets = np.concatenate([[0], np.cumsum(-(-counts // align) * align)])
    row_of, source = np.full(flat.size, -1), np.full(rows, -1)
    order = np.argsort(np.where(valid, flat, experts), kind="stable")[: counts.sum()]
    starts = np.repeat(offsets[:-1] - np.cumsum(counts) + counts, counts)
    row_of[order] = starts + np.arange(order.size)
    source[row_of[order]] = order
    return Route(counts, offsets, row_of, source)


def route(
    kernels: build.Kernels, ids: Array, experts: int, align: int, rows: int | None = None
) -> Route:
    n = ids.size
    rows = capacity(n, experts, align) if rows is None else rows
    got = Route(
        build.poisoned(experts, np.int64),
        build.poisoned(experts + 1, np.int64),
        build.poisoned(n, np.int32),
        build.poisoned(rows, np.int32),
    )
    for array in (got.row_of, got.source):
        array[...] = 123456789  # -1 is a valid answer
    chunks = build.poisoned((experts, -(-n // 512)), np.int32)
    kernels.call("launch_moe_route", build.placed(ids.astype(np.int32)), n, experts, align, rows,
                 got.counts, got.offsets, chunks, got.row_of, got.source)  # fmt: skip
    return got


def check_route(got: Route, ids: Array, experts: int, align: int) -> None:
    want = route_reference(ids, experts, align, got.source.size)
    for name in ("counts", "offsets", "row_of", "source"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


def draw_ids(rng: np.random.Generator, tokens: int, experts: int, k: int, dropped: float) -> Array:
    ids = rng.integers(0, experts, (tokens, k))
    ids[rng.random((tokens, k)) < dropped] = -1
    return ids
