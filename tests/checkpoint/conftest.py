"""Fixtures of the checkpoint tests."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lite.checkpoint.stores import open_store


@pytest.fixture(autouse=True)
def fast_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the device: whether files are synced is seen by the observed operations."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def url() -> Iterator[str]:
    """A place in memory that no other test uses."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    place = f"memory://{uuid.uuid4().hex}/run"
    yield place
    if memory.MemoryFileSystem().exists(place.rpartition("/")[0]):
        memory.MemoryFileSystem().rm(place.rpartition("/")[0], recursive=True)


@pytest.fixture
def filled(url: str, tmp_path: Path) -> str:
    """Steps 1 and 2, each saved by two ranks."""
    from tests.checkpoint.stored import save_remote

    for step in (1, 2):
        save_remote(open_store(url), tmp_path / "stage", step)
    return url
