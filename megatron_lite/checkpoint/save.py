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

from megatron_lite.checkpoint.catalog import open_published, published_steps
from megatron_lite.checkpoint.commit import (
    CommitPlan,
    already_published,
    finalize,
    iteration_view,
    publish,
    refresh_views,
)
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.manifest import (
    Entry,
    Manifest,
    Receipt,
    attempt_directory,
    attempt_name,
    encode_receipt,
    pointer_path,
    receipt_file,
    shard_file,
)
from megatron_lite.checkpoint.retention import WriterLock, retire_checkpoints, sweep_attempts
from megatron_lite.checkpoint.shards import write_shard
from megatron_lite.checkpoint.strict_json import plain_json
from megatron_lite.checkpoint.tensors import SnapshotPiece, StateEntry, take_snapshot
from megatron_lite.checkpoint.together import every_rank, first_rank
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import Group


@dataclass(frozen=True)
class SaveResult:
    """What a save has written: bytes of all ranks, wall seconds, the attempt directory.

    `notes` are lines for the log: damaged or newer checkpoints that were met.
    """

    bytes: int
    seconds: float
    directory: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveRequest:
    """What all steps of one save share; equal on every rank but for `rank`."""

    root: Path
    plan: CommitPlan
    rank: int
    replace: bool
    notes: tuple[str, ...]

    @property
    def directory(self) -> Path:
        return attempt_directory(self.root, self.plan.attempt)


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
    request, lock = _begin(Path(root), step, epoch, state, overwrite, group, files)
    try:
        every_rank(lambda: write_rank(request, snapshot, files), group, request.root)
        total = first_rank(lambda: publish_attempt(request, files).num_bytes, group, request.root)
    except BaseException:
        if lock is not None:
            _discard(request, lock, files)
        raise
    notes = request.notes
    if lock is not None:
        lock.release()
        notes += _tidy(request, keep_last, retain_interval, files)
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
        folder = root / "attempts"
        files.ensure_directory(folder)
        path = folder / f".probe-{group.rank}-{secrets.token_hex(8)}"
        files.create(path).close()
        files.remove_file(path)

    every_rank(probe, group, root)


def _begin(
    root: Path,
    step: int,
    epoch: int,
    state: Mapping[str, Any],
    overwrite: bool,
    group: Group,
    files: FileSystem,
) -> tuple[SaveRequest, WriterLock | None]:
    """Rank 0 names and creates the attempt; every rank learns its name from it."""
    locks: list[WriterLock] = []

    def create() -> dict[str, Any]:
        told, lock = _create_attempt(root, step, epoch, overwrite, files)
        locks.append(lock)
        return told

    told = first_rank(create, group, root)
    plan = CommitPlan(told["attempt"], step, epoch, group.size, plain_json(state))
    request = SaveRequest(root, plan, group.rank, told["replace"], tuple(told["notes"]))
    return request, locks[0] if locks else None


def _create_attempt(
    root: Path, step: int, epoch: int, overwrite: bool, files: FileSystem
) -> tuple[dict[str, Any], WriterLock]:
    replace, notes = _may_replace(root, step, overwrite)
    attempt = attempt_name(step, epoch, secrets.token_hex(8))
    files.ensure_directory(root / "attempts")
    lock = WriterLock(root, attempt, files)
    try:
        files.make_directory(attempt_directory(root, attempt))
    except OSError:
        lock.release()
        raise
    return {"attempt": attempt, "replace": replace, "notes": notes}, lock


def _may_replace(root: Path, step: int, overwrite: bool) -> tuple[bool, list[str]]:
    """Decide early about a step that has a pointer; a damaged one may always be replaced."""
    notes = []
    newer = [other for other in published_steps(root) if other > step]
    if newer:
        listed = ", ".join(map(str, reversed(newer)))
        notes.append(f"published steps newer than {step} will be preferred on load: {listed}")
    if not pointer_path(root, step).exists():
        return False, notes
    if not overwrite:
        try:
            open_published(root, step, "full")
        except DamagedError as error:
            notes.append(f"replacing the damaged checkpoint of step {step}: {error}")
        else:
            raise already_published(root, step)
    return True, notes


def write_rank(
    request: SaveRequest, snapshot: tuple[SnapshotPiece, ...], files: FileSystem
) -> None:
    """Write this rank's shard, then its receipt; both are on the device at the end."""
    if not request.directory.is_dir():
        raise UserError(
            f"{request.root}: save directory is not shared: rank {request.rank} does not see "
            f"{request.directory}"
        )
    plan = request.plan
    shard = request.directory / shard_file(request.rank)
    items = [piece.item for piece in snapshot]
    metadata = {"format": "pt", "attempt": plan.attempt, "rank": str(request.rank)}
    try:
        written = write_shard(files, shard, items, metadata)
    except OSError as error:
        needed = sum(item.num_bytes for item in items)
        failure = storage_error(error, shard, needed)
        raise type(failure)(f"{failure}; the attempt is removed, earlier ones are kept") from error
    receipt = Receipt(
        attempt=plan.attempt,
        step=plan.step,
        epoch=plan.epoch,
        rank=request.rank,
        size=written.size,
        header_sha256=written.header_sha256,
        entries=tuple(
            Entry(
                piece.name,
                piece.item.dtype,
                piece.logical_shape,
                piece.offset,
                piece.item.shape,
                written.hashes[piece.item.key],
            )
            for piece in snapshot
        ),
    )
    data = encode_receipt(receipt)
    path = request.directory / receipt_file(request.rank)
    try:
        files.write_file(path, data)
        files.sync_directory(request.directory)
    except OSError as error:
        raise storage_error(error, path, len(data)) from error


def publish_attempt(request: SaveRequest, files: FileSystem) -> Manifest:
    """Finalize and publish; called by one process once all ranks have written."""
    manifest, sha256 = finalize(request.root, request.plan, files)
    publish(request.root, manifest, sha256, files, replace=request.replace)
    return manifest


def _tidy(
    request: SaveRequest, keep_last: int | None, retain_interval: int | None, files: FileSystem
) -> tuple[str, ...]:
    """Views, retention and sweep. The checkpoint is safe already: trouble here is a note."""
    root, plan = request.root, request.plan
    notes = []
    try:
        if not refresh_views(root, plan.step, plan.attempt, files):
            notes.append(f"{iteration_view(root, plan.step)} is not ours and is left as it is")
        retired = retire_checkpoints(root, keep_last, retain_interval, files)
        notes += [f"step {item.step} is damaged: {item.reason}" for item in retired.damaged]
        now = pointer_path(root, plan.step).stat().st_mtime
        notes += [f"abandoned attempt {name} removed" for name in sweep_attempts(root, files, now)]
    except OSError as error:
        notes.append(f"checkpoint of step {plan.step} is published, but: {error}")
    return tuple(notes)


def _discard(request: SaveRequest, lock: WriterLock, files: FileSystem) -> None:
    """Remove a failed attempt; best effort, the next save's sweep finishes what is left."""
    try:
        if not _is_published(request):
            files.remove_tree(request.directory)
        lock.release()
    except OSError:
        return


def _is_published(request: SaveRequest) -> bool:
    """Whether the failure came after the pointer was made, e.g. in syncing its directory."""
    try:
        text = pointer_path(request.root, request.plan.step).read_text(errors="replace")
    except OSError:
        return False
    return request.plan.attempt in text
