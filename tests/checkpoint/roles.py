"""The parts of a run's save - rank 0, writers, finalizer - played one after the other.

Each part has file operations of its own, so that a test can stop one of them, or all, at
any operation. `played_save` is the save of one run of `size` ranks in this process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.attempt import SaveRequest, create_attempt, write_rank
from megatron_lite.checkpoint.commit import CommitPlan
from megatron_lite.checkpoint.fence import Membership, newest_epoch, take_membership
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.finalizer import Inbox, Job, Patience
from megatron_lite.checkpoint.finalizer import carry_out as finalize_job
from megatron_lite.checkpoint.pipes import Lines, send_line
from megatron_lite.checkpoint.retention import WriterLock
from megatron_lite.checkpoint.snapshot import SnapshotBuffer
from megatron_lite.checkpoint.strict_json import encode_json, parse_json
from megatron_lite.checkpoint.tensors import take_snapshot
from megatron_lite.checkpoint.writer import _Memory, describe_job
from megatron_lite.checkpoint.writer import carry_out as write_job
from tests.checkpoint.tiny import cut_entries, tiny_tensors

IMPATIENT = Patience(stall_seconds=0.0, grace_seconds=0.0, poll_seconds=0.0)


def become_run(root: Path) -> int:
    """Take the next epoch, as a run that starts and whose process is then gone."""
    membership: Membership = take_membership(root, FileSystem())
    membership.leave()
    return membership.epoch


@contextmanager
def inbox_with(*messages: dict[str, Any], is_open: bool = True) -> Iterator[Inbox]:
    """What rank 0 has said to a finalizer; not `is_open`: rank 0 is gone."""
    read_end, write_end = os.pipe()
    for message in messages:
        send_line(write_end, message)
    if not is_open:
        os.close(write_end)
    try:
        yield Inbox(Lines(read_end))
    finally:
        os.close(read_end)
        if is_open:
            os.close(write_end)


@dataclass
class Roles:
    """Who does what with which file operations.

    Attributes:
        size: ranks.
        in_background: written by the writers from a snapshot, not by the ranks.
        epoch: of the run; a new one when it is 0.
    """

    root: Path
    step: int
    size: int = 1
    in_background: bool = True
    keep_last: int | None = 1
    epoch: int = 0
    rank_files: FileSystem = field(default_factory=FileSystem)
    writer_files: FileSystem = field(default_factory=FileSystem)
    finalizer_files: FileSystem = field(default_factory=FileSystem)
    lock: WriterLock | None = None

    def begin(self) -> SaveRequest:
        """Rank 0 names the attempt."""
        self.epoch = self.epoch or newest_epoch(self.root) or become_run(self.root)
        told, self.lock = create_attempt(self.root, self.step, self.epoch, False, self.rank_files)
        plan = CommitPlan(
            told["attempt"], self.step, self.epoch, self.size, {"iteration": self.step}
        )
        return SaveRequest(self.root, plan, 0, told["replace"], ())

    def write(self, request: SaveRequest, ranks: Sequence[int] | None = None) -> list[Any]:
        """Ranks or their writers write their shares; returns the writers' replies."""
        replies = []
        for rank in range(self.size) if ranks is None else ranks:
            mine = SaveRequest(self.root, request.plan, rank, request.replace, ())
            entries = cut_entries(tiny_tensors(self.step), rank, self.size)
            if not self.in_background:
                write_rank(mine, take_snapshot(entries), self.writer_files)
                continue
            buffer = SnapshotBuffer(entries)
            try:
                buffer.fill(entries)
                job = describe_job(mine, buffer.pieces, buffer.begins)
                job |= {"memory": buffer.descriptor, "memory_bytes": buffer.num_bytes}
                arrived = parse_json(encode_json(job), "job", 2**20)
                replies.append(write_job(arrived, _Memory(), self.writer_files))
            finally:
                buffer.close()
        return replies

    def finalize(self, request: SaveRequest, *said: dict[str, Any], is_open: bool = True) -> Any:
        """The finalizer ends the attempt; returns its reply."""
        with inbox_with(*said, is_open=is_open) as inbox:
            job = Job.from_json(Job(request, self.keep_last, None).to_json())
            return finalize_job(job, inbox, self.finalizer_files, IMPATIENT)

    def let_go(self) -> None:
        """Rank 0 learned the outcome, or is gone."""
        if self.lock is not None:
            self.lock.let_go()


def close_locks(root: Path) -> None:
    """Close what a part that was stopped here still holds, as the end of its process does."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link).removesuffix(" (deleted)")
            if target.startswith(f"{root}/") and target.endswith(".lock"):
                os.close(int(link.name))


def played_save(roles: Roles) -> Any:
    """A whole save; returns the finalizer's reply."""
    request = roles.begin()
    try:
        roles.write(request)
        return roles.finalize(request)
    finally:
        roles.let_go()
