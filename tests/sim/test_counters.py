"""Counters equal what the kernels do by construction: facts about speed without a GPU."""

import ml_dtypes
import numpy as np
import pytest

from tests.sim.build import Kernels, placed, poisoned


def matmul_counts(kernels: Kernels, m: int, n: int, k: int, padded: int) -> dict[str, int]:
    a, b = np.ones((m, k), ml_dtypes.bfloat16), np.ones((k, n), ml_dtypes.bfloat16)
    return kernels.count("launch_matmul", a, b, poisoned((m, n), np.float32), m, n, k, padded)


def test_matmul_counts_equal_the_closed_forms(kernels: Kernels) -> None:
    m, n, k = 32, 48, 64
    counts = matmul_counts(kernels, m, n, k, padded=1)
    tiles, steps = m // 16 * (n // 16), k // 16
    assert counts["launches"] == 1
    assert counts["blocks"] == tiles
    assert counts["threads"] == 32 * tiles
    assert counts["mma"] == m // 16 * (n // 8) * steps
    assert counts["ldmatrix"] == 8 * tiles * steps
    assert counts["cp_async"] == 64 * tiles * steps
    assert counts["cp_async_bytes"] == counts["global_load_bytes"] == 2 * 512 * tiles * steps
    assert counts["global_store_bytes"] == 4 * m * n
    assert counts["global_store_sectors"] == 4 * m * n // 32
    assert counts["barriers"] == 0


def test_padding_removes_the_bank_conflicts_of_ldmatrix(kernels: Kernels) -> None:
    assert matmul_counts(kernels, 16, 16, 32, padded=1)["ldmatrix_replays"] == 0
    # Rows of 32 bytes: rows 0 and 4 of eight share their banks, so each matrix takes two passes.
    counts = matmul_counts(kernels, 16, 16, 32, padded=0)
    assert counts["ldmatrix_replays"] == counts["ldmatrix"] == 16


@pytest.mark.parametrize(
    ("stride", "width", "replays"),
    [(1, 4, 0), (2, 4, 1), (3, 4, 0), (8, 4, 7), (32, 4, 31), (33, 4, 0), (1, 16, 0), (2, 16, 4)],
)
def test_strided_shared_accesses_conflict_as_banks_say(
    kernels: Kernels, stride: int, width: int, replays: int
) -> None:
    counts = kernels.count("launch_strided_shared", poisoned(32, np.float32), stride, width)
    assert counts["shared_accesses"] == 2  # a store and a load
    assert counts["shared_replays"] == 2 * replays


def test_transposing_through_a_padded_tile_has_no_conflicts(kernels: Kernels) -> None:
    values = placed(np.zeros((32, 32), np.float32))
    counts = kernels.count("launch_transpose_and_reverse", values, poisoned((32, 32), np.float32))
    assert counts["shared_accesses"] == 4 * 32
    assert counts["shared_replays"] == 0
    assert counts["barriers"] == 2
    assert counts["global_load_sectors"] == counts["global_store_sectors"] == 32 * 4


def test_bytes_are_those_of_the_accessors(kernels: Kernels) -> None:
    values = placed(np.zeros(1000, np.float32))
    counts = kernels.count("launch_double_vectors", values, poisoned(1000, np.float32), 250)
    assert counts["global_load_bytes"] == counts["global_store_bytes"] == 4000
    assert counts["global_load_sectors"] == counts["global_store_sectors"] == 125


def test_collectives_are_counted_per_group_of_lanes(kernels: Kernels) -> None:
    counts = kernels.count("launch_vote", np.zeros(32, np.int32), poisoned((10, 32), np.int32))
    assert counts["collectives"] == 2 * 9  # nine meetings of each half
