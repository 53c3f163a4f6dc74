"""The writer process of a rank: from a snapshot in shared memory to shard and receipt.

It maps the rank's snapshot, which nobody changes before it has answered, and hashes while
it writes. It is torch-free and light, so that it starts in a moment. When its rank is
killed it still finishes the write it has: the finalizer may then publish the step.

    python -m megatron_lite.checkpoint.writer PARENT_PID
"""

import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.attempt import SaveRequest, SnapshotPiece, mark_failed, write_rank
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.manifest import piece_key
from megatron_lite.checkpoint.pipes import Ended, Lines, ignore_signals, send_line
from megatron_lite.checkpoint.shards import ShardItem
from megatron_lite.checkpoint.strict_json import expect_dims, expect_int, expect_object

NICENESS = 10  # Megatron's default for its checkpoint workers: the training goes first
_KEYS = (
    *("do", "root", "attempt", "step", "epoch", "world_size", "rank"),
    *("memory", "memory_bytes", "pieces", "store"),
)


def describe_job(
    request: SaveRequest, pieces: Sequence[SnapshotPiece], begins: Sequence[int]
) -> dict[str, Any]:
    """Return the JSON that asks for a write, but for where the memory is.

    Args:
        begins: where each piece's bytes begin in the snapshot.
    """
    plan = request.plan
    return {
        "do": "write",
        "root": str(request.root.absolute()),
        "attempt": plan.attempt,
        "step": plan.step,
        "epoch": plan.epoch,
        "world_size": plan.world_size,
        "rank": request.rank,
        "store": request.store,
        "pieces": [
            [p.name, p.item.dtype, p.logical_shape, p.offset, p.item.shape, begin]
            for p, begin in zip(pieces, begins, strict=True)
        ],
    }


def serve(requests: int, replies: int, files: FileSystem, parent: int = 0) -> None:
    """Write what is asked for until the rank says stop or is gone.

    Args:
        requests, replies: descriptors of pipes.
        files: file operations; tests put a fault in.
        parent: process of the rank.
    """
    lines = Lines(requests, parent)
    memory = _Memory()
    with suppress(Ended):
        while True:
            job = lines.take(None)
            if job.get("do") != "write":
                return
            send_line(replies, carry_out(job, memory, files))


class _Memory:
    """The mapped snapshot; kept between saves, because mapping a large one takes time."""

    def __init__(self) -> None:
        self._key = (-1, 0)
        self._view = memoryview(b"")

    def view(self, descriptor: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a shared memory file."""
        if self._key != (descriptor, num_bytes):
            mapped = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._key, self._view = (descriptor, num_bytes), memoryview(mapped)
        return self._view


def carry_out(job: Any, memory: _Memory, files: FileSystem) -> dict[str, Any]:
    """Do one write; return the reply."""
    job = expect_object(job, _KEYS, "write request")
    begun, cpu = time.monotonic(), time.process_time()
    plan = CommitPlan(job["attempt"], job["step"], job["epoch"], job["world_size"], {})
    request = SaveRequest(Path(job["root"]), plan, job["rank"], False, (), job["store"])
    failure, written = None, 0
    try:
        view = memory.view(job["memory"], job["memory_bytes"])
        written = write_rank(request, [_piece(fields, view) for fields in job["pieces"]], files)
    except Exception as error:
        told = storage_error(error, request.directory) if isinstance(error, OSError) else error
        failure = mark_failed(request.directory, request.rank, told, files)
    return {
        "attempt": plan.attempt,
        "bytes": written,
        "seconds": time.monotonic() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "failure": failure,
    }


def _piece(fields: Any, view: memoryview) -> SnapshotPiece:
    name, dtype, logical_shape, offset, shape, begin = fields
    logical_shape, offset, shape = (
        expect_dims(dims, "write request") for dims in (logical_shape, offset, shape)
    )
    begin = expect_int(begin, "write request")
    item = ShardItem(piece_key(name, logical_shape, offset, shape), dtype, shape, _no_bytes)
    stop = begin + item.num_bytes
    if stop > view.nbytes:
        raise ValueError(f"{item.key}: bytes {begin} to {stop} of a snapshot of {view.nbytes}")
    item = ShardItem(item.key, dtype, shape, lambda: view[begin:stop])
    return SnapshotPiece(name, logical_shape, offset, item)


def _no_bytes() -> memoryview:
    return memoryview(b"")


def main(arguments: Sequence[str], files: FileSystem | None = None) -> None:
    """Run as a child process of a rank.

    Args:
        arguments: the rank's process.
        files: of tests' own writers.
    """
    ignore_signals()
    with suppress(OSError):
        os.nice(NICENESS)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    serve(0, replies, files or FileSystem(), int(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
