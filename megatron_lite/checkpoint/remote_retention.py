"""What may be deleted in an object store: the rules of `retention.py`, on the store's objects.

The local rules run over a mirror through file operations that remove the objects, too:
the pointer first, so that a crash leaves an unpublished attempt and never half of a
checkpoint. A store has no locks: abandoned attempts are told by age alone, and by a long one.
Torch-free.
"""

from __future__ import annotations

from pathlib import Path

from megatron_lite.checkpoint.catalog import published_steps, read_pointer
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import ATTEMPT_PATTERN, pointer_path
from megatron_lite.checkpoint.remote import Mirror
from megatron_lite.checkpoint.retention import Retired, retire_checkpoints
from megatron_lite.checkpoint.stores import Store
from megatron_lite.errors import DamagedError

# The longest that an upload of one shard may take: nothing in the store changes meanwhile.
ABANDONED_AFTER_SECONDS = 24 * 3600.0


class MirroredFiles(FileSystem):
    """File operations of retention on a mirror and the store behind it."""

    def __init__(self, mirror: Mirror):
        super().__init__()
        self._mirror = mirror

    def remove_file(self, path: Path) -> None:
        """Remove the object, then its copy."""
        self._mirror.store.remove(path.relative_to(self._mirror.root).as_posix())
        super().remove_file(path)

    def remove_tree(self, path: Path) -> None:
        """Remove all objects of a folder, then their copies."""
        remove_folder(self._mirror.store, path.relative_to(self._mirror.root).as_posix())
        FileSystem().remove_tree(path)


def retire_remote(mirror: Mirror, keep_last: int | None, retain_interval: int | None) -> Retired:
    """Delete older checkpoints of a store; arguments and rules of `retire_checkpoints`."""
    if keep_last is None and retain_interval is None:
        return Retired((), ())
    mirror.pointers()
    for step in published_steps(mirror.root):
        try:
            mirror.checkpoint(read_pointer(mirror.root, step).attempt)
        except DamagedError:
            continue  # told by the rules
    retired = retire_checkpoints(mirror.root, keep_last, retain_interval, MirroredFiles(mirror))
    for step in retired.steps:
        remove_folder(mirror.store, f"iter_{step:07d}")
    return retired


def sweep_remote(
    mirror: Mirror, published_step: int, older_than: float = ABANDONED_AFTER_SECONDS
) -> list[str]:
    """Delete attempts that no pointer names and that nobody has written to for long.

    Args:
        published_step: a step published just now: its pointer's age is the store's clock.

    Returns:
        The names of the attempts removed.
    """
    store = mirror.store
    mirror.pointers()
    now = store.modified(pointer_path(Path(), published_step).as_posix())
    if now is None:
        return []
    referenced, unreadable = set(), set()
    for step in published_steps(mirror.root):
        try:
            referenced.add(read_pointer(mirror.root, step).attempt)
        except DamagedError:
            unreadable.add(step)  # any attempt of this step may be meant
    swept = []
    for attempt in store.names("attempts"):
        match = ATTEMPT_PATTERN.fullmatch(attempt)
        if not match or attempt in referenced or int(match[1]) in unreadable:
            continue
        folder = f"attempts/{attempt}"
        ages = [store.modified(f"{folder}/{name}") for name in store.names(folder)]
        if ages and all(age is None or now - age > older_than for age in ages):
            remove_folder(store, folder)
            swept.append(attempt)
    return swept


def remove_folder(store: Store, folder: str) -> None:
    """Remove the objects of a flat folder."""
    for name in store.names(folder):
        store.remove(f"{folder}/{name}")
