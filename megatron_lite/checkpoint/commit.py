"""From written shards to a published checkpoint: what commits a checkpoint is `publish`.

`finalize` and `publish` are functions over files, so that the process that calls them
need not be a training rank. Each can be repeated after a crash. The one moment at which
a step becomes a checkpoint is the link(2) of published/STEP.json; before it the attempt is
invisible to every reader, after it the checkpoint is complete.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.files import REFUSED, FileSystem
from megatron_lite.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    Piece,
    Pointer,
    Receipt,
    ShardRecord,
    TensorRecord,
    attempt_directory,
    encode_manifest,
    encode_pointer,
    pointer_path,
    receipt_file,
    shard_file,
)
from megatron_lite.checkpoint.verify import check_coverage, check_receipt
from megatron_lite.errors import DamagedError, UserError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
VIEW_POINTER_FILE = "attempt.txt"
MANIFEST_TEMPORARY = ".manifest.json.tmp"


@dataclass(frozen=True)
class CommitPlan:
    """What a save attempt is about; known before any rank writes."""

    attempt: str
    step: int
    epoch: int
    world_size: int
    state: Mapping[str, Any]


def finalize(root: Path, plan: CommitPlan, files: FileSystem) -> tuple[Manifest, str]:
    """Verify the set of shards and receipts of an attempt and write its manifest.

    Checks, in O(entries): a receipt and a shard of every rank and no other file; one
    attempt, step and epoch; sizes and header hashes; every logical tensor tiled once.

    Returns:
        The manifest and the sha256 of its file.

    Raises:
        DamagedError: naming the file and what is wrong with it. Nothing was published.
    """
    directory = attempt_directory(root, plan.attempt)
    _check_file_set(directory, plan.world_size)
    receipts: list[Receipt] = []
    shards: list[ShardRecord] = []
    for rank in range(plan.world_size):
        receipt, receipt_sha256 = check_receipt(directory, rank)
        found = (receipt.attempt, receipt.step, receipt.epoch)
        if found != (plan.attempt, plan.step, plan.epoch):
            raise DamagedError(
                f"{directory / receipt_file(rank)}: belongs to attempt, step, epoch {found}, "
                f"not to {(plan.attempt, plan.step, plan.epoch)}"
            )
        receipts.append(receipt)
        shards.append(ShardRecord(receipt.size, receipt.header_sha256, receipt_sha256))
    manifest = Manifest(
        attempt=plan.attempt,
        step=plan.step,
        epoch=plan.epoch,
        state=plan.state,
        shards=tuple(shards),
        tensors=_gather_tensors(receipts, directory),
    )
    check_coverage(manifest, str(directory))
    data = encode_manifest(manifest)
    temporary = directory / MANIFEST_TEMPORARY
    files.remove_file(temporary)
    files.write_file(temporary, data)
    files.rename(temporary, directory / MANIFEST_FILE)
    files.sync_directory(directory)
    files.sync_directory(directory.parent)
    return manifest, hashlib.sha256(data).hexdigest()


def _check_file_set(directory: Path, world_size: int) -> None:
    ranks = range(world_size)
    wanted = {shard_file(rank) for rank in ranks} | {receipt_file(rank) for rank in ranks}
    found = {child.name for child in directory.iterdir()}
    missing = sorted(wanted - found)
    foreign = sorted(found - wanted - {MANIFEST_FILE, MANIFEST_TEMPORARY})
    if missing:
        raise DamagedError(f"{directory / missing[0]}: file is missing ({len(missing)} in all)")
    if foreign:
        raise DamagedError(f"{directory / foreign[0]}: foreign file ({len(foreign)} in all)")


def _gather_tensors(receipts: list[Receipt], directory: Path) -> dict[str, TensorRecord]:
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for receipt in receipts:
        for entry in receipt.entries:
            kind = (entry.dtype, entry.logical_shape)
            if kinds.setdefault(entry.name, kind) != kind:
                raise DamagedError(
                    f"{directory / receipt_file(receipt.rank)}: {entry.name} is {kind}, "
                    f"other ranks say {kinds[entry.name]}"
                )
            pieces.setdefault(entry.name, []).append(
                Piece(receipt.rank, entry.offset, entry.shape, entry.sha256)
            )
    return {name: TensorRecord(*kinds[name], tuple(pieces[name])) for name in sorted(pieces)}


def publish(
    root: Path,
    manifest: Manifest,
    manifest_sha256: str,
    files: FileSystem,
    *,
    replace: bool,
    alone: bool = False,
) -> Path:
    """Make a finalized attempt the checkpoint of its step, atomically and durably.

    May be repeated after a crash: a pointer with the same content is the same publication.

    Args:
        replace: an existing pointer of this step is replaced by rename(2), which leaves
            the old or the new checkpoint at every instant; otherwise it is an error.
        alone: nobody else publishes here now, so an empty pointer was left by a crash
            (where hard links are refused) and is completed.

    Returns:
        The pointer file.

    Raises:
        UserError: the step is published already (perhaps by another job, just now).
    """
    target = pointer_path(root, manifest.step)
    data = encode_pointer(Pointer(manifest.step, manifest.attempt, manifest_sha256))
    temporary = target.with_name(f".{manifest.attempt}.tmp")
    files.ensure_directory(target.parent)
    files.remove_file(temporary)
    files.write_file(temporary, data)
    if replace:
        files.rename(temporary, target)
    else:
        try:
            _create_exclusively(temporary, target, data, files)
        except FileExistsError:
            found = target.read_bytes()
            if alone and not found:
                files.rename(temporary, target)
            elif found != data:  # else made by ourselves, before a crash
                raise already_published(root, manifest.step) from None
        finally:
            files.remove_file(temporary)
    files.sync_directory(target.parent)
    return target


def _create_exclusively(temporary: Path, target: Path, data: bytes, files: FileSystem) -> None:
    try:
        files.link(temporary, target)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        # Without hard links a crash here may leave an incomplete pointer: it does not
        # verify, so readers pass over it and the next save of the step replaces it.
        files.write_file(target, data)


def already_published(root: Path | str, step: int) -> UserError:
    """Return the error for a step that has a checkpoint already."""
    return UserError(
        f"{root}: step {step} is already published and is not replaced; "
        "pass --overwrite-save to replace it, or another --save directory"
    )


def refresh_views(root: Path, step: int, attempt: str, files: FileSystem) -> bool:
    """Point Megatron's iter_XXXXXXX and tracker file at a published attempt.

    Views are for people and scripts; no reader of ours trusts them.

    Returns:
        False if something else has the view's name; it is left alone.
    """
    view = iteration_view(root, step)
    target = f"attempts/{attempt}"
    temporary = root / f".{view.name}.{attempt}.tmp"
    files.remove_file(temporary)
    if view.is_symlink() or not view.exists():
        try:
            files.symlink(target, temporary)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            files.ensure_directory(view)
        else:
            files.rename(temporary, view)
    ours = view.is_symlink() or not _has_foreign_content(view)
    if ours and not view.is_symlink():
        _replace_text(view / VIEW_POINTER_FILE, target, attempt, files)
    _replace_text(root / TRACKER_FILE, str(step), attempt, files)
    files.sync_directory(root)
    return ours


def _has_foreign_content(view: Path) -> bool:
    return not view.is_dir() or any(VIEW_POINTER_FILE not in child.name for child in view.iterdir())


def remove_view(root: Path, step: int, files: FileSystem) -> None:
    """Remove the iter_XXXXXXX view of a step, whatever it is made of."""
    view = iteration_view(root, step)
    if view.is_symlink():
        files.remove_file(view)
    elif view.is_dir() and (view / VIEW_POINTER_FILE).is_file():
        files.remove_tree(view)


def iteration_view(root: Path, step: int) -> Path:
    """Return Megatron's directory name of a step."""
    return root / f"iter_{step:07d}"


def _replace_text(path: Path, text: str, tag: str, files: FileSystem) -> None:
    temporary = path.with_name(f".{path.name}.{tag}.tmp")
    files.remove_file(temporary)
    files.write_file(temporary, f"{text}\n".encode())
    files.rename(temporary, path)
