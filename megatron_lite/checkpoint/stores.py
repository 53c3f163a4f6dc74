"""The only door to object stores: named objects below one URL, through fsspec.

Every operation is tried a few times; all of them may be repeated, because objects of an
attempt have names that nobody else uses, and a creation whose answer was lost is settled by
looking at what is there. A store that does not answer is an error and never damage: no run
may fall back to an older checkpoint because of a network. Credentials come from the
store's own environment or files; in a URL they are refused, in messages cut out. Torch-free.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from megatron_lite.checkpoint.files import DIRECTORY_MODE, USERS_OWN, free_bytes, storage_error
from megatron_lite.errors import DamagedError, UserError

# Stores whose clients create an object only if it is absent, in one request. Elsewhere
# fsspec looks first and writes then: two jobs could both publish.
EXCLUSIVE_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "memory")
TRIES = 4
FIRST_PAUSE_S = 0.2
CHUNK_BYTES = 8 * 2**20
URL_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
SECRET_PATTERNS = (
    (re.compile(r"(?<=://)[^/\s'\"@]+@"), "...@"),
    (re.compile(r"\?[^\s'\"]+"), "?..."),
)

T = TypeVar("T")


def is_url(place: str | Path) -> bool:
    """Whether a directory given by the user is a URL of an object store."""
    text = str(place)
    return URL_PATTERN.match(text) is not None and not text.lower().startswith("file://")


def local_path(place: str | Path) -> Path:
    """Return the path of a directory given by the user, plain or as file:// URL."""
    text = str(place)
    return Path(text[len("file://") :] if text.lower().startswith("file://") else text)


def check_url(url: str) -> None:
    """Refuse a URL that holds credentials or more than a place.

    Raises:
        UserError: without the credentials.
    """
    for pattern, _ in SECRET_PATTERNS:
        if pattern.search(url):
            raise UserError(
                f"{without_secrets(url)}: give PROTOCOL://BUCKET/FOLDER only; credentials belong "
                "in the environment or the store's own files: no checkpoint and no log has those"
            )


def without_secrets(text: str) -> str:
    """Return `text` without what may be a credential in a URL."""
    for pattern, instead in SECRET_PATTERNS:
        text = pattern.sub(instead, text)
    return text


class Store:
    """The objects below one URL. Names are relative, such as published/100.json."""

    def __init__(self, url: str, filesystem: Any, sleep: Callable[[float], None] = time.sleep):
        self.url = url.rstrip("/")
        self._fs = filesystem
        self._root = str(filesystem._strip_protocol(self.url)).rstrip("/")
        self._sleep = sleep

    def __str__(self) -> str:
        return self.url

    def names(self, folder: str) -> list[str]:
        """Return the names of objects and folders in a folder, sorted; none if it is missing."""

        def work() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found} - {""})

        return self._try("list", folder, work)

    def size(self, name: str) -> int | None:
        """Return the bytes of an object, None if there is none."""

        def work() -> int | None:
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._at(name))["size"])
            except FileNotFoundError:
                return None

        return self._try("look at", name, work)

    def modified(self, name: str) -> float | None:
        """Return when an object was written, by the store's clock; None if it is gone."""

        def work() -> float | None:
            try:
                found: datetime = self._fs.modified(self._at(name))
            except FileNotFoundError:
                return None
            return found.timestamp()

        return self._try("look at", name, work)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes begin..end of an object.

        Raises:
            DamagedError: the object is gone or shorter.
        """
        if end <= begin:
            return b""

        def work() -> bytes:
            try:
                return bytes(self._fs.cat_file(self._at(name), start=begin, end=end))
            except FileNotFoundError:
                raise DamagedError(f"{self.url}/{name}: object is missing") from None

        data = self._try("read", name, work)
        if len(data) != end - begin:
            raise DamagedError(f"{self.url}/{name}: {len(data)} bytes of {begin}..{end}, truncated")
        return data

    def upload(self, path: Path, name: str) -> None:
        """Copy a file into an object of a name that only this attempt uses; its size is checked."""

        def work() -> None:
            self._fs.put_file(str(path), self._at(name))
            wanted, found = path.stat().st_size, self.size(name)
            if found != wanted:
                raise OSError(errno.EIO, f"{found} bytes arrived of {wanted}")

        self._try("write", name, work)

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, whatever was there: readers see the old or the new one."""
        self._try("write", name, lambda: self._fs.pipe_file(self._at(name), data))

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not exist yet: create-if-absent, in one request.

        A lost answer is no failure: an object with exactly this content is ours, so
        `data` must name its writer.

        Raises:
            FileExistsError: somebody else's object has this name.
        """

        def work() -> None:
            try:
                self._fs.pipe_file(self._at(name), data, mode="create")
            except Exception:
                size = self.size(name)
                if size is None:
                    raise
                if size != len(data) or self.read_range(name, 0, size) != data:
                    raise FileExistsError(errno.EEXIST, "exists", name) from None

        self._try("create", name, work)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""

        def work() -> None:
            try:
                self._fs.rm_file(self._at(name))
            except FileNotFoundError:
                return

        self._try("remove", name, work)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _try(self, verb: str, name: str, work: Callable[[], T]) -> T:
        """Do `work`, again after a pause where the store or the way to it may have failed."""
        pause = FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                return work()
            except (UserError, FileExistsError):
                raise
            except Exception as error:  # clients raise what they like
                final = isinstance(error, OSError) and error.errno in USERS_OWN | {errno.ENOSPC}
                if left and not final and not isinstance(error, PermissionError):
                    self._sleep(pause)
                    pause *= 2
                    continue
                told = without_secrets(f"{type(error).__name__}: {error}")
                raise UserError(f"cannot {verb} {self.url}/{name}: {told}") from None
        raise AssertionError("not reached")


def open_store(url: str, filesystem: Any = None) -> Store:
    """Open the store of a URL; `filesystem` is an fsspec file system instead of the URL's own.

    Raises:
        UserError: credentials in the URL, an unknown protocol, or a client not installed.
    """
    check_url(url)
    if filesystem is not None:
        return Store(url, filesystem)
    try:
        import fsspec
    except ImportError:
        raise UserError(
            f"{url}: object stores need fsspec: pip install 'megatron_lite[remote]'"
        ) from None
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith("local://"):  # a directory used like a store
        options["auto_mkdir"] = True
    try:
        found, _ = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(f"{url}: the client of this store is not installed: {error}") from None
    except Exception as error:
        told = without_secrets(f"{type(error).__name__}: {error}")
        raise UserError(f"{url}: no store can be opened there: {told}") from None
    return Store(url, found)


def check_exclusive(store: Store, nonce: str, allow_unsafe: bool = False) -> None:
    """Refuse a store that has no create-if-absent, before the first step.

    Args:
        nonce: names the object that is written twice, and removed.
        allow_unsafe: the user promises that no second job uses this place.

    Raises:
        UserError: two jobs could publish the same step there, and one would be lost.
    """
    protocol = store.url.partition("://")[0].lower()
    reason = f"{protocol}:// is not known to have it" if protocol not in EXCLUSIVE_PROTOCOLS else ""
    name = f"attempts/.probe-{nonce}"
    store.create(name, b"first")
    try:
        store.create(name, b"second")
    except FileExistsError:
        pass
    else:
        reason = "an object was replaced where it should have been refused"
    finally:
        store.remove(name)
    if reason and not allow_unsafe:
        raise UserError(
            f"{store}: publishing needs to create an object only if it is absent, and {reason}; "
            "--ckpt-allow-unsafe-publish saves there if no other job ever does"
        )


def make_staging(parent: str | Path | None, purpose: str) -> Path:
    """Make a private directory for what comes from or goes to a store.

    Args:
        parent: where; None is the system's directory for temporary files.
    """
    place = Path(tempfile.gettempdir() if parent is None else parent).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
        return Path(tempfile.mkdtemp(prefix=f"megatron_lite-{purpose}-", dir=place))
    except OSError as error:
        raise storage_error(error, place) from error


def check_space(path: Path, needed: int) -> None:
    """Raise unless the staging directory has room.

    Raises:
        DamagedError: naming the directory and both numbers.
    """
    free = free_bytes(path)
    if free < needed:
        raise DamagedError(
            f"no space left in the staging directory {path}: {needed} bytes needed, {free} bytes "
            "free; --ckpt-staging-dir names another one"
        )


def write_at(path: Path, begin: int, data: bytes) -> None:
    """Write bytes into a file that exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rest = memoryview(data)
        while len(rest):
            count = os.pwrite(descriptor, rest, begin)
            rest, begin = rest[count:], begin + count
    finally:
        os.close(descriptor)
