"""Checkpoints in object stores: a private local mirror, and the local code over it.

Loading: pointers, manifest and receipts are copied, shards become sparse files of exact
size whose headers are filled, and ranges of their data arrive when they are about to be
read. Saving: ordinary local code writes into the staging directory, ranks upload shard and
receipt, one process mirrors those back, finalizes, and publishes with a conditional put. So
every check of local checkpoints holds here, by the same code. Torch-free.
"""

from __future__ import annotations

import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_lite.checkpoint.commit import (
    TRACKER_FILE,
    VIEW_POINTER_FILE,
    CommitPlan,
    already_published,
    finalize,
)
from megatron_lite.checkpoint.files import DIRECTORY_MODE, FILE_MODE, FileSystem, storage_error
from megatron_lite.checkpoint.manifest import (
    ATTEMPT_PATTERN,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    MAX_POINTER_BYTES,
    MAX_RECEIPT_BYTES,
    POINTER_PATTERN,
    Manifest,
    Pointer,
    attempt_directory,
    encode_pointer,
    pointer_path,
    receipt_file,
    shard_file,
)
from megatron_lite.checkpoint.shards import MAX_HEADER_BYTES
from megatron_lite.checkpoint.stores import (
    CHUNK_BYTES,
    Store,
    check_space,
    make_staging,
    open_store,
    write_at,
)
from megatron_lite.errors import DamagedError

HEAD_BYTES = 2**18  # of a shard, fetched in one request: holds the header of ~2000 tensors
REQUESTS = 16  # at a time
RECEIPT_PATTERN = re.compile(r"rank[0-9]{5,7}\.receipt\.json")
SHARD_PATTERN = re.compile(r"rank[0-9]{5,7}\.safetensors")
ITERATION_PATTERN = re.compile(r"iter_([0-9]{7,12})")


# ---- mirroring -------------------------------------------------------------------------------
def mirror_pointers(store: Store, root: Path) -> None:
    """Make published/ of the mirror that of the store: pointers that have gone go here too."""
    folder = root / "published"
    _make_directory(folder)
    names = [name for name in store.names("published") if POINTER_PATTERN.fullmatch(name)]
    for child in folder.iterdir():
        if child.name not in names:
            child.unlink()
    _side_by_side(
        lambda name: _copy_file(store, root, f"published/{name}", MAX_POINTER_BYTES), names
    )


def mirror_checkpoint(store: Store, root: Path, attempt: str) -> None:
    """Mirror an attempt: manifest and receipts whole, shards as their headers.

    What is missing or too large there is so here; nothing is judged.
    """
    names = store.names(f"attempts/{attempt}")
    if not names:
        return
    _make_directory(attempt_directory(root, attempt))

    def work(name: str) -> None:
        place = f"attempts/{attempt}/{name}"
        if name == MANIFEST_FILE:
            _copy_file(store, root, place, MAX_MANIFEST_BYTES)
        elif RECEIPT_PATTERN.fullmatch(name):
            _copy_file(store, root, place, MAX_RECEIPT_BYTES)
        elif SHARD_PATTERN.fullmatch(name):
            mirror_shard(store, root, place)
        else:
            _write(root / place, b"")  # a foreign file is one here

    _side_by_side(work, names)


def mirror_shard(store: Store, root: Path, place: str) -> None:
    """Make a shard a sparse file of its exact size with its header filled; once is enough."""
    path = root / place
    if path.exists():
        return
    size = store.size(place)
    if size is None:
        return
    data = store.read_range(place, 0, min(size, HEAD_BYTES))
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length <= min(size, 8 + MAX_HEADER_BYTES):
        data += store.read_range(place, len(data), 8 + length)
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}.tmp")
    _write(temporary, data)
    try:
        with temporary.open("r+b") as file:
            file.truncate(size)
        temporary.rename(path)
    except OSError as error:
        raise storage_error(error, path, size) from error


def fetch_range(store: Store, root: Path, path: Path, begin: int, end: int) -> None:
    """Fill bytes begin..end of a mirrored shard, a chunk at a time."""
    place = path.relative_to(root).as_posix()
    try:
        for low in range(begin, end, CHUNK_BYTES):
            write_at(path, low, store.read_range(place, low, min(low + CHUNK_BYTES, end)))
    except OSError as error:
        check_space(root, end - begin)
        raise storage_error(error, path, end - begin) from error


class Mirror:
    """A private local directory that stands for a SAVE root in a store.

    It is removed with this object. Threads may share one.
    """

    def __init__(self, store: Store, staging: Path | None = None):
        self.store = store
        self.root = make_staging(staging, "mirror")
        self._lock = threading.Lock()
        self._here: dict[Path, list[tuple[int, int]]] = {}
        self._complete: set[str] = set()
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def pointers(self) -> None:
        """Look for published steps."""
        mirror_pointers(self.store, self.root)

    def checkpoint(self, attempt: str) -> Path:
        """Mirror all of an attempt but its data; a published one never changes, so once."""
        if attempt not in self._complete:
            mirror_checkpoint(self.store, self.root, attempt)
            self._complete.add(attempt)
        return attempt_directory(self.root, attempt)

    def manifest(self, attempt: str) -> Path:
        """Mirror only the manifest of an attempt: what a rank needs that did not choose it."""
        if attempt not in self._complete:
            _make_directory(attempt_directory(self.root, attempt))
            place = f"attempts/{attempt}/{MANIFEST_FILE}"
            _copy_file(self.store, self.root, place, MAX_MANIFEST_BYTES)
        return attempt_directory(self.root, attempt)

    def shard(self, path: Path) -> None:
        """Mirror the header of one shard."""
        mirror_shard(self.store, self.root, path.relative_to(self.root).as_posix())

    def fetch(self, path: Path, begin: int, end: int) -> None:
        """Bring bytes begin..end of a shard here (a `Fetch`), unless they are."""
        with self._lock:
            known = self._here.setdefault(path, [])
            if any(low <= begin and end <= stop for low, stop in known):
                return
        fetch_range(self.store, self.root, path, begin, end)
        with self._lock:
            known.append((begin, end))

    def words(self, text: str) -> str:
        """Return a message with the user's URL for this directory."""
        return text.replace(str(self.root), self.store.url)


def open_mirror(url: str, staging: Path | None = None) -> Mirror:
    """Open a mirror of the SAVE root that a URL lies in."""
    return Mirror(open_store(split_url(url)[0]), staging)


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the SAVE root, and "", attempts/NAME or iter_XXXXXXX behind it."""
    parts = url.rstrip("/").split("/")
    inner = 0
    if ATTEMPT_PATTERN.fullmatch(parts[-1]) and parts[-2] == "attempts":
        inner = 2
    elif ITERATION_PATTERN.fullmatch(parts[-1]):
        inner = 1
    cut = len(parts) - inner
    return "/".join(parts[:cut]), "/".join(parts[cut:])


# ---- saving ----------------------------------------------------------------------------------
def upload_attempt(store: Store, root: Path, attempt: str, rank: int) -> None:
    """Upload what a rank has written: its shard, then its receipt; sizes are checked.

    May be repeated. The staged shard is removed, its copy in the store is the one that counts.
    """
    directory = attempt_directory(root, attempt)
    for name in (shard_file(rank), receipt_file(rank)):
        store.upload(directory / name, f"attempts/{attempt}/{name}")
    for name in (shard_file(rank), receipt_file(rank)):
        (directory / name).unlink()


def finalize_remote(mirror: Mirror, plan: CommitPlan, files: FileSystem) -> tuple[Manifest, str]:
    """Mirror an attempt as it lies in the store and verify it; `finalize` in `commit.py`.

    May be repeated: what an earlier try has mirrored is thrown away.
    """
    shutil.rmtree(attempt_directory(mirror.root, plan.attempt), ignore_errors=True)
    mirror_checkpoint(mirror.store, mirror.root, plan.attempt)
    directory = attempt_directory(mirror.root, plan.attempt)
    if not directory.is_dir():
        raise DamagedError(f"{mirror.store}/attempts/{plan.attempt}: nothing has been uploaded")
    return finalize(mirror.root, plan, files)


def publish_remote(
    store: Store, root: Path, manifest: Manifest, manifest_sha256: str, *, replace: bool
) -> None:
    """Upload the manifest that `finalize` has made in the mirror, and publish the step.

    May be repeated: a pointer with exactly our content is ours.

    Raises:
        UserError: the step is published already (perhaps by another job, just now).
    """
    attempt, step = manifest.attempt, manifest.step
    place = f"attempts/{attempt}/{MANIFEST_FILE}"
    store.upload(attempt_directory(root, attempt) / MANIFEST_FILE, place)
    name = pointer_path(Path(), step).as_posix()
    data = encode_pointer(Pointer(step, attempt, manifest_sha256))
    if replace:
        store.replace(name, data)
        return
    try:
        store.create(name, data)
    except FileExistsError:
        raise already_published(store.url, step) from None


def refresh_remote_views(store: Store, step: int, attempt: str) -> None:
    """Write iter_XXXXXXX/attempt.txt and Megatron's tracker file, for people and scripts."""
    store.replace(f"iter_{step:07d}/{VIEW_POINTER_FILE}", f"attempts/{attempt}\n".encode())
    store.replace(TRACKER_FILE, f"{step}\n".encode())


# ---- files of the mirror ---------------------------------------------------------------------
def _copy_file(store: Store, root: Path, place: str, max_bytes: int) -> None:
    """Copy a small object; of one that is too large just enough to be refused here, too."""
    size = store.size(place)
    if size is not None:
        _write(root / place, store.read_range(place, 0, min(size, max_bytes + 1)))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
        path.chmod(FILE_MODE)
    except OSError as error:
        raise storage_error(error, path, len(data)) from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    except OSError as error:
        raise storage_error(error, path) from error


def _side_by_side(work: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="checkpoint-store") as pool:
        for future in [pool.submit(work, name) for name in names]:
            future.result()
