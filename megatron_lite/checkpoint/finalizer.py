"""The finalizer: a process that is no training rank, and the only one that publishes.

Global rank 0 starts it at its first save. It waits until every rank's receipt is there,
verifies the set, publishes under the run's epoch, and tidies. It waits no longer when a
rank has failed, when nothing has changed for too long, or when rank 0 is gone and the
receipts do not come within a grace period. Every sub-step may be repeated, so that a
finalizer that died is simply started again with the same job. Torch-free.

    python -m megatron_lite.checkpoint.finalizer PARENT_PID
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.attempt import (
    SaveRequest,
    discard,
    failure_file,
    publish_attempt,
    read_failure,
    tidy,
)
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.files import FileSystem, storage_error
from megatron_lite.checkpoint.manifest import receipt_file
from megatron_lite.checkpoint.pipes import Ended, Lines, ignore_signals, send_line
from megatron_lite.checkpoint.remote_save import attempt_names
from megatron_lite.checkpoint.retention import WriterLock
from megatron_lite.checkpoint.strict_json import expect_object
from megatron_lite.errors import DamagedError, UserError

STORE_PATIENCE = 6  # times as long where uploads do not show before their end
_KEYS = (
    *("do", "root", "attempt", "step", "epoch", "world_size", "state"),
    *("replace", "keep_last", "retain_interval", "store"),
)


@dataclass(frozen=True)
class Patience:
    """How long the finalizer waits for the ranks' receipts.

    Attributes:
        stall_seconds: without any change in the attempt's files.
        grace_seconds: the same, once rank 0 is gone.
        poll_seconds, slowest_poll_seconds: between looks at the directory, growing.
    """

    stall_seconds: float = 600.0
    grace_seconds: float = 60.0
    poll_seconds: float = 0.01
    slowest_poll_seconds: float = 0.5


class AttemptFailed(Exception):
    """The attempt will not become a checkpoint; kind of the error and the reason."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Job:
    """What rank 0 asks for: end this attempt."""

    request: SaveRequest
    keep_last: int | None
    retain_interval: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the request line."""
        plan = self.request.plan
        return {
            "do": "finalize",
            "root": str(self.request.root.absolute()),
            "attempt": plan.attempt,
            "step": plan.step,
            "epoch": plan.epoch,
            "world_size": plan.world_size,
            "state": plan.state,
            "replace": self.request.replace,
            "keep_last": self.keep_last,
            "retain_interval": self.retain_interval,
            "store": self.request.store,
        }

    @classmethod
    def from_json(cls, value: Any) -> "Job":
        """Read a request line."""
        job = expect_object(value, _KEYS, "finalize request")
        plan = CommitPlan(
            job["attempt"], job["step"], job["epoch"], job["world_size"], job["state"]
        )
        request = SaveRequest(Path(job["root"]), plan, 0, job["replace"], (), job["store"])
        return cls(request, job["keep_last"], job["retain_interval"])


def serve(
    requests: int,
    replies: int,
    files: FileSystem,
    parent: int = 0,
    patience: Patience | None = None,
) -> None:
    """End attempts as asked until rank 0 says stop or is gone.

    Args:
        requests, replies: descriptors of pipes.
        files: file operations; tests put a fault in.
        parent: process of rank 0.
        patience: for ranks that do not come.
    """
    inbox = Inbox(Lines(requests, parent))
    while True:
        request = inbox.next_job()
        if request is None:
            return
        reply = carry_out(Job.from_json(request), inbox, files, patience or Patience())
        with suppress(Ended):  # rank 0 may be gone: the work was done all the same
            send_line(replies, reply)


class Inbox:
    """What rank 0 says: jobs, and while one is worked on, that it must fail."""

    def __init__(self, lines: Lines):
        self._lines = lines
        self.is_open = True

    def next_job(self) -> Any:
        """Wait for a job; None when there will be no more."""
        while self.is_open:
            value = self._take(None)
            if value is not None and value["do"] == "finalize":
                return value
        return None

    def fault_of(self, attempt: str) -> AttemptFailed | None:
        """Look whether rank 0 has given up an attempt."""
        while self.is_open:
            value = self._take(0.0)
            if value is None:
                return None
            if value["do"] == "abort" and value["attempt"] == attempt:
                return AttemptFailed(value["kind"], value["message"])
        return None

    def _take(self, wait_seconds: float | None) -> Any:
        try:
            value = self._lines.take(wait_seconds)
        except Ended:
            self.is_open = False
            return None
        if value is not None and value.get("do") == "stop":
            self.is_open = False
            return None
        return value


def carry_out(job: Job, inbox: Inbox, files: FileSystem, patience: Patience) -> dict[str, Any]:
    """End one attempt; return the reply."""
    request = job.request
    lock = WriterLock(request.root, request.plan.attempt, files)
    failure: dict[str, str] | None = None
    num_bytes = 0
    notes: tuple[str, ...] = ()
    try:
        wait_for_receipts(request, inbox, patience)
        num_bytes = publish_attempt(request, files, fenced=True).num_bytes
    except AttemptFailed as error:
        failure = {"kind": error.kind, "message": str(error)}
    except OSError as error:
        told = storage_error(error, request.directory)
        failure = {"kind": type(told).__name__, "message": str(told)}
    except Exception as error:
        failure = {"kind": type(error).__name__, "message": str(error)}
    if failure is None:
        with suppress(OSError):
            lock.release()
        notes = tidy(request, job.keep_last, job.retain_interval, files, fenced=True)
    elif inbox.is_open:
        discard(request, lock, files)
    else:  # a killed job's attempt is evidence; a later run's sweep removes it
        lock.let_go()
    return {
        "attempt": request.plan.attempt,
        "bytes": num_bytes,
        "notes": list(notes),
        "failure": failure,
    }


def wait_for_receipts(
    request: SaveRequest,
    inbox: Inbox,
    patience: Patience,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the receipts of all ranks are there.

    Raises:
        AttemptFailed: a rank has failed, rank 0 gives up, or nothing changes any more.
    """
    ranks = range(request.plan.world_size)
    pause, changed, seen = patience.poll_seconds, clock(), (-1, -1)
    if request.store is not None:  # each look is a request, and an upload shows at its end
        pause = patience.slowest_poll_seconds
    while True:
        try:
            names = _present_names(request)
        except FileNotFoundError:
            raise AttemptFailed(
                "DamagedError", f"{request.directory}: was removed while it was written"
            ) from None
        for rank in ranks:
            if failure_file(rank) in names:
                found = read_failure(request.directory, rank)
                prefix = f"rank {rank}: " if len(ranks) > 1 else ""
                raise AttemptFailed(found["kind"], prefix + found["message"])
        missing = [rank for rank in ranks if receipt_file(rank) not in names]
        if not missing:
            return
        fault = inbox.fault_of(request.plan.attempt)
        if fault is not None:
            raise fault
        size = _present_bytes(request.directory) if request.store is None else 0
        if (len(names), size) != seen:
            seen, changed = (len(names), size), clock()
        limit = patience.stall_seconds if inbox.is_open else patience.grace_seconds
        limit *= 1 if request.store is None else STORE_PATIENCE
        if clock() - changed > limit:
            told = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise AttemptFailed(
                "DamagedError",
                f"{request.directory}: no receipt of rank {told}, and nothing was written for "
                f"{limit:g} s",
            )
        sleep(pause)
        pause = min(pause * 1.5, patience.slowest_poll_seconds)


def _present_names(request: SaveRequest) -> set[str]:
    if request.store is not None:
        return attempt_names(request.store, request.plan.attempt)
    return set(os.listdir(request.directory))


def _present_bytes(directory: Path) -> int:
    total = 0
    with os.scandir(directory) as children:
        for child in children:
            with suppress(FileNotFoundError):
                total += child.stat(follow_symlinks=False).st_size
    return total


def failure_error(failure: dict[str, str]) -> UserError:
    """Return the error that a failure in a reply stands for."""
    kinds = {"UserError": UserError, "DamagedError": DamagedError}
    kind, message = failure["kind"], failure["message"]
    return kinds[kind](message) if kind in kinds else DamagedError(f"{kind}: {message}")


def main(
    arguments: Sequence[str], files: FileSystem | None = None, patience: Patience | None = None
) -> None:
    """Run as a child process of rank 0.

    Args:
        arguments: rank 0's process.
        files, patience: of tests' own finalizers.
    """
    ignore_signals()
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    serve(0, replies, files or FileSystem(), int(arguments[0]), patience)


if __name__ == "__main__":
    main(sys.argv[1:])
