"""Retention keeps what it must, and only abandoned attempts are swept."""

import os
from pathlib import Path

import pytest

from megatron_lite.checkpoint import find_checkpoint, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import attempt_directory
from megatron_lite.checkpoint.retention import WriterLock, retire_checkpoints, sweep_attempts
from tests.checkpoint.tiny import holds_step, save_tiny

FILES = FileSystem()
HOUR = 3600.0


@pytest.mark.parametrize(
    ("keep_last", "retain_interval", "kept"),
    [
        (None, None, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
        (1, None, [10]),
        (3, None, [10, 9, 8]),
        (None, 4, [10, 8, 4]),
        (2, 5, [10, 9, 5]),
        (0, None, [10]),
    ],
)
def test_retention_keeps_the_newest_and_the_multiples(
    tmp_path: Path, keep_last: int | None, retain_interval: int | None, kept: list[int]
) -> None:
    for step in range(1, 11):
        save_tiny(tmp_path, step, keep_last=keep_last, retain_interval=retain_interval)
    assert published_steps(tmp_path) == kept
    assert len(os.listdir(tmp_path / "attempts")) == len(kept)
    views = {name for name in os.listdir(tmp_path) if name.startswith("iter_")}
    assert views == {f"iter_{step:07d}" for step in kept}
    assert all(holds_step(open_checkpoint(tmp_path, step), step) for step in kept)


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_tiny(tmp_path, step)
    (find_checkpoint(tmp_path, 3).directory / "rank00000.safetensors").unlink()
    (find_checkpoint(tmp_path, 2).directory / "manifest.json").write_text("{}")
    retired = retire_checkpoints(tmp_path, 1, None, FILES)
    assert retired.steps == ()
    assert [item.step for item in retired.damaged] == [3, 2]
    assert find_checkpoint(tmp_path).step == 1


def make_old(directory: Path) -> float:
    """Return a 'now' at which `directory` is two hours old."""
    return directory.stat().st_mtime + 2 * HOUR


def abandon(root: Path, name: str) -> Path:
    """An attempt that somebody left half written."""
    directory = attempt_directory(root, name)
    FILES.ensure_directory(directory)
    (directory / "rank00000.safetensors").write_bytes(b"half")
    return directory


def test_old_attempts_of_dead_writers_are_swept(tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    dead = abandon(tmp_path, "2-0-" + "a" * 16)
    (tmp_path / "attempts" / f"{dead.name}.lock").write_bytes(b"")
    assert sweep_attempts(tmp_path, FILES, make_old(dead)) == [dead.name]
    assert len(os.listdir(tmp_path / "attempts")) == 1
    assert holds_step(open_checkpoint(tmp_path), 1)


def test_young_locked_and_foreign_directories_are_not_swept(tmp_path: Path) -> None:
    published = save_tiny(tmp_path, 1).directory
    young = abandon(tmp_path, "2-0-" + "a" * 16)
    assert sweep_attempts(tmp_path, FILES, young.stat().st_mtime + 1) == []
    lock = WriterLock(tmp_path, young.name, FILES)
    foreign = tmp_path / "attempts" / "notes"
    foreign.mkdir()
    assert sweep_attempts(tmp_path, FILES, make_old(young)) == []
    assert published.exists() and young.exists() and foreign.exists()
    lock.release()
    assert sweep_attempts(tmp_path, FILES, make_old(young)) == [young.name]


def test_what_a_damaged_pointer_may_protect_is_not_swept(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, 1).directory
    (tmp_path / "published" / "1.json").write_bytes(b"?")
    assert sweep_attempts(tmp_path, FILES, make_old(directory)) == []
    assert directory.exists()
