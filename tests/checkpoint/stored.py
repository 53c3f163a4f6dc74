"""Saves into stores in memory, and stores that fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.remote import (
    Mirror,
    finalize_remote,
    publish_remote,
    refresh_remote_views,
    upload_attempt,
)
from megatron_lite.checkpoint.stores import Store
from tests.checkpoint.tiny import NONCE, save_cut

memory = pytest.importorskip("fsspec.implementations.memory")


def save_remote(
    store: Store, stage: Path, step: int, size: int = 2, *, replace: bool = False
) -> None:
    """Play all ranks of a save into a store, one after the other."""
    if not (stage / "attempts" / f"{step}-0-{NONCE}").exists():
        save_cut(stage, step, size)
    attempt = f"{step}-0-{NONCE}"
    for rank in range(size):
        upload_attempt(store, stage, attempt, rank)
    mirror = Mirror(store, stage / "finalizer")
    plan = CommitPlan(attempt, step, 0, size, {"iteration": step})
    manifest, sha256 = finalize_remote(mirror, plan, FileSystem())
    publish_remote(store, mirror.root, manifest, sha256, replace=replace)
    refresh_remote_views(store, step, attempt)


class Flaky:
    """A file system of which one operation, or all from one on, fail: undone, or done and lost."""

    OPERATIONS = ("ls", "info", "cat_file", "put_file", "pipe_file", "rm_file", "modified")

    def __init__(
        self, inner: Any, fail_at: int | None = None, lost: bool = False, forever: bool = False
    ):
        self.count = 0
        self._inner, self._fail_at, self._lost, self._forever = inner, fail_at, lost, forever

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._inner, name)
        return self._counted(work) if name in self.OPERATIONS else work

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            index, self.count = self.count, self.count + 1
            hit = self._fail_at is not None and (
                index >= self._fail_at if self._forever else index == self._fail_at
            )
            if hit and not self._lost:
                raise TimeoutError("the store does not answer")
            result = work(*args, **kwargs)
            if hit:
                raise TimeoutError("the answer was lost")
            return result

        return counted


def flaky_store(url: str, **faults: Any) -> tuple[Store, Flaky]:
    fs = Flaky(memory.MemoryFileSystem(), **faults)
    return Store(url, fs, sleep=lambda seconds: None), fs
