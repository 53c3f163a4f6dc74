"""Saving as a run does it: in both modes, with failures, and beside another run."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import open_checkpoint
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.fence import take_membership
from megatron_lite.checkpoint.files import FileSystem
from megatron_lite.checkpoint.snapshot import SnapshotBuffer
from megatron_lite.config.flags import parse_config
from megatron_lite.errors import UserError
from megatron_lite.resilience.signals import (
    NEWS_VOTE,
    SIGNAL_VOTE,
    StopDecision,
    StopSignals,
    has_news,
)
from megatron_lite.train.save_schedule import FIRST_STEPS, SaveSchedule
from tests.cases.ranks import program
from tests.cases.test_background import MODES
from tests.checkpoint.faulty import Fault, encode
from tests.checkpoint.test_background import is_alive
from tests.pool import RankExit, RankPool, fork_ranks
from tests.train.faults import faulty_program
from tests.train.program import LLAMA, RUN, train_rank

IN_MODES = pytest.mark.parametrize("mode", MODES)
FULL = errno.ENOSPC


def events(metrics: Path) -> list[tuple[str, int, dict[str, Any]]]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        (row["event"], row["iteration"], row)
        for row in rows
        if row["kind"] == "event" and row["event"].startswith("save")
    ]


class Run:
    """A run of two data-parallel ranks that saves every second step."""

    def __init__(self, directory: Path, mode: str, faults: list[Fault], *more: str):
        directory.mkdir(exist_ok=True)
        self.save, metrics = directory / "save", directory / "metrics.jsonl"
        argv = [*LLAMA, *RUN, "--eval-iters", "0", "--save", str(self.save), *MODES[mode]]
        argv += ["--save-interval", "2", "--metrics-jsonl", str(metrics), *more]
        exits: list[RankExit] = fork_ranks(2, faulty_program, argv, encode(faults))
        self.codes = {found.code for found in exits}
        self.stdout = "".join(found.stdout for found in exits)
        self.stderr = "".join(found.stderr for found in exits)
        self.events = events(metrics)
        self.names = [event[:2] for event in self.events]


def full_at(step: int) -> Fault:
    return Fault("write", rf"attempts/{step}-1-.*/rank00001\.safetensors", errno=FULL)


@IN_MODES
def test_rows_31_32_a_full_disk_stops_the_run_with_code_3_and_keeps_the_older_one(
    tmp_path: Path, mode: str
) -> None:
    run = Run(tmp_path, mode, [full_at(4)])
    assert run.codes == {3}
    assert "the checkpoint of step 4 was not saved: rank 1: no space left writing" in run.stderr
    assert "rank00001.safetensors" in run.stderr and "bytes free" in run.stderr
    assert run.stderr.count("no space left") == 1
    assert "Traceback" not in run.stderr
    assert run.names == [("save", 2), ("save_failed", 4)]
    assert published_steps(run.save) == [2]
    assert open_checkpoint(run.save).step == 2
    assert len(list((run.save / "attempts").iterdir())) == 1, "the attempt is swept"
    assert json.loads((run.save / "exit_status.json").read_text())["code"] == 3


@IN_MODES
def test_a_failed_save_may_be_passed_over_and_is_told_and_counted(
    tmp_path: Path, mode: str
) -> None:
    run = Run(tmp_path, mode, [full_at(4)], "--save-failure-policy", "continue")
    assert run.codes == {0}
    assert run.names == [("save", 2), ("save_failed", 4), ("save", 6), ("save", 8), ("save", 10)]
    failed = run.events[1][2]
    assert failed["in_a_row"] == 1 and "rank 1: no space left" in failed["reason"]
    assert "warning: the checkpoint of step 4 was not saved: rank 1: no space" in run.stdout
    assert "failure 1 of at most 3 in a row" in run.stdout


@IN_MODES
def test_a_run_whose_last_save_failed_does_not_end_well(tmp_path: Path, mode: str) -> None:
    run = Run(tmp_path, mode, [full_at(10)], "--save-failure-policy", "continue")
    assert run.codes == {3}
    assert run.names[-1] == ("save_failed", 10)
    assert "the checkpoint of step 10 was not saved" in run.stderr
    assert published_steps(run.save) == [8, 6, 4, 2]


@IN_MODES
def test_too_many_failed_saves_in_a_row_stop_the_run(tmp_path: Path, mode: str) -> None:
    faults = [full_at(step) for step in (2, 6, 8)]
    more = ("--save-failure-policy", "continue", "--max-failed-saves", "1")
    run = Run(tmp_path, mode, faults, *more)
    assert run.codes == {3}
    assert run.names == [("save_failed", 2), ("save", 4), ("save_failed", 6), ("save_failed", 8)]
    assert "2 saves have failed one after the other, --max-failed-saves 1" in run.stderr


@IN_MODES
def test_a_full_disk_under_the_finalizer_is_told_too(tmp_path: Path, mode: str) -> None:
    fault = Fault("write", r"attempts/4-1-.*/\.manifest\.json", errno=FULL)
    run = Run(tmp_path, mode, [fault])
    assert run.codes == {3}
    assert "the checkpoint of step 4 was not saved: no space left writing" in run.stderr
    assert published_steps(run.save) == [2]


@IN_MODES
def test_a_run_that_is_told_to_stop_waits_for_its_saves(tmp_path: Path, mode: str) -> None:
    """The signal comes to rank 0 while step 2 begins to be saved."""
    told = Fault("mkdir", "attempts/2-1-", 1, signal=signal.SIGTERM)
    run = Run(tmp_path, mode, [told])
    assert run.codes == {75}
    assert run.names == [("save", 2), ("save", 3)]
    assert published_steps(run.save) == [3, 2]
    assert "the same command continues" in run.stderr


@IN_MODES
def test_a_run_that_is_told_to_stop_and_cannot_save_has_failed(tmp_path: Path, mode: str) -> None:
    told = Fault("mkdir", "attempts/2-1-", 1, signal=signal.SIGTERM)
    run = Run(tmp_path, mode, [told, full_at(3)], "--save-failure-policy", "continue")
    assert run.codes == {3}
    assert run.names == [("save", 2), ("save_failed", 3)]
    assert "the same command continues" not in run.stderr


def test_a_failure_that_leaves_no_trace_in_the_attempt_reaches_the_other_ranks(
    tmp_path: Path,
) -> None:
    """The disk is so full that the marker cannot be written either."""
    run = Run(tmp_path, "async", [Fault("create", r"4-1-.*/\.?rank00001", errno=FULL)])
    assert run.codes == {3}
    assert "the checkpoint of step 4 was not saved: rank 1: no space left" in run.stderr
    assert published_steps(run.save) == [2]


def test_row_34_a_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    """The writers begin with step 2 when step 4 is done, which wants to save, too."""
    metrics = tmp_path / "metrics.jsonl"
    late = Fault("create", "attempts/2-1-", wait_for=(str(metrics), '"iteration": 4,'))
    run = Run(tmp_path, "async", [late], "--train-iters", "4")
    assert run.codes == {0}
    assert run.names == [("save", 2), ("save", 4)]
    first, second = (event[2] for event in run.events)
    assert second["waited_ms"] > first["waited_ms"]
    assert second["pause_ms"] >= second["waited_ms"]
    assert first["elapsed_ms"] >= first["pause_ms"] and first["bytes"] > 0
    assert published_steps(run.save) == [4, 2]


@IN_MODES
def test_no_process_outlives_a_run(tmp_path: Path, mode: str) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    run = Run(tmp_path, mode, [Fault("never", "", kill_all=str(pids))])
    assert run.codes == {0}
    found = [int(child.name) for child in pids.iterdir()]
    # Two ranks, the finalizer, and the writers.
    assert len(found) == {"sync": 3, "async": 5}[mode]
    assert not any(is_alive(pid) for pid in found)


@IN_MODES
def test_row_35_a_run_is_refused_where_another_one_lives(tmp_path: Path, mode: str) -> None:
    membership = take_membership(tmp_path / "save", FileSystem())
    argv = [*LLAMA, *RUN, "--save", str(tmp_path / "save"), "--save-interval", "5", *MODES[mode]]
    exits = fork_ranks(2, program, argv)
    membership.leave()
    assert {found.code for found in exits} == {2}
    told = "".join(found.stderr for found in exits)
    assert told.count("another run saves here (host ") == 1
    assert f"process {os.getpid()}, since" in told
    assert "Traceback" not in told
    assert published_steps(tmp_path / "save") == []


def test_replicas_share_the_writing_unless_told_otherwise(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    sizes = {}
    for name, more in (("shared", []), ("owner", ["--no-ckpt-fully-parallel-save"])):
        argv = [*LLAMA, *RUN, "--save", str(tmp_path / name), "--save-interval", "5", *more]
        rank_pool.run(2, train_rank, argv=[*argv, "--exit-interval", "5"])
        directory = open_checkpoint(tmp_path / name).directory
        sizes[name] = [
            (directory / f"rank{rank:05d}.safetensors").stat().st_size for rank in (0, 1)
        ]
    assert max(sizes["shared"]) < 1.1 * sum(sizes["shared"]) / 2
    assert sizes["owner"][1] < 1000 < sizes["owner"][0]
    one, two = (open_checkpoint(tmp_path / name) for name in sizes)
    assert all(one.read(name).equal(two.read(name)) for name in one.names)


def test_save_interval_auto_saves_soon_and_then_as_often_as_pays(tmp_path: Path) -> None:
    more = ("--save-interval", "auto", "--mean-time-between-failures", "1e9")
    run = Run(tmp_path, "async", [], *more)
    assert run.codes == {0}
    assert run.names == [("save", FIRST_STEPS), ("save", 10)], "then only at the end"
    assert "save interval auto: every " in run.stdout
    often = Run(tmp_path / "often", "sync", [], *more[:3], "0.001")
    assert often.codes == {0}
    assert [step for _, step in often.names] == list(range(FIRST_STEPS, 11))


def test_the_automatic_interval_follows_rank_0() -> None:
    words = ["--save-interval", "auto", "--mean-time-between-failures", "5000", "--async-save"]
    schedule = SaveSchedule(parse_config(words, {}), start=100, ranks=4)
    assert [step for step in range(100, 110) if schedule.is_due(step)] == list(range(105, 110))
    assert schedule.propose(1.0, 2.0) is None, "no step was measured"
    for _ in range(3):
        schedule.note_step(0.5)
    proposal = schedule.propose(1.0, 2.0)
    assert proposal is not None
    assert proposal["steps"] == pytest.approx(100 / 0.5, rel=0.02)
    schedule.begin()
    assert not schedule.is_due(10**9), "not before this one has ended"
    schedule.take(105, proposal)
    assert not schedule.is_due(105 + proposal["steps"] - 1)
    assert schedule.is_due(105 + proposal["steps"])
    slow = schedule.propose(1.0, 900.0)
    assert slow is not None and slow["steps"] == 1800, "not before the last one is written"
    schedule.take(200, None)
    assert schedule.is_due(200 + FIRST_STEPS), "after a failure soon again"


@pytest.mark.parametrize("ranks_with_news", [0, 1, 3, 65535])
@pytest.mark.parametrize("signals", [0, 1, 65535])
def test_news_of_a_save_is_no_wish_to_stop_and_hides_none(
    ranks_with_news: int, signals: int
) -> None:
    stop = StopDecision(StopSignals(), can_save=True)
    vote = ranks_with_news * NEWS_VOTE + signals * SIGNAL_VOTE
    assert has_news(vote) == (ranks_with_news > 0)
    assert (stop.decide(vote, 1) is not None) == (signals > 0)


def test_a_rank_votes_its_news() -> None:
    votes = [
        StopDecision(StopSignals(), can_save=True, news=lambda known=known: known).local_vote()
        for known in (False, True)
    ]
    assert votes == [0.0, NEWS_VOTE]


def test_too_little_memory_for_a_snapshot_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.checkpoint.snapshot.available_bytes", lambda: 100.0)
    with pytest.raises(UserError, match=r"--async-save: no \d+ bytes of memory"):
        SnapshotBuffer([])
