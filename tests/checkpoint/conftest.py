"""Fixtures of the checkpoint tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def fast_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the device: whether files are synced is seen by the observed operations."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
