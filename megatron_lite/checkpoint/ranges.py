"""Reading byte ranges of shards: straight into their destination, hashed on the way.

A piece is read in chunks that are still in the processor's cache when they are hashed; as
hashing and reading both let go of the interpreter, pieces are read side by side by a few
threads. Memory beyond the destination: two chunks per thread. A `Fetch` brings the bytes
of a remote shard here before they are read; local files are there already. Torch-free.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.checkpoint.files import open_regular, storage_error
from megatron_lite.errors import DamagedError

CHUNK_BYTES = 2**20  # fits the cache of a core; larger ones are read from memory twice
MAX_THREADS = 8
INLINE_BYTES = 2**20  # less than this is read sooner than threads are started

Fetch = Callable[[Path, int, int], None]


def already_here(path: Path, begin: int, end: int) -> None:
    """The `Fetch` of local files."""
    del path, begin, end


class RangeReader:
    """Bytes begin..end of a file, read in order; `finish` compares their hash."""

    def __init__(self, descriptor: int, path: Path, begin: int, end: int):
        self._descriptor = descriptor
        self._path = path
        self._position = begin
        self._end = end
        self._digest = hashlib.sha256()

    @property
    def rest(self) -> int:
        """Bytes not read yet."""
        return self._end - self._position

    def read_into(self, out: memoryview) -> None:
        """Fill `out` with the next bytes."""
        done = 0
        while done < out.nbytes:
            part = out[done : done + CHUNK_BYTES]
            count = os.preadv(self._descriptor, [part], self._position)
            if count == 0:
                raise DamagedError(f"{self._path}: truncated to {self._position} bytes")
            self._digest.update(part[:count])
            self._position += count
            done += count

    def skip(self, count: int) -> None:
        """Hash the next bytes without keeping them."""
        scratch = memoryview(bytearray(min(count, CHUNK_BYTES)))
        while count:
            part = scratch[: min(count, CHUNK_BYTES)]
            self.read_into(part)
            count -= part.nbytes

    def finish(self, sha256: str, what: str) -> None:
        """Hash what is left and raise unless all bytes have this sha256."""
        self.skip(self.rest)
        found = self._digest.hexdigest()
        if found != sha256:
            told = f"expected {sha256[:16]}..., found {found[:16]}..."
            raise DamagedError(f"{what} is damaged (sha256 differs: {told})")


@contextmanager
def open_range(path: Path, begin: int, end: int) -> Iterator[RangeReader]:
    """Open a range of a regular file; what goes wrong while it is read names the file."""
    descriptor, size = open_regular(path)
    try:
        if end > size:
            raise DamagedError(f"{path}: truncated to {size} bytes")
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_SEQUENTIAL)
        yield RangeReader(descriptor, path, begin, end)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        os.close(descriptor)


def num_threads() -> int:
    """How many threads read side by side: the processors of this process, at most 8."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def run_jobs(jobs: Sequence[tuple[int, Callable[[], None]]], threads: int | None = None) -> None:
    """Do all jobs, (bytes, work) each, the largest first; raise the first failure in order.

    What a failed call has written must be thrown away: other jobs may be complete or not.
    """
    threads = min(threads or num_threads(), len(jobs))
    if threads < 2 or sum(size for size, _ in jobs) < INLINE_BYTES:
        for _, work in jobs:
            work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
        order = sorted(range(len(jobs)), key=lambda index: -jobs[index][0])
        futures = {index: pool.submit(jobs[index][1]) for index in order}
        try:
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
    done = [futures[index] for index in range(len(jobs)) if not futures[index].cancelled()]
    for future in done:
        future.result()
