"""Killed at any file operation, the newest loadable checkpoint is the old one or the new one.

The disk dies just before the k-th file operation of a save: that operation and all later
ones (clean-up too) fail, so that the disk is left as kill -9 would leave it. In the
stricter mode what was not synced goes as well: names whose directory, and bytes whose
file, had no fsync yet. Some points are repeated with a real process that ends there.
"""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_lite.checkpoint import find_checkpoint, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.files import FileSystem
from tests.checkpoint.tiny import holds_step, save_tiny

KILLED = 77
FINISHED = 0


class Killed(BaseException):
    """The process is gone; nothing may catch this."""


class Disk:
    """Counts file operations, remembers what is not durable, and dies at a given one."""

    def __init__(
        self, die_at: int | None = None, *, lose_unsynced: bool = False, leave: bool = False
    ):
        self.count = 0
        self._die_at = die_at
        self._leave = leave
        self._lose_unsynced = lose_unsynced
        self._new_names: dict[Path, None] = {}
        self._dirty: dict[Path, None] = {}

    def observe(self, operation: str, path: Path) -> None:
        """Called before each operation."""
        if self.count == self._die_at:
            if self._leave:
                os._exit(KILLED)
            if self._lose_unsynced:
                self._drop_unsynced()
                self._lose_unsynced = False
            raise Killed
        self.count += 1
        if operation in ("create", "link", "rename", "symlink", "mkdir"):
            self._new_names[path] = None
        elif operation == "write":
            self._dirty[path] = None
        elif operation == "sync":
            self._dirty.pop(path, None)
        elif operation == "sync_directory":
            self._new_names = {p: None for p in self._new_names if p.parent != path}

    def _drop_unsynced(self) -> None:
        for path in self._dirty:
            if path.exists():
                os.truncate(path, 0)
        for path in reversed(self._new_names):
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)


class LinklessFileSystem(FileSystem):
    """A file system that refuses hard and symbolic links."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    def symlink(self, text: str, path: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = FINISHED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_operations(root: Path, kind: type[FileSystem], step: int, **options: object) -> int:
    """Return how many file operations this save takes."""
    disk = Disk()
    save_tiny(root, step, files=kind(disk.observe), **options)
    return disk.count


@pytest.mark.parametrize("lose_unsynced", [False, True], ids=["killed", "power-lost"])
@pytest.mark.parametrize("kind", [FileSystem, LinklessFileSystem], ids=["links", "no-links"])
def test_every_crash_point_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, kind: type[FileSystem], lose_unsynced: bool
) -> None:
    save_tiny(tmp_path / "count", 1, files=kind())
    total = count_operations(tmp_path / "count", kind, 2, keep_last=1)
    assert total > 30
    outcomes = []
    for point in range(total):
        root = tmp_path / f"at{point}"
        save_tiny(root, 1, files=kind())
        disk = Disk(point, lose_unsynced=lose_unsynced)
        files = kind(disk.observe)
        with pytest.raises(Killed):
            save_tiny(root, 2, files=files, keep_last=1)
        step = find_checkpoint(root).step
        assert holds_step(open_checkpoint(root), step)
        outcomes.append(step)
        if kind is FileSystem:  # without links a pointer may be half written; it is passed over
            assert all(holds_step(open_checkpoint(root, s), s) for s in published_steps(root))
        # The run resumes by itself: the step that was lost can be saved again.
        if step == 1:
            save_tiny(root, 2, files=kind())
        assert holds_step(open_checkpoint(root), 2)
    assert outcomes == sorted(outcomes), "once committed, always committed"
    assert set(outcomes) == {1, 2}


def test_every_crash_point_of_the_first_save_leaves_nothing_or_the_checkpoint(
    tmp_path: Path,
) -> None:
    total = count_operations(tmp_path / "count", FileSystem, 1)
    for point in range(total):
        root = tmp_path / f"at{point}"
        files = FileSystem(Disk(point, lose_unsynced=True).observe)
        with pytest.raises(Killed):
            save_tiny(root, 1, files=files)
        if published_steps(root):
            assert holds_step(open_checkpoint(root), 1)
        else:
            save_tiny(root, 1)


def test_every_crash_point_of_replacing_a_step_leaves_it_loadable(tmp_path: Path) -> None:
    save_tiny(tmp_path / "count", 1)
    total = count_operations(tmp_path / "count", FileSystem, 1, overwrite=True)
    attempts = set()
    for point in range(total):
        root = tmp_path / f"at{point}"
        old = save_tiny(root, 1).directory
        files = FileSystem(Disk(point).observe)
        with pytest.raises(Killed):
            save_tiny(root, 1, files=files, overwrite=True)
        assert holds_step(open_checkpoint(root), 1)
        attempts.add(find_checkpoint(root).directory == old)
    assert attempts == {True, False}


def test_a_process_that_ends_at_a_crash_point_leaves_the_same(tmp_path: Path) -> None:
    save_tiny(tmp_path / "count", 1)
    total = count_operations(tmp_path / "count", FileSystem, 2)
    outcomes = []
    for point in range(0, total, 6):
        root = tmp_path / f"at{point}"
        save_tiny(root, 1)
        files = FileSystem(Disk(point, leave=True).observe)
        assert in_child(partial(save_tiny, root, 2, files=files)) == KILLED
        assert holds_step(open_checkpoint(root), find_checkpoint(root).step)
        outcomes.append(find_checkpoint(root).step)
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}
