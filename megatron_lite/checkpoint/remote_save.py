"""Saving to an object store: what `attempt.py`, `finalizer.py` and the run's start do there.

The same steps as on a disk, on objects: ranks stage locally and upload, the finalizer looks
for receipts in the store, verifies what lies there, and publishes by conditional put under
the run's epoch. A store has no locks: a second run is not refused but takes over, and the
first one's next publishing is refused. Torch-free.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import Manifest, attempt_directory, pointer_path
from megatron_lite.checkpoint.remote import (
    Mirror,
    finalize_remote,
    open_mirror,
    publish_remote,
    refresh_remote_views,
    upload_attempt,
)
from megatron_lite.checkpoint.remote_retention import remove_folder, retire_remote, sweep_remote
from megatron_lite.checkpoint.stores import Store, check_exclusive, open_store
from megatron_lite.checkpoint.strict_json import encode_json
from megatron_lite.errors import UserError

EPOCHS = "epochs"


@dataclass(frozen=True)
class RemoteMembership:
    """A run's right to publish in a store, until a later run takes a higher epoch."""

    epoch: int

    def leave(self) -> None:
        """Nothing is held."""


def take_remote_membership(url: str) -> RemoteMembership:
    """Become the run of this place: the highest epoch plus one, by create-if-absent."""
    store = open_store(url)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    name = f"{socket.gethostname()}, process {os.getpid()}"
    data = encode_json({"run": name, "time": now, "nonce": secrets.token_hex(8)})
    while True:
        epoch = newest_remote_epoch(store) + 1
        try:
            store.create(f"{EPOCHS}/{epoch}.json", data)
        except FileExistsError:
            continue
        return RemoteMembership(epoch)


def newest_remote_epoch(store: Store) -> int:
    """Return the highest epoch ever taken in a store, 0 if none was."""
    stems = (name.removesuffix(".json") for name in store.names(EPOCHS))
    return max((int(stem) for stem in stems if stem.isdecimal() and len(stem) < 10), default=0)


def check_place(url: str, allow_unsafe: bool, exclusive: bool) -> None:
    """Refuse a store that this rank cannot write, or (once) that cannot publish safely."""
    store, nonce = open_store(url), secrets.token_hex(8)
    if exclusive:
        check_exclusive(store, nonce, allow_unsafe)
        return
    name = f"attempts/.probe-{nonce}"
    store.replace(name, b"")
    store.remove(name)


def remote_steps(url: str) -> list[int]:
    """Return the published steps of a store, newest first."""
    mirror = open_mirror(url)
    mirror.pointers()
    return published_steps(mirror.root)


def upload_rank(url: str, root: Path, attempt: str, rank: int) -> None:
    """Upload what a rank has staged."""
    upload_attempt(open_store(url), root, attempt, rank)


def attempt_names(url: str, attempt: str) -> set[str]:
    """Return what an attempt holds in the store."""
    return set(open_store(url).names(f"attempts/{attempt}"))


def publish_to_store(
    url: str, root: Path, plan: CommitPlan, files: FileSystem, *, replace: bool, fenced: bool
) -> Manifest:
    """Finalize and publish; may be repeated after a crash.

    Raises:
        UserError: a later run has taken over, or the step is published already.
    """
    store = open_store(url)
    mirror = Mirror(store, root)
    manifest, sha256 = finalize_remote(mirror, plan, files)
    if fenced and newest_remote_epoch(store) > plan.epoch:
        raise UserError(
            f"{url}: step {plan.step} is not published: this run (epoch {plan.epoch}) was taken "
            f"over by a later run (epoch {newest_remote_epoch(store)})"
        )
    publish_remote(store, mirror.root, manifest, sha256, replace=replace)
    return manifest


def tidy_store(
    url: str, root: Path, plan: CommitPlan, keep_last: int | None, retain_interval: int | None
) -> tuple[str, ...]:
    """Views, retention and sweep. The checkpoint is safe already: trouble here is a note."""
    notes = []
    try:
        store = open_store(url)
        mirror = Mirror(store, root)
        refresh_remote_views(store, plan.step, plan.attempt)
        retired = retire_remote(mirror, keep_last, retain_interval)
        notes += [
            f"step {item.step} is damaged: {mirror.words(item.reason)}" for item in retired.damaged
        ]
        notes += [f"abandoned attempt {name} removed" for name in sweep_remote(mirror, plan.step)]
    except (OSError, UserError) as error:
        notes.append(f"checkpoint of step {plan.step} is published, but: {error}")
    return tuple(notes)


def discard_from_store(url: str, root: Path, plan: CommitPlan) -> None:
    """Remove a failed attempt from the store, and what this node has staged of it."""
    remove_folder(open_store(url), f"attempts/{plan.attempt}")
    FileSystem().remove_tree(attempt_directory(root, plan.attempt))


def is_published_in_store(url: str, plan: CommitPlan) -> bool:
    """Whether the pointer of the step names this attempt."""
    store, name = open_store(url), pointer_path(Path(), plan.step).as_posix()
    size = store.size(name)
    return size is not None and plan.attempt.encode() in store.read_range(name, 0, size)
