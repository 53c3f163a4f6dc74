"""The only door through which checkpoints change or read files.

Every operation that changes the disk is announced to `observe` first: tests stop the
process there, at each point in turn, and look at what is left. Files are created
exclusively, never through a symbolic link, readable by owner and group only.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from megatron_lite.errors import DamagedError, UserError

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
REFUSED = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
# What the user has to set right: permissions, and names that lead to no usable place.
USERS_OWN = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}

Observer = Callable[[str, Path], None]


def _unobserved(operation: str, path: Path) -> None:
    del operation, path


class OpenFile:
    """A file being written from start to end."""

    def __init__(self, path: Path, descriptor: int, observe: Observer):
        self.path = path
        self._descriptor = descriptor
        self._observe = observe

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        self._observe("write", self.path)
        rest = memoryview(data)
        try:
            while len(rest):
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            error.filename = str(self.path)  # the system call knows only a descriptor
            raise

    def sync(self) -> None:
        """Return when the content is on the device."""
        self._observe("sync", self.path)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close without syncing."""
        os.close(self._descriptor)


class FileSystem:
    """POSIX file operations of save, publish and retention."""

    def __init__(self, observe: Observer = _unobserved):
        self._observe = observe

    def create(self, path: Path) -> OpenFile:
        """Create a file that must not exist yet."""
        self._observe("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return OpenFile(path, os.open(path, flags, FILE_MODE), self._observe)

    def write_file(self, path: Path, data: bytes) -> None:
        """Create `path` exclusively with this content, on the device when it returns.

        A file that cannot be written completely is not left behind.
        """
        file = self.create(path)
        try:
            file.write(data)
            file.sync()
        except OSError:
            self.remove_file(path)
            raise
        finally:
            file.close()

    def make_directory(self, path: Path, *, durable: bool = True) -> None:
        """Create a directory that must not exist yet, and make its entry durable."""
        self._observe("mkdir", path)
        os.mkdir(path, DIRECTORY_MODE)
        if durable:
            self.sync_directory(path.parent)

    def open_lock(self, path: Path) -> int:
        """Open a file to be locked, creating it empty where it is missing."""
        self._observe("lock", path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, FILE_MODE)

    def ensure_directory(self, path: Path) -> None:
        """Create `path` and its parents where they are missing."""
        if not path.is_dir():
            self.ensure_directory(path.parent)
            try:
                self.make_directory(path)
            except FileExistsError:
                if not path.is_dir():
                    raise

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable (creations, links, renames, removals)."""
        self._observe("sync_directory", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network file systems sync directories by themselves
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Give `source` the second name `target`, which must not exist: create-if-absent."""
        self._observe("link", target)
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        """Move `source` to `target`, replacing it atomically."""
        self._observe("rename", target)
        os.replace(source, target)

    def symlink(self, text: str, path: Path) -> None:
        """Create a symbolic link."""
        self._observe("symlink", path)
        os.symlink(text, path)

    def remove_file(self, path: Path) -> None:
        """Remove a file or link, if it is there."""
        self._observe("unlink", path)
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a flat directory with its files, if it is there; links are not followed."""
        if path.is_symlink() or not path.is_dir():
            return
        for child in sorted(path.iterdir()):
            self.remove_file(child)
        self._observe("rmdir", path)
        path.rmdir()


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading, refusing links; return (descriptor, size in bytes)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedError(f"{path}: file is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError(f"{path}: is a symbolic link") from None
        raise storage_error(error, path) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path}: is not a regular file")
    return descriptor, status.st_size


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`."""
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > max_bytes:
            raise DamagedError(f"{path}: {size} bytes, at most {max_bytes} are accepted")
        try:
            return file.read(max_bytes + 1)
        except OSError as error:
            raise storage_error(error, path) from error


def storage_error(error: OSError, path: Path, needed_bytes: int | None = None) -> UserError:
    """Return the error to raise for a failed file operation, in the user's words.

    No space (or quota) and device errors have exit code 3; what the user has to set right
    (permissions, a read-only or missing directory) has exit code 2.
    """
    where = Path(os.fsdecode(error.filename)) if error.filename else path
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        needed = "" if needed_bytes is None else f": {needed_bytes} bytes needed"
        return DamagedError(f"no space left writing {where}{needed}, {free_bytes(path)} bytes free")
    message = f"{where}: {error.strerror or error}"
    if error.errno in USERS_OWN:
        return UserError(message)
    return DamagedError(message)


def free_bytes(path: Path) -> int:
    """Return the bytes an ordinary user may still write on the file system of `path`."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
