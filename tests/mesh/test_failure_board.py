"""The board of a node: late ranks still read it, the last one to leave clears it."""

import time
from pathlib import Path

import pytest

from megatron_lite.mesh.failure_board import DirectoryBoard, Failure


def test_a_rank_that_starts_just_after_the_failure_still_reads_it(tmp_path: Path) -> None:
    DirectoryBoard(tmp_path / "board", time.time(), 2).post(Failure(2, "refused", 0))
    late = DirectoryBoard(tmp_path / "board", time.time() + 2.0, 2)
    assert late.posted() == Failure(2, "refused", 0)
    of_another_run = DirectoryBoard(tmp_path / "board", time.time() + 60.0, 2)
    assert of_another_run.posted() is None


def test_the_last_rank_to_leave_clears_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = DirectoryBoard(tmp_path / "board", time.time(), 2)
    assert board.claim()
    board.post(Failure(2, "refused", 0))
    board.leave()
    assert board.posted() is not None
    monkeypatch.setattr("os.getpid", lambda: -1)  # the other rank
    board.leave()
    assert board.posted() is None
    assert not (tmp_path / "board").exists()


def test_a_roll_call_gathers_where_the_ranks_of_this_run_are(tmp_path: Path) -> None:
    board = DirectoryBoard(tmp_path / "board", time.time(), 2)
    assert not board.called()
    board.call()
    board.answer(1, "step 2, F0.1")
    assert board.called()
    assert board.answers() == {1: "step 2, F0.1"}
    of_another_run = DirectoryBoard(tmp_path / "board", time.time() + 60.0, 2)
    assert not of_another_run.called()
    assert of_another_run.answers() == {}
