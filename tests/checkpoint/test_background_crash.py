"""Killed at any file operation of rank, writer or finalizer: the old checkpoint or the new.

The parts of a save run in this process with file operations of their own (`roles.py`);
the disk of one part, or of all, dies just before the k-th operation. Real processes are
killed in `test_background.py`.
"""

from pathlib import Path

import pytest

from megatron_lite.checkpoint import find_checkpoint, open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.files import FileSystem
from tests.checkpoint.roles import Roles, become_run, close_locks, played_save
from tests.checkpoint.test_crash_points import Disk, Killed, LinklessFileSystem
from tests.checkpoint.tiny import holds_step

MODES = pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
KINDS = pytest.mark.parametrize("kind", [FileSystem, LinklessFileSystem], ids=["links", "no-links"])


def roles_with(root: Path, step: int, files: FileSystem, in_background: bool) -> Roles:
    """All parts of a run of two ranks on one disk."""
    return Roles(
        root, step, 2, in_background, rank_files=files, writer_files=files, finalizer_files=files
    )


def count_operations(root: Path, kind: type[FileSystem], in_background: bool) -> int:
    """File operations of the save of step 2 after that of step 1."""
    assert played_save(roles_with(root, 1, kind(), in_background))["failure"] is None
    disk = Disk()
    files = kind(disk.observe)
    assert played_save(roles_with(root, 2, files, in_background))["failure"] is None
    return disk.count


def newest(root: Path) -> int:
    """The step that loads, every bit compared."""
    step: int = find_checkpoint(root).step
    assert holds_step(open_checkpoint(root), step)
    return step


@MODES
@KINDS
@pytest.mark.parametrize("lose_unsynced", [False, True], ids=["killed", "power-lost"])
def test_rows_24_to_28_and_30_all_killed_at_any_operation_leave_the_old_or_the_new(
    tmp_path: Path, kind: type[FileSystem], in_background: bool, lose_unsynced: bool
) -> None:
    total = count_operations(tmp_path / "count", kind, in_background)
    assert total > 40
    outcomes = []
    for point in range(total):
        root = tmp_path / f"at{point}"
        played_save(roles_with(root, 1, kind(), in_background))
        files = kind(Disk(point, lose_unsynced=lose_unsynced).observe)
        with pytest.raises(Killed):
            played_save(roles_with(root, 2, files, in_background))
        close_locks(root)
        outcomes.append(newest(root))
        if kind is FileSystem:
            assert all(holds_step(open_checkpoint(root, s), s) for s in published_steps(root))
        # The next run goes on by itself, and sweeps what was left.
        become_run(root)
        if outcomes[-1] == 1:
            reply = played_save(roles_with(root, 2, kind(), in_background))
            assert reply["failure"] is None
        reply = played_save(roles_with(root, 3, kind(), in_background))
        assert reply["failure"] is None
        assert newest(root) == 3
        assert len(list((root / "attempts").iterdir())) == 1, "left-overs are swept"
    assert outcomes == sorted(outcomes), "once committed, always committed"
    assert set(outcomes) == {1, 2}


@MODES
@KINDS
def test_row_29_a_finalizer_killed_at_any_operation_and_started_again_publishes(
    tmp_path: Path, kind: type[FileSystem], in_background: bool
) -> None:
    disk = Disk()
    roles = Roles(tmp_path / "count", 1, 2, in_background, finalizer_files=kind(disk.observe))
    assert played_save(roles)["failure"] is None
    for point in range(disk.count):
        root = tmp_path / f"at{point}"
        roles = Roles(root, 1, 2, in_background, finalizer_files=kind(Disk(point).observe))
        request = roles.begin()
        roles.write(request)
        with pytest.raises(Killed):
            roles.finalize(request)
        close_locks(root)
        roles.lock, roles.finalizer_files = None, kind()
        reply = roles.finalize(request)
        roles.let_go()
        assert reply["failure"] is None, (point, reply)
        assert newest(root) == 1
        assert len(published_steps(root)) == 1


@KINDS
def test_rows_24_to_27_a_writer_killed_at_any_operation_costs_its_save_alone(
    tmp_path: Path, kind: type[FileSystem]
) -> None:
    """Before the shard, in it, before its fsync, before the receipt: nothing is published."""
    disk = Disk()
    assert played_save(Roles(tmp_path / "count", 1, 2, writer_files=kind(disk.observe)))
    steps = set()
    for point in range(disk.count):
        root = tmp_path / f"at{point}"
        played_save(Roles(root, 1, 2))
        roles = Roles(root, 2, 2, writer_files=kind(Disk(point).observe))
        request = roles.begin()
        with pytest.raises(Killed):
            roles.write(request)
        abort = {"do": "abort", "attempt": request.plan.attempt}
        abort |= {"kind": "DamagedError", "message": "the writer process ended by signal 9"}
        reply = roles.finalize(request, abort)
        roles.let_go()
        steps.add(newest(root))
        if newest(root) == 1:
            assert "ended by signal 9" in reply["failure"]["message"]
            assert not request.directory.exists()
        assert played_save(Roles(root, 3, 2))["failure"] is None
        assert newest(root) == 3
    # After the last rank's receipt is in place nothing of the writer is missing.
    assert steps == {1, 2}


def test_row_25_receipts_that_never_come_are_told_and_the_attempt_is_removed(
    tmp_path: Path,
) -> None:
    played_save(Roles(tmp_path, 1, 2))
    roles = Roles(tmp_path, 2, 2)
    request = roles.begin()
    roles.write(request, ranks=[0])
    reply = roles.finalize(request)
    roles.let_go()
    assert "no receipt of rank 1" in reply["failure"]["message"]
    assert not request.directory.exists()
    assert newest(tmp_path) == 1


def test_without_rank_0_complete_receipts_are_published_and_incomplete_ones_left(
    tmp_path: Path,
) -> None:
    roles = Roles(tmp_path, 1, 2)
    request = roles.begin()
    roles.write(request)
    assert roles.finalize(request, is_open=False)["failure"] is None
    roles.let_go()
    assert newest(tmp_path) == 1
    roles = Roles(tmp_path, 2, 2)
    request = roles.begin()
    roles.write(request, ranks=[1])
    assert "no receipt of rank 0" in roles.finalize(request, is_open=False)["failure"]["message"]
    roles.let_go()
    assert newest(tmp_path) == 1
    assert request.directory.exists(), "evidence, until a later run sweeps it"


def test_a_failed_rank_is_named_by_its_marker(tmp_path: Path) -> None:
    class FullDisk(FileSystem):
        """No space for shards."""

        def create(self, path: Path):  # type: ignore[no-untyped-def]
            if path.name == "rank00001.safetensors":
                raise OSError(28, "No space left on device", str(path))
            return super().create(path)

    roles = Roles(tmp_path, 1, 3, writer_files=FullDisk())
    request = roles.begin()
    replies = roles.write(request)
    assert [reply["failure"] is None for reply in replies] == [True, False, True]
    reply = roles.finalize(request)
    roles.let_go()
    assert reply["failure"]["kind"] == "DamagedError"
    assert reply["failure"]["message"].startswith("rank 1: no space left writing")
    assert not request.directory.exists()
