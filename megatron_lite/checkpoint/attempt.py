"""One attempt to save a step: how it begins, what each rank writes into it, how it ends.

Ranks, their background writers and the finalizer do their parts with these functions;
none needs torch. A rank's receipt appears complete, by rename, after its shard is on the
device; a rank that fails leaves a marker in its place. Who waits for the ranks needs only
to look at the directory.
"""

import re
import secrets
from collections.abc import Iterable
from contextlib import nullcontext, suppress
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
from megatron_lite.checkpoint.fence import newest_epoch, publishing
from megatron_lite.checkpoint.files import FileSystem, read_file, storage_error
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
from megatron_lite.checkpoint.remote import Mirror, open_mirror
from megatron_lite.checkpoint.remote_save import (
    discard_from_store,
    is_published_in_store,
    publish_to_store,
    tidy_store,
    upload_rank,
)
from megatron_lite.checkpoint.retention import WriterLock, retire_checkpoints, sweep_attempts
from megatron_lite.checkpoint.shards import ShardItem, write_shard
from megatron_lite.checkpoint.strict_json import encode_json, expect_object, expect_text, parse_json
from megatron_lite.errors import DamagedError, UserError

MAX_MARKER_BYTES = 2**16
_WORDS = re.compile(r"(?s).{0,16000}")


@dataclass(frozen=True)
class SnapshotPiece:
    """A piece that this rank writes, its logical place, and where its bytes come from."""

    name: str
    logical_shape: tuple[int, ...]
    offset: tuple[int, ...]
    item: ShardItem


@dataclass(frozen=True)
class SaveRequest:
    """What all steps of one save share; equal on every rank but for `rank`.

    With `store`, a URL, `root` is this rank's staging directory.
    """

    root: Path
    plan: CommitPlan
    rank: int
    replace: bool
    notes: tuple[str, ...]
    store: str | None = None

    @property
    def directory(self) -> Path:
        return attempt_directory(self.root, self.plan.attempt)


def create_attempt(
    root: Path,
    step: int,
    epoch: int,
    overwrite: bool,
    files: FileSystem,
    store: str | None = None,
) -> tuple[dict[str, Any], WriterLock]:
    """Name and create an attempt, on rank 0.

    The directory becomes durable with the manifest, not here: training waits for this.

    Returns:
        What the other ranks need to know, as JSON; and the lock that keeps the attempt.
    """
    if store is None:
        replace, notes = _may_replace(root, step, overwrite)
    else:
        mirror = open_mirror(store, root)
        mirror.pointers()
        replace, notes = _may_replace(mirror.root, step, overwrite, mirror)
    attempt = attempt_name(step, epoch, secrets.token_hex(8))
    files.ensure_directory(root / "attempts")
    lock = WriterLock(root, attempt, files)
    try:
        files.make_directory(attempt_directory(root, attempt), durable=False)
    except OSError:
        lock.release()
        raise
    return {"attempt": attempt, "replace": replace, "notes": notes}, lock


def _may_replace(
    root: Path, step: int, overwrite: bool, mirror: Mirror | None = None
) -> tuple[bool, list[str]]:
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
            open_published(root, step, "full", mirror)
        except DamagedError as error:
            notes.append(f"replacing the damaged checkpoint of step {step}: {error}")
        else:
            raise already_published(root if mirror is None else mirror.store.url, step)
    return True, notes


def write_rank(request: SaveRequest, pieces: Iterable[SnapshotPiece], files: FileSystem) -> int:
    """Write this rank's shard, then its receipt; both are on the device at the end.

    Returns:
        Bytes of the shard.
    """
    if request.store is not None:
        files.ensure_directory(request.directory)
    elif not request.directory.is_dir():
        raise UserError(
            f"{request.root}: save directory is not shared: rank {request.rank} does not see "
            f"{request.directory}"
        )
    plan, pieces = request.plan, tuple(pieces)
    shard = request.directory / shard_file(request.rank)
    items = [piece.item for piece in pieces]
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
            for piece in pieces
        ),
    )
    data = encode_receipt(receipt)
    _write_by_rename(request.directory / receipt_file(request.rank), data, files)
    if request.store is not None:
        upload_rank(request.store, request.root, plan.attempt, request.rank)
    return written.size


def _write_by_rename(path: Path, data: bytes, files: FileSystem) -> None:
    """Write a file that whoever looks sees complete or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        files.write_file(temporary, data)
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except OSError as error:
        raise storage_error(error, path, len(data)) from error


def failure_file(rank: int) -> str:
    """Return the name of the marker by which a rank says that it has no share to give."""
    return f"rank{rank:05d}.failed.json"


def mark_failed(
    directory: Path, rank: int, failure: BaseException, files: FileSystem
) -> dict[str, str]:
    """Leave a failed rank's marker in the attempt, as far as the disk lets us.

    Returns:
        The failure as JSON: kind of the error, message.
    """
    told = {"kind": type(failure).__name__, "message": str(failure)[:8000]}
    with suppress(OSError, UserError):  # the rank tells its peers too, over another way
        _write_by_rename(directory / failure_file(rank), encode_json(told), files)
    return told


def read_failure(directory: Path, rank: int) -> dict[str, str]:
    """Read a failed rank's marker."""
    path = directory / failure_file(rank)
    try:
        value = parse_json(read_file(path, MAX_MARKER_BYTES), str(path), MAX_MARKER_BYTES)
        found = expect_object(value, ("kind", "message"), str(path))
        kind = expect_text(found["kind"], _WORDS, str(path))
        return {"kind": kind, "message": expect_text(found["message"], _WORDS, str(path))}
    except DamagedError as error:
        return {"kind": "DamagedError", "message": str(error)}


def publish_attempt(request: SaveRequest, files: FileSystem, *, fenced: bool = False) -> Manifest:
    """Finalize and publish, once all ranks have written; may be repeated after a crash.

    Args:
        fenced: a run does it, under its membership epoch: refused when a later run has
            taken over the directory.
    """
    root, plan = request.root, request.plan
    if request.store is not None:
        replace = request.replace
        return publish_to_store(request.store, root, plan, files, replace=replace, fenced=fenced)
    manifest, sha256 = finalize(root, plan, files)
    with publishing(root, plan.epoch, plan.step, files) if fenced else nullcontext():
        publish(root, manifest, sha256, files, replace=request.replace, alone=fenced)
    return manifest


def tidy(
    request: SaveRequest,
    keep_last: int | None,
    retain_interval: int | None,
    files: FileSystem,
    *,
    fenced: bool = False,
) -> tuple[str, ...]:
    """Views, retention and sweep. The checkpoint is safe already: trouble here is a note."""
    root, plan = request.root, request.plan
    if request.store is not None:
        return tidy_store(request.store, root, plan, keep_last, retain_interval)
    notes = []
    try:
        if fenced and newest_epoch(root) > plan.epoch:
            return (f"step {plan.step} is published; a later run keeps {root} tidy now",)
        if not refresh_views(root, plan.step, plan.attempt, files):
            notes.append(f"{iteration_view(root, plan.step)} is not ours and is left as it is")
        retired = retire_checkpoints(root, keep_last, retain_interval, files)
        notes += [f"step {item.step} is damaged: {item.reason}" for item in retired.damaged]
        now = pointer_path(root, plan.step).stat().st_mtime
        # A run writes one attempt at a time: its own other ones are as dead as older runs'.
        swept = sweep_attempts(root, files, now, fenced_below=plan.epoch + 1 if fenced else 0)
        notes += [f"abandoned attempt {name} removed" for name in swept]
    except (OSError, UserError) as error:
        notes.append(f"checkpoint of step {plan.step} is published, but: {error}")
    return tuple(notes)


def discard(request: SaveRequest, lock: WriterLock, files: FileSystem) -> None:
    """Remove a failed attempt; best effort, the next save's sweep finishes what is left."""
    with suppress(OSError, UserError):
        if not is_published(request):
            if request.store is not None:
                discard_from_store(request.store, request.root, request.plan)
            files.remove_tree(request.directory)
        lock.release()
    lock.let_go()


def is_published(request: SaveRequest) -> bool:
    """Whether a failure came after the pointer was made, e.g. in syncing its directory."""
    if request.store is not None:
        return is_published_in_store(request.store, request.plan)
    try:
        text = pointer_path(request.root, request.plan.step).read_text(errors="replace")
    except OSError:
        return False
    return request.plan.attempt in text
