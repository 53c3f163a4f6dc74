"""The pool of ranks itself: results in rank order, errors shown, no hang, reusable after both."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, RankPool


def sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float]:
    t = torch.tensor(float(rank + offset))
    if world_size > 1:
        dist.all_reduce(t)
    return rank, t.item()


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(1))


def die_on_rank_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def hang() -> None:
    time.sleep(60)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_back_in_rank_order(rank_pool: RankPool, n: int) -> None:
    total = float(sum(range(n)) + 10 * n)
    assert rank_pool.run(n, sum_of_ranks, offset=10) == [(rank, total) for rank in range(n)]


def test_a_named_target_is_found(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, "tests.test_pool:sum_of_ranks", offset=0) == [(0, 1.0), (1, 1.0)]


def test_the_failing_ranks_traceback_is_shown_and_the_pool_recovers(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2: (.|\n)*fail_on_rank_one(.|\n)*planted"):
        rank_pool.run(2, fail_on_rank_one)
    assert rank_pool.run(2, sum_of_ranks, offset=0) == [(0, 1.0), (1, 1.0)]


def test_a_dead_rank_is_reported_and_replaced(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code 7"):
        rank_pool.run(2, die_on_rank_one)
    assert rank_pool.run(2, sum_of_ranks, offset=0) == [(0, 1.0), (1, 1.0)]


def test_a_hanging_run_ends_at_its_timeout(rank_pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="no answer in time"):
        rank_pool.run(2, hang, timeout_s=0.5)
    assert time.monotonic() - start < 20
