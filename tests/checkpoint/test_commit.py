"""Commit rules: one epoch, one attempt, no foreign files, one winner, nothing half done."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import (
    StateEntry,
    find_checkpoint,
    load_newest,
    open_checkpoint,
    save_checkpoint,
)
from megatron_lite.checkpoint.commit import CommitPlan, finalize
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.manifest import attempt_directory
from megatron_lite.checkpoint.save import SaveRequest, publish_attempt, write_rank
from megatron_lite.checkpoint.tensors import take_snapshot
from megatron_lite.errors import DamagedError, UserError
from megatron_lite.mesh.groups import local_group
from tests.checkpoint.test_crash_points import LinklessFileSystem
from tests.checkpoint.test_round_trip import world_group
from tests.checkpoint.tiny import cut_entries, holds_step, save_cut, save_tiny, tiny_tensors
from tests.pool import RankPool

FILES = FileSystem()


def request_for(root: Path, nonce: str, rank: int = 0, size: int = 1, **plan: int) -> SaveRequest:
    """A request as `save_checkpoint` makes it, for step 2 unless said otherwise."""
    step, epoch = plan.get("step", 2), plan.get("epoch", 0)
    attempt = f"{step}-{epoch}-{nonce * 16}"
    FILES.ensure_directory(attempt_directory(root, attempt))
    return SaveRequest(
        root, CommitPlan(attempt, step, epoch, size, {"iteration": 2}), rank, False, ()
    )


def write_shares(root: Path, nonce: str, size: int = 1) -> SaveRequest:
    """Write all shares of an attempt without publishing it; return rank 0's request."""
    for rank in reversed(range(size)):
        request = request_for(root, nonce, rank, size)
        write_rank(request, take_snapshot(cut_entries(tiny_tensors(2), rank, size)), FILES)
    return request


def test_directory_layout_and_views(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, 100).directory
    assert directory.parent == tmp_path / "attempts"
    assert sorted(os.listdir(tmp_path)) == [
        "attempts",
        "iter_0000100",
        "latest_checkpointed_iteration.txt",
        "published",
    ]
    assert sorted(os.listdir(directory)) == [
        "manifest.json",
        "rank00000.receipt.json",
        "rank00000.safetensors",
    ]
    assert os.listdir(tmp_path / "published") == ["100.json"]
    assert os.listdir(tmp_path / "attempts") == [directory.name]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "100"
    assert os.readlink(tmp_path / "iter_0000100") == f"attempts/{directory.name}"
    pointer = json.loads((tmp_path / "published/100.json").read_text())
    assert pointer.keys() == {"step", "attempt", "manifest_sha256"}


def test_where_links_are_refused_the_view_is_a_directory_with_one_line(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, 1, files=LinklessFileSystem()).directory
    view = tmp_path / "iter_0000001"
    assert (view / "attempt.txt").read_text() == f"attempts/{directory.name}\n"
    assert holds_step(open_checkpoint(view), 1)
    assert holds_step(open_checkpoint(tmp_path), 1)


def test_a_foreign_iter_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir()
    result = save_tiny(tmp_path, 1)
    assert os.listdir(tmp_path / "iter_0000001") == ["mp_rank_00"]
    assert "not ours" in result.notes[0]
    assert holds_step(open_checkpoint(tmp_path), 1)


def test_nothing_is_world_readable(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_tiny(tmp_path / "save", 1)
    finally:
        os.umask(before)
    for path in [tmp_path / "save", *(tmp_path / "save").rglob("*")]:
        if not path.is_symlink():
            wanted = 0o750 if path.is_dir() else 0o640
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_published_step_is_not_replaced_unless_told(tmp_path: Path) -> None:
    first = save_tiny(tmp_path, 1).directory
    with pytest.raises(UserError, match="--overwrite-save") as caught:
        save_tiny(tmp_path, 1)
    assert caught.value.exit_code == 2
    assert find_checkpoint(tmp_path).directory == first
    second = save_tiny(tmp_path, 1, overwrite=True).directory
    assert find_checkpoint(tmp_path).directory == second
    assert os.readlink(tmp_path / "iter_0000001").endswith(second.name)


def test_a_damaged_step_is_replaced_without_being_told(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, 1).directory
    shard = directory / "rank00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x99")
    result = save_tiny(tmp_path, 1)
    assert "damaged" in result.notes[0]
    assert holds_step(open_checkpoint(tmp_path), 1)


def test_saving_below_a_newer_step_says_what_will_be_loaded(tmp_path: Path) -> None:
    save_tiny(tmp_path, 5)
    assert "newer than 3" in save_tiny(tmp_path, 3).notes[0]


def test_of_two_writers_of_one_step_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    slow = write_shares(tmp_path, "a")
    fast = write_shares(tmp_path, "b")
    publish_attempt(fast, FILES)
    with pytest.raises(UserError, match="already published"):
        publish_attempt(slow, FILES)
    assert find_checkpoint(tmp_path).directory == fast.directory
    assert holds_step(open_checkpoint(tmp_path), 2)


def test_finalize_can_be_repeated_after_a_crash(tmp_path: Path) -> None:
    request = write_shares(tmp_path, "a", 2)
    first = finalize(tmp_path, request.plan, FILES)
    (request.directory / ".manifest.json.tmp").write_bytes(b"half")
    assert finalize(tmp_path, request.plan, FILES) == first


def test_finalize_refuses_missing_and_foreign_files(tmp_path: Path) -> None:
    request = write_shares(tmp_path, "a", 2)
    extra = request.directory / "rank00002.safetensors"
    extra.write_bytes(b"")
    with pytest.raises(DamagedError, match="foreign file"):
        finalize(tmp_path, request.plan, FILES)
    extra.unlink()
    (request.directory / "rank00001.receipt.json").unlink()
    with pytest.raises(DamagedError, match=r"rank00001.*missing"):
        finalize(tmp_path, request.plan, FILES)


@pytest.mark.parametrize("other", [{"step": 1}, {"epoch": 7}, {}], ids=["step", "epoch", "attempt"])
def test_row_37_finalize_refuses_a_stale_rank(tmp_path: Path, other: dict[str, int]) -> None:
    """A rank that wrote for another step, membership epoch or attempt is not taken in."""
    request = write_shares(tmp_path, "a", 2)
    stale = request_for(tmp_path, "b", 1, 2, **other)
    write_rank(stale, take_snapshot(cut_entries(tiny_tensors(2), 1, 2)), FILES)
    for name in ("rank00001.safetensors", "rank00001.receipt.json"):
        (stale.directory / name).replace(request.directory / name)
    with pytest.raises(DamagedError, match="belongs to attempt"):
        finalize(tmp_path, request.plan, FILES)


def test_row_36_finalize_refuses_a_duplicate_owner(tmp_path: Path) -> None:
    size = 2
    for rank in range(size):
        request = request_for(tmp_path, "a", rank, size)
        entry = StateEntry("a", torch.ones(3), (3,), (0,), True)
        write_rank(request, take_snapshot([entry]), FILES)
    with pytest.raises(DamagedError, match="in 2 files"):
        finalize(tmp_path, request.plan, FILES)


def test_finalize_refuses_ranks_that_disagree_about_a_tensor(tmp_path: Path) -> None:
    for rank, shape in enumerate([(4,), (5,)]):
        request = request_for(tmp_path, "a", rank, 2)
        entry = StateEntry("a", torch.ones(2), shape, (2 * rank,), True)
        write_rank(request, take_snapshot([entry]), FILES)
    with pytest.raises(DamagedError, match="other ranks say"):
        finalize(tmp_path, request.plan, FILES)


class FullDisk:
    """Fails the k-th write with 'no space left'."""

    def __init__(self, fail_at: int | None):
        self.writes = 0
        self._fail_at = fail_at

    def observe(self, operation: str, path: Path) -> None:
        """Called before each operation."""
        if operation == "write":
            if self.writes == self._fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self.writes += 1


def test_no_space_left_at_any_write_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    count = FullDisk(None)
    save_tiny(tmp_path / "count", 2, files=FileSystem(count.observe))
    failures = 0
    for point in range(count.writes):
        root = tmp_path / f"at{point}"
        old = save_tiny(root, 1).directory
        try:
            result = save_tiny(root, 2, files=FileSystem(FullDisk(point).observe))
        except DamagedError as error:
            failures += 1
            assert error.exit_code == 3
            assert "no space left" in str(error) and "bytes free" in str(error)
            assert holds_step(open_checkpoint(root), 1)
            assert os.listdir(root / "attempts") == [old.name], "the attempt is swept"
        else:  # after the commit only views were left to write
            assert "is published, but" in " ".join(result.notes)
            assert holds_step(open_checkpoint(root), 2)
    assert failures >= 7


def test_no_space_for_the_shard_names_file_and_bytes(tmp_path: Path) -> None:
    # Write 0 is the empty lock file's, write 1 the shard's header.
    with pytest.raises(DamagedError, match=r"rank00000\.safetensors: \d+ bytes needed, \d+ bytes"):
        save_tiny(tmp_path, 1, files=FileSystem(FullDisk(1).observe))


def save_or_message(root: str, fail_rank: int, rank: int, world_size: int) -> str:
    """Save with a full disk on one rank; return the message (runs in the pool)."""
    files = FileSystem(FullDisk(1 if rank == fail_rank else None).observe)
    entries = cut_entries(tiny_tensors(2), rank, world_size)
    group = world_group(rank, world_size)
    try:
        save_checkpoint(root, 2, entries, {"iteration": 2}, group, files=files)
    except DamagedError as error:
        return f"{error.exit_code} {error}"
    return "saved"


def test_all_ranks_fail_together(rank_pool: RankPool, tmp_path: Path) -> None:
    save_tiny(tmp_path, 1)
    messages = rank_pool.run(2, save_or_message, root=str(tmp_path), fail_rank=1)
    assert messages[0] == messages[1]
    assert messages[0].startswith("3 rank 1: no space left writing")
    assert len(os.listdir(tmp_path / "attempts")) == 1
    assert holds_step(open_checkpoint(tmp_path), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_one_message(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        save_tiny(tmp_path, 1)


def test_a_save_path_that_is_a_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "save").write_text("")
    with pytest.raises(UserError, match="save"):
        save_tiny(tmp_path / "save", 1)


def test_a_save_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    request = request_for(tmp_path, "a", 1, 2)
    request.directory.rmdir()
    with pytest.raises(UserError, match="not shared: rank 1 does not see"):
        write_rank(request, (), FILES)


def test_a_load_that_fails_leaves_no_half_result(tmp_path: Path) -> None:
    save_cut(tmp_path, 1, 2)
    save_cut(tmp_path, 2, 2)
    seen = []

    def load(checkpoint: object) -> int:
        seen.append(checkpoint)
        if len(seen) == 1:
            raise DamagedError("a byte is wrong")
        return len(seen)

    loaded = load_newest(tmp_path, local_group("world"), load)
    assert (loaded.value, loaded.checkpoint.step) == (2, 1)
    assert "a byte is wrong" in loaded.passed_over[0].reason
