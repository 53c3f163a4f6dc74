"""Fixtures that several packages' tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import RankPool

# A deadline per example times the machine, not the claim.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Resident gloo ranks, one pool per pytest process; see `tests/pool.py`."""
    pool = RankPool()
    yield pool
    pool.close()
