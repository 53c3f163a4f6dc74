"""One run per save directory, and none that a later run has taken over may publish.

Every run takes a membership epoch at its start by creating epochs/EPOCH.json, which must
not exist: the highest number plus one. Receipts carry it, and publishing is refused under
a lower one than the highest. While a run lives it also holds a record lock, so that a
second one is refused at its start instead of taking over. Where a file system has no
locks, the epochs alone decide. Torch-free.

Record locks (lockf) and not flock for the run's life: data workers are forked from the
rank and would keep a flock for seconds after the rank is gone.
"""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.files import FileSystem, read_file
from megatron_lite.checkpoint.strict_json import encode_json, expect_object, parse_json
from megatron_lite.errors import DamagedError, UserError

EPOCH_FOLDER = "epochs"
RUN_LOCK, PUBLISH_LOCK = "run.lock", "publish.lock"
WAIT_SECONDS = 5.0
KEPT_EPOCHS = 16
MAX_EPOCH_BYTES = 4096
_EPOCH_PATTERN = re.compile(r"([1-9][0-9]{0,8})\.json")
_KEYS = ("host", "pid", "time")
_POLL_SECONDS = 0.1
_BUSY = {errno.EACCES, errno.EAGAIN}


@dataclass(frozen=True)
class Membership:
    """A run's right to publish in `root`, until a later run takes a higher epoch."""

    root: Path
    epoch: int
    descriptor: int

    def leave(self) -> None:
        """The run is over: let another one begin at once."""
        os.close(self.descriptor)


def take_membership(
    root: Path, files: FileSystem, wait_seconds: float = WAIT_SECONDS
) -> Membership:
    """Become the run of this directory.

    Raises:
        UserError: another run lives, naming its host and process.
    """
    folder = root / EPOCH_FOLDER
    files.ensure_directory(folder)
    descriptor = files.open_lock(folder / RUN_LOCK)
    try:
        if not _lock(descriptor, fcntl.lockf, wait_seconds):
            raise UserError(
                f"{root}: another run saves here ({describe_run(root)}): end it, wait for its "
                "end, or give this run another --save directory"
            )
        with _publish_lock(root, files):
            epoch = _create_epoch(root, files)
    except BaseException:
        os.close(descriptor)
        raise
    for old in _epochs(root):
        if old <= epoch - KEPT_EPOCHS:
            files.remove_file(folder / f"{old}.json")
    return Membership(root, epoch, descriptor)


def _create_epoch(root: Path, files: FileSystem) -> int:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    data = encode_json({"host": socket.gethostname(), "pid": os.getpid(), "time": now})
    while True:
        epoch = newest_epoch(root) + 1
        try:
            files.write_file(root / EPOCH_FOLDER / f"{epoch}.json", data)
        except FileExistsError:  # without locks two runs may start together
            continue
        files.sync_directory(root / EPOCH_FOLDER)
        return epoch


def newest_epoch(root: Path) -> int:
    """Return the highest epoch ever taken in this directory, 0 if none was."""
    return max(_epochs(root), default=0)


def _epochs(root: Path) -> list[int]:
    try:
        names = os.listdir(root / EPOCH_FOLDER)
    except FileNotFoundError:
        return []
    return [int(match[1]) for match in map(_EPOCH_PATTERN.fullmatch, names) if match]


def describe_run(root: Path) -> str:
    """Say who took the newest epoch, for a message: nothing depends on it."""
    epoch = newest_epoch(root)
    path = root / EPOCH_FOLDER / f"{epoch}.json"
    try:
        value: dict[str, Any] = expect_object(
            parse_json(read_file(path, MAX_EPOCH_BYTES), str(path), MAX_EPOCH_BYTES),
            _KEYS,
            str(path),
        )
    except DamagedError:
        return f"epoch {epoch}"
    host, pid, when = (str(value[key])[:100] for key in _KEYS)
    return f"host {host}, process {pid}, since {when}, epoch {epoch}"


@contextmanager
def publishing(
    root: Path, epoch: int, step: int, files: FileSystem | None = None
) -> Iterator[None]:
    """Hold off the start of a later run while the block publishes.

    Raises:
        UserError: a later run has taken over.
    """
    with _publish_lock(root, files or FileSystem()):
        newest = newest_epoch(root)
        if newest > epoch:
            raise UserError(
                f"{root}: step {step} is not published: this run (epoch {epoch}) was taken over "
                f"by a later run ({describe_run(root)})"
            )
        yield


@contextmanager
def _publish_lock(root: Path, files: FileSystem) -> Iterator[None]:
    """A lock of moments: nothing but the epoch and one pointer changes under it."""
    path = root / EPOCH_FOLDER / PUBLISH_LOCK
    descriptor = files.open_lock(path)
    try:
        if not _lock(descriptor, fcntl.flock, 2 * WAIT_SECONDS):
            raise UserError(f"{path}: a stopped or hanging process of another run holds it")
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, lock: Any, wait_seconds: float) -> bool:
    """Take an exclusive lock; False if somebody holds it all the time."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:  # no locks here: the epochs decide
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
            continue
        return True
