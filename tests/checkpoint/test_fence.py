"""One run per directory; what a later run has taken over cannot be published any more."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.checkpoint import find_checkpoint, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.fence import (
    KEPT_EPOCHS,
    describe_run,
    newest_epoch,
    publishing,
    take_membership,
)
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.errors import UserError
from tests.checkpoint.roles import Roles, become_run, played_save
from tests.checkpoint.tiny import holds_step
from tests.pool import REPOSITORY

FILES = FileSystem()
RUN = """
import sys, time
from pathlib import Path
from megatron_lite.checkpoint.fence import take_membership
from megatron_lite.checkpoint.files import FileSystem
take_membership(Path(sys.argv[1]), FileSystem())
print("taken", flush=True)
time.sleep(60)
"""


def test_every_run_takes_a_higher_epoch_and_few_are_kept(tmp_path: Path) -> None:
    epochs = [become_run(tmp_path) for _ in range(KEPT_EPOCHS + 4)]
    assert epochs == list(range(1, KEPT_EPOCHS + 5))
    kept = list((tmp_path / "epochs").glob("*.json"))
    assert len(kept) == KEPT_EPOCHS
    assert newest_epoch(tmp_path) == KEPT_EPOCHS + 4


def test_row_35_a_directory_whose_run_lives_is_refused_and_free_when_it_is_dead(
    tmp_path: Path,
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"taken\n"
        with pytest.raises(UserError, match=rf"another run saves here .*process {other.pid}"):
            take_membership(tmp_path, FILES, wait_seconds=0.2)
        other.send_signal(signal.SIGKILL)
        other.wait()
        membership = take_membership(tmp_path, FILES, wait_seconds=5.0)
        assert membership.epoch == 2
        membership.leave()
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


def test_rows_18_35_37_an_orphan_of_an_older_run_cannot_publish(tmp_path: Path) -> None:
    """All its shards and receipts are complete; a later run has started meanwhile."""
    orphan = Roles(tmp_path, 10, 2)
    request = orphan.begin()
    orphan.write(request)
    played_save(Roles(tmp_path, 5, 2, epoch=become_run(tmp_path)))
    reply = orphan.finalize(request)
    orphan.let_go()
    assert reply["failure"]["kind"] == "UserError"
    assert "taken over by a later run (host " in reply["failure"]["message"]
    assert f"process {os.getpid()}" in reply["failure"]["message"]
    assert published_steps(tmp_path) == [5]
    assert holds_step(open_checkpoint(tmp_path), 5)


def test_row_18_receipts_of_an_older_run_are_not_taken_in(tmp_path: Path) -> None:
    old = Roles(tmp_path, 2, 2, epoch=become_run(tmp_path))
    stale = old.begin()
    old.write(stale)
    new = Roles(tmp_path, 2, 2, epoch=become_run(tmp_path))
    request = new.begin()
    new.write(request, ranks=[0])
    for name in ("rank00001.safetensors", "rank00001.receipt.json"):
        (stale.directory / name).replace(request.directory / name)
    reply = new.finalize(request)
    assert "belongs to attempt, step, epoch" in reply["failure"]["message"]
    assert published_steps(tmp_path) == []
    old.let_go()
    new.let_go()


def test_row_35_of_two_runs_on_a_disk_without_locks_the_later_one_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    first = take_membership(tmp_path, FILES)
    second = take_membership(tmp_path, FILES)
    assert (first.epoch, second.epoch) == (1, 2)
    replies = [played_save(Roles(tmp_path, 2, epoch=m.epoch)) for m in (first, second)]
    assert "taken over" in replies[0]["failure"]["message"]
    assert replies[1]["failure"] is None
    assert f"/2-{second.epoch}-" in str(find_checkpoint(tmp_path).directory)
    first.leave()
    second.leave()


def test_a_start_waits_for_a_pointer_that_is_being_made(tmp_path: Path) -> None:
    become_run(tmp_path)
    with (
        publishing(tmp_path, 1, 5),
        pytest.raises(UserError, match=r"publish\.lock"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("megatron_lite.checkpoint.fence.WAIT_SECONDS", 0.05)
        take_membership(tmp_path, FILES)
    assert newest_epoch(tmp_path) == 1


def test_a_damaged_epoch_file_still_counts(tmp_path: Path) -> None:
    become_run(tmp_path)
    (tmp_path / "epochs" / "1.json").write_bytes(b"\x00garbage")
    assert describe_run(tmp_path) == "epoch 1"
    assert become_run(tmp_path) == 2
