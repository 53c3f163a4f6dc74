"""What may be deleted: retired checkpoints and attempts whose writer is gone.

Never deleted: the newest checkpoints that verify (at least one), those of the retention
interval, damaged ones (evidence for people), and attempts somebody still writes. Ages are
measured with the file system's own clock, not with this host's.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.checkpoint.catalog import (
    PassedOver,
    open_published,
    published_steps,
    read_pointer,
    suspect_path,
)
from megatron_lite.checkpoint.commit import remove_view
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import ATTEMPT_PATTERN, attempt_directory, pointer_path
from megatron_lite.errors import DamagedError

ABANDONED_AFTER_SECONDS = 3600.0


@dataclass(frozen=True)
class Retired:
    """What retention has done."""

    steps: tuple[int, ...]
    damaged: tuple[PassedOver, ...]


class WriterLock:
    """Held while an attempt is being written; the kernel releases it when its holders die.

    Shared: the rank that began the attempt and the finalizer that ends it hold it together,
    so that the attempt is kept when one of them dies.
    """

    def __init__(self, root: Path, attempt: str, files: FileSystem):
        self._path = lock_path(root, attempt)
        self._files = files
        self._descriptor: int | None = files.open_lock(self._path)
        _try_lock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """The attempt is published or removed: nothing is left to protect."""
        self._files.remove_file(self._path)
        self.let_go()

    def let_go(self) -> None:
        """Stop holding; others may still."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_path(root: Path, attempt: str) -> Path:
    """Return the lock file of an attempt; beside it, so that the attempt has no foreign file."""
    return root / "attempts" / f"{attempt}.lock"


def retire_checkpoints(
    root: Path, keep_last: int | None, retain_interval: int | None, files: FileSystem
) -> Retired:
    """Delete older checkpoints by Megatron's and our retention flags.

    Args:
        keep_last: number of newest verified checkpoints to keep; None is 1 when
            `retain_interval` is given, else everything is kept.
        retain_interval: multiples of this step count are kept for ever.
    """
    if keep_last is None and retain_interval is None:
        return Retired((), ())
    wanted = max(1, keep_last or 1)
    kept = 0
    damaged: list[PassedOver] = []
    retired: list[int] = []
    for step in published_steps(root):
        if kept >= wanted and retain_interval is not None and step % retain_interval == 0:
            continue
        try:
            # Its bytes were hashed while they were written: reading them all again at
            # each save would cost as much as the save.
            found = open_published(root, step, "structure")
            if suspect_path(found.directory).exists():
                raise DamagedError(f"{found.directory}: a load has found it damaged")
        except DamagedError as error:
            damaged.append(PassedOver(step, str(error)))
            continue
        if kept < wanted:
            kept += 1
        else:
            retired.append(step)
    for step in sorted(retired):
        attempt = read_pointer(root, step).attempt
        # Pointer first: a crash in between leaves an unpublished attempt, never half of
        # a checkpoint.
        files.remove_file(pointer_path(root, step))
        files.sync_directory(root / "published")
        remove_view(root, step, files)
        files.remove_tree(attempt_directory(root, attempt))
    return Retired(tuple(retired), tuple(damaged))


def sweep_attempts(
    root: Path,
    files: FileSystem,
    now: float,
    older_than: float = ABANDONED_AFTER_SECONDS,
    fenced_below: int = 0,
) -> list[str]:
    """Delete attempts that no pointer names, that are old, and whose writer is gone.

    Args:
        now: the file system's present time, e.g. the mtime of a file just written.
        older_than: seconds since the last change of anything in the attempt.
        fenced_below: attempts of earlier runs (epochs 1 up to this one) can never be
            published any more, so they need not be old.

    Returns:
        The names of the attempts removed.
    """
    referenced = set()
    unreadable = set()  # steps whose pointer is damaged: any of their attempts may be meant
    for step in published_steps(root):
        try:
            referenced.add(read_pointer(root, step).attempt)
        except DamagedError:
            unreadable.add(step)
    swept: list[str] = []
    for child in sorted((root / "attempts").iterdir()):
        name = child.name.removesuffix(".lock")
        match = ATTEMPT_PATTERN.fullmatch(name)
        if not match or name in referenced or name in swept or int(match[1]) in unreadable:
            continue
        lock = lock_path(root, name)
        is_fenced = 0 < int(match[2]) < fenced_below
        last_change = _last_change(attempt_directory(root, name), lock)
        if not is_fenced and now - last_change <= older_than:
            continue
        if _is_held(lock):
            continue
        files.remove_tree(attempt_directory(root, name))
        files.remove_file(lock)
        swept.append(name)
    return swept


def abandoned_attempts(root: Path) -> list[tuple[int, str]]:
    """Return step and name of the attempts that no pointer names, oldest step first."""
    referenced = set()
    for step in published_steps(root):
        try:
            referenced.add(read_pointer(root, step).attempt)
        except DamagedError:
            continue
    found = []
    for child in (root / "attempts").iterdir():
        match = ATTEMPT_PATTERN.fullmatch(child.name)
        if match and child.name not in referenced:
            found.append((int(match[1]), child.name))
    return sorted(found)


def _last_change(*paths: Path) -> float:
    latest = 0.0
    for path in paths:
        if path.is_dir():
            latest = max(latest, _last_change(*path.iterdir()))
        if path.exists():
            latest = max(latest, path.lstat().st_mtime)
    return latest


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks: age alone decides
        return True
    return True
