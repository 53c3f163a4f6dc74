"""Fixtures that several packages' tests share."""

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Resident gloo ranks, one pool per pytest process; see `tests/pool.py`."""
    pool = RankPool()
    yield pool
    pool.close()
