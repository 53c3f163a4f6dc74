"""Keep built indices on disk, safe for many processes and for interrupted ones.

An entry is a folder of .npy files named by the hash of everything that determines it.
It is built under a lock into a temporary folder and renamed, so an entry is either
absent or complete: whichever process comes first builds, the others wait and map the
same files. That needs no rank to be special and works where nodes share no disk.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.errors import DamagedError

Arrays = Mapping[str, NDArray[Any]]
DESCRIPTION_FILE = "description.json"
# An array is checked at every start: the whole of a small one, spread blocks of a large one.
CHECKED_BLOCKS = 256
CHECKED_BLOCK_BYTES = 1 << 18


def cache_key(facts: Mapping[str, Any]) -> str:
    """Hash a JSON-able description."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class IndexCache:
    """Arrays by key under one folder; None as folder builds in memory every time.

    Args:
        root: the folder, created on first use.
        announce: where notices about an unusable or damaged cache go.
    """

    def __init__(self, root: Path | None, announce: Callable[[str], None]) -> None:
        self._root = root
        self._announce = announce

    def get(
        self, facts: Mapping[str, Any], names: tuple[str, ...], build: Callable[[], Arrays]
    ) -> Arrays:
        """Load the arrays that belong to `facts`, building them first if need be.

        Args:
            facts: everything that determines the content; its hash is the key.
            names: arrays of the entry.
            build: makes them; called at most once.

        Raises:
            DamagedError: no space left for the entry.
        """
        if self._root is None:
            return build()
        entry = self._root / cache_key(facts)
        loaded = self._load(entry, names)
        if loaded is not None:
            return loaded
        try:
            return self._build_locked(entry, facts, names, build)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DamagedError(
                    f"no space left for the index cache in {self._root}; "
                    f"--data-cache-path names another folder"
                ) from None
            # Read-only, not a folder, out of locks: the run does not depend on the cache.
            self._announce(
                f"note: the index cache {self._root} cannot be used ({error.strerror}); building "
                f"in memory (--data-cache-path names another folder)"
            )
            return build()

    def _build_locked(
        self,
        entry: Path,
        facts: Mapping[str, Any],
        names: tuple[str, ...],
        build: Callable[[], Arrays],
    ) -> Arrays:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry.with_name(f"{entry.name}.lock")) as alone:
            loaded = self._load(entry, names)  # built by another while this one waited
            if loaded is not None:
                return loaded
            if entry.exists():
                self._announce(f"note: index cache entry {entry} is damaged; building it again")
                _remove(entry)
            if alone:
                for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _publish(entry, facts, build())
        published = self._load(entry, names)
        if published is None:
            raise DamagedError(f"index cache entry {entry} cannot be read back")
        return published

    @staticmethod
    def _load(entry: Path, names: tuple[str, ...]) -> Arrays | None:
        """Map the arrays of an entry; None where it is absent or not what was written."""
        try:
            described = json.loads((entry / DESCRIPTION_FILE).read_text())["arrays"]
            arrays = {name: _map_array(entry / f"{name}.npy") for name in names}
        except (OSError, ValueError, EOFError, KeyError, TypeError, RecursionError):
            return None
        if any(described.get(name) != _describe(array) for name, array in arrays.items()):
            return None
        return arrays


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _describe(array: NDArray[Any]) -> dict[str, Any]:
    """Type, shape and a checksum over at most 64 MiB, so that a start stays quick."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    checksum = 0
    if len(data) <= CHECKED_BLOCKS * CHECKED_BLOCK_BYTES:
        checksum = zlib.crc32(data.data)
    else:
        for block in range(CHECKED_BLOCKS):
            start = block * (len(data) - CHECKED_BLOCK_BYTES) // (CHECKED_BLOCKS - 1)
            checksum = zlib.crc32(data[start : start + CHECKED_BLOCK_BYTES].data, checksum)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "crc32": checksum}


def _map_array(path: Path) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array.view(np.ndarray)  # plain arrays index several times faster than memmaps


def _publish(entry: Path, facts: Mapping[str, Any], arrays: Arrays) -> None:
    """Write an entry beside its place and rename it there."""
    temporary = entry.with_name(f"{entry.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    temporary.mkdir()
    for name, array in arrays.items():
        with (temporary / f"{name}.npy").open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    described = {name: _describe(np.asarray(array)) for name, array in arrays.items()}
    content = {"facts": dict(facts), "arrays": described}
    (temporary / DESCRIPTION_FILE).write_text(json.dumps(content, indent=1) + "\n")
    try:
        temporary.rename(entry)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary)  # another process, not held up by the lock, was first


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock; yields False where the file system has no locks.

    Without them several processes may build the same entry; each publishes by rename.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            yield False
        else:
            yield True
