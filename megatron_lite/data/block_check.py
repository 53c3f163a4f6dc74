"""Whether data files stay what they were when the run began: one sampled block at a time.

A disk that rots, or a person who replaces a file in place, changes what a run reads without
a word: nearly every token id remains legal. The fingerprint of a data set (what a resume
compares) reads spread blocks; their hashes are kept, and every few steps each rank reads one
of them again, another one than its neighbours. Cost: 4 KiB read and hashed. Invariant: a
change outside the sampled blocks is not found; files up to 256 KiB are sampled whole.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_lite.errors import DamagedError

BLOCK_BYTES = 4096
BLOCKS = 64


def sampled_offsets(size: int) -> list[int]:
    """Where the blocks of a file of `size` bytes begin; some repeat where it is small."""
    last = max(size - BLOCK_BYTES, 0)
    return [block * last // (BLOCKS - 1) for block in range(BLOCKS)]


def sampled_blocks(path: Path, size: int) -> Iterator[bytes]:
    """Read the blocks of a file of `size` bytes."""
    with path.open("rb") as file:
        for offset in sampled_offsets(size):
            file.seek(offset)
            yield file.read(BLOCK_BYTES)


class BlockCheck:
    """Hashes of the sampled blocks of some files, taken now, and a look at one of them.

    Args:
        paths: the files; none for data that is made up.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._blocks: list[tuple[Path, int, int, bytes]] = []
        for path in paths:
            size = path.stat().st_size
            known = dict(zip(sampled_offsets(size), sampled_blocks(path, size), strict=True))
            self._blocks += [
                (path, offset, len(block), hashlib.sha256(block).digest())
                for offset, block in known.items()
            ]

    def __len__(self) -> int:
        """Number of blocks that are watched."""
        return len(self._blocks)

    def check(self, turn: int) -> None:
        """Read block `turn` again, counted around.

        Raises:
            DamagedError: it has other bytes than when the run began, naming file and offset.
        """
        if not self._blocks:
            return
        path, offset, length, digest = self._blocks[turn % len(self._blocks)]
        try:
            found = _read(path, offset, length)
        except OSError as error:
            raise DamagedError(
                f"{path}: the data file cannot be read any more ({error.strerror})"
            ) from error
        if hashlib.sha256(found).digest() != digest:
            what = "is shorter" if len(found) < length else "has other bytes"
            raise DamagedError(
                f"{path}: the block of {length} bytes at offset {offset} {what} than when the "
                "run began: the data file was changed or its disk is failing; restore the file, "
                "then start again from the last checkpoint"
            )


def _read(path: Path, offset: int, length: int) -> bytes:
    """Read from the file as it now is under its name, past the page cache where that is clean."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a hint; some file systems have none
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
