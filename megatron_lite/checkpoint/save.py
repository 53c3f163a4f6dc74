"""Saving: snapshot -> write -> publish, the same three steps on every rank.

Every rank writes its own shard and receipt into one attempt directory that rank 0 has
named. When all have said that their files are on the device, rank 0 finalizes and
publishes. A failure anywhere is a failure everywhere: ranks exchange their outcome after
each step, and the attempt is removed.
"""

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.attempt import (
    SaveRequest,
    SnapshotPiece,
    create_attempt,
    discard,
    publish_attempt,
    tidy,
    write_rank,
)
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.places import check_save_place
from megatron_lite.checkpoint.retention import WriterLock
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.checkpoint.tensors import StateEntry, take_snapshot
from megatron_lite.checkpoint.together import every_rank, first_rank
from megatron_lite.mesh.groups import Group

__all__ = [
    "SaveRequest",
    "SaveResult",
    "begin_save",
    "check_writable",
    "publish_attempt",
    "save_checkpoint",
    "save_snapshot",
    "write_rank",
]


@dataclass(frozen=True)
class SaveResult:
    """What a save has written: bytes of all ranks, wall seconds, the attempt directory.

    `notes` are lines for the log: damaged or newer checkpoints that were met.
    """

    bytes: int
    seconds: float
    directory: Path
    notes: tuple[str, ...] = ()


def save_checkpoint(
    root: str | Path,
    step: int,
    entries: Iterable[StateEntry],
    state: Mapping[str, Any],
    group: Group,
    *,
    epoch: int = 0,
    overwrite: bool = False,
    keep_last: int | None = None,
    retain_interval: int | None = None,
    files: FileSystem | None = None,
) -> SaveResult:
    """Write and publish the checkpoint of `step`; all ranks of `group` call it together.

    Args:
        root: the SAVE directory, shared by all ranks; created when missing.
        step: the committed iteration.
        entries: this rank's pieces; nothing may change them until the call returns.
        state: JSON-able, equal on all ranks (rank 0's is written).
        group: the world.
        epoch: membership epoch; receipts of another epoch are refused.
        overwrite: replace a checkpoint of this step (`--overwrite-save`).
        keep_last, retain_interval: retention after publishing, see `retire_checkpoints`.
        files: file operations; tests put a fault in.

    Raises:
        UserError, DamagedError: on all ranks, with the message of the rank that failed.

    Comm: four exchanges of a few hundred bytes per rank over `group`.
    """
    snapshots: list[tuple[SnapshotPiece, ...]] = []
    every_rank(lambda: snapshots.append(take_snapshot(entries)), group, Path(root))
    return save_snapshot(
        root,
        step,
        snapshots[0],
        state,
        group,
        epoch=epoch,
        overwrite=overwrite,
        keep_last=keep_last,
        retain_interval=retain_interval,
        files=files,
    )


def save_snapshot(
    root: str | Path,
    step: int,
    snapshot: tuple[SnapshotPiece, ...],
    state: Mapping[str, Any],
    group: Group,
    *,
    epoch: int = 0,
    overwrite: bool = False,
    keep_last: int | None = None,
    retain_interval: int | None = None,
    files: FileSystem | None = None,
) -> SaveResult:
    """Write and publish what a snapshot has fixed; arguments as of `save_checkpoint`."""
    started = time.monotonic()
    files = files or FileSystem()
    request, lock = begin_save(Path(root), step, epoch, state, overwrite, group, files)
    try:
        every_rank(lambda: write_rank(request, snapshot, files), group, request.root)
        total = first_rank(lambda: publish_attempt(request, files).num_bytes, group, request.root)
    except BaseException:
        if lock is not None:
            discard(request, lock, files)
        raise
    notes = request.notes
    if lock is not None:
        lock.release()
        notes += tidy(request, keep_last, retain_interval, files)
    return SaveResult(total, time.monotonic() - started, request.directory, notes)


def check_writable(root: Path, group: Group, files: FileSystem | None = None) -> None:
    """Make and remove a file in the save directory, on every rank, before the first step.

    A directory that cannot be written would otherwise cost the steps up to the first save.

    Raises:
        UserError, DamagedError: on all ranks, with the message of the rank that failed.

    Comm: one exchange of a few hundred bytes per rank over `group`.
    """
    files = files or FileSystem()

    def probe() -> None:
        check_save_place(root)
        folder = root / "attempts"
        files.ensure_directory(folder)
        path = folder / f".probe-{group.rank}-{secrets.token_hex(8)}"
        files.create(path).close()
        files.remove_file(path)

    every_rank(probe, group, root)


def begin_save(
    root: Path,
    step: int,
    epoch: int,
    state: Mapping[str, Any],
    overwrite: bool,
    group: Group,
    files: FileSystem,
    store: str | None = None,
) -> tuple[SaveRequest, WriterLock | None]:
    """Rank 0 names and creates the attempt; every rank learns its name from it.

    Args:
        root: the SAVE directory; with `store`, a URL, this rank's staging directory.

    Returns:
        The request of this rank; on rank 0 the lock that keeps the attempt.

    Comm: one exchange of a few hundred bytes per rank over `group`.
    """
    locks: list[WriterLock] = []

    def create() -> dict[str, Any]:
        told, lock = create_attempt(root, step, epoch, overwrite, files, store)
        locks.append(lock)
        return told

    told = first_rank(create, group, root)
    plan = CommitPlan(told["attempt"], step, epoch, group.size, plain_json(state))
    request = SaveRequest(root, plan, group.rank, told["replace"], tuple(told["notes"]), store)
    return request, locks[0] if locks else None
