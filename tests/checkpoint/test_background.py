"""Writer and finalizer as processes: they finish what they have, and leave nothing behind."""

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import open_checkpoint
from megatron_lite.checkpoint.background import Finalizer, Writer
from megatron_lite.checkpoint.catalog import published_steps
from megatron_lite.checkpoint.finalizer import Job
from megatron_lite.checkpoint.pipes import IGNORED_SIGNALS, Child, Ended, Lines
from megatron_lite.checkpoint.snapshot import SnapshotBuffer
from megatron_lite.checkpoint.tensors import StateEntry
from megatron_lite.checkpoint.writer import describe_job
from megatron_lite.errors import DamagedError
from tests.checkpoint.faulty import Fault, encode
from tests.checkpoint.roles import Roles
from tests.checkpoint.test_crash_points import in_child
from tests.checkpoint.tiny import cut_entries, holds_step, tiny_tensors

FAULTY = "tests.checkpoint.faulty"


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


class Background:
    """A run of one rank that saves in the background."""

    def __init__(self, root: Path, writer_faults: list[Fault], finalizer_faults: list[Fault]):
        self.root = root
        self.buffer = SnapshotBuffer(cut_entries(tiny_tensors(0), 0, 1))
        memory = (self.buffer.descriptor, self.buffer.num_bytes)
        self.writer = Writer(memory, (FAULTY, "writer", encode(writer_faults)))
        self.finalizer = Finalizer((FAULTY, "finalizer", encode(finalizer_faults)))
        self.roles: list[Roles] = []

    def save(self, step: int) -> None:
        """Begin a save; the state changes at once."""
        self.writer.poll(None)
        roles = Roles(self.root, step)
        request = roles.begin()
        self.roles.append(roles)
        tensors = {name: tensor.clone() for name, tensor in tiny_tensors(step).items()}
        self.buffer.fill(cut_entries(tensors, 0, 1))
        self.writer.submit(describe_job(request, self.buffer.pieces, self.buffer.begins))
        self.finalizer.submit(Job(request, None, None))
        for tensor in tensors.values():
            tensor.fill_(-1)

    def close(self) -> None:
        """End the run."""
        self.writer.close()
        self.finalizer.close()
        self.buffer.close()
        for roles in self.roles:
            roles.let_go()


def test_processes_are_used_again_and_are_gone_at_the_end(tmp_path: Path) -> None:
    run = Background(tmp_path, [], [])
    pids = set()
    for step in (1, 2, 3):
        run.save(step)
        assert run.writer.poll(None)["failure"] is None
        assert run.finalizer.poll(None)["failure"] is None
        assert holds_step(open_checkpoint(tmp_path), step)
        pids.add((run.writer._child.pid, run.finalizer.pid))
    assert len(pids) == 1
    run.close()
    for pid in pids.pop():
        assert not Path(f"/proc/{pid}").exists(), "neither running nor a zombie"


def test_a_finalizer_that_is_stopped_is_ended_and_started_again(tmp_path: Path) -> None:
    run = Background(tmp_path / "save", [], [])
    run.save(1)
    assert run.finalizer.poll(None)["failure"] is None
    stopped = run.finalizer.pid
    assert stopped is not None
    run.finalizer._silence_seconds = 2.0
    os.kill(stopped, signal.SIGSTOP)
    run.save(2)
    assert run.finalizer.poll(None)["failure"] is None
    assert not is_alive(stopped) and run.finalizer.pid != stopped
    assert holds_step(open_checkpoint(run.root), 2)
    run.close()


def test_row_29_a_finalizer_that_dies_is_started_once_more_and_then_given_up(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    always = Fault("link", "published/2.json", 1, kill_all=str(pids))
    run = Background(tmp_path / "save", [], [always])
    run.save(1)
    assert run.finalizer.poll(None)["failure"] is None
    first = run.finalizer.pid
    os.kill(first, signal.SIGKILL)
    run.save(3)
    assert run.finalizer.poll(None)["failure"] is None
    assert run.finalizer.pid != first
    run.save(2)
    failure = run.finalizer.poll(None)["failure"]
    assert "ended by signal 9, twice; attempts/2-" in failure["message"]
    assert "stays until a later save or run sweeps it" in failure["message"]
    assert published_steps(tmp_path / "save") == [3, 1]
    run.save(4)
    assert run.finalizer.poll(None)["failure"] is None
    run.close()


def test_a_writer_that_dies_is_one_failed_save(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    once = Fault("write", "attempts/1-", 2, kill_all=str(pids))
    run = Background(tmp_path / "save", [once], [])
    run.save(1)
    failure = run.writer.poll(None)["failure"]
    assert "writer process ended by signal 9" in failure["message"]
    run.finalizer.abort(failure)
    assert "ended by signal 9" in run.finalizer.poll(None)["failure"]["message"]
    run.save(2)
    assert run.writer.poll(None)["failure"] is None
    assert run.finalizer.poll(None)["failure"] is None
    assert published_steps(tmp_path / "save") == [2]
    run.close()


def test_processes_that_cannot_be_started_are_one_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    run = Background(tmp_path / "save", [], [])
    with monkeypatch.context() as refused:
        refused.setattr(subprocess, "Popen", refuse)
        run.writer.start()
        run.save(1)
        for child, name in ((run.writer, "writer"), (run.finalizer, "finalizer")):
            failure = child.poll(None)["failure"]
            told = f"the {name} process cannot be started: Too many open files"
            assert failure["message"].startswith(told)
            left = "; attempts/1-" in failure["message"]
            assert left == (name == "finalizer")
    run.save(2)
    assert run.writer.poll(None)["failure"] is None
    assert run.finalizer.poll(None)["failure"] is None
    assert published_steps(tmp_path / "save") == [2]
    run.close()


def test_a_save_directory_that_is_gone_is_one_failed_save(tmp_path: Path) -> None:
    run = Background(tmp_path / "save", [], [])
    run.save(1)
    assert run.finalizer.poll(None)["failure"] is None
    request = Roles(tmp_path / "save", 2).begin()
    shutil.rmtree(tmp_path / "save")
    run.finalizer.submit(Job(request, None, None))
    failure = run.finalizer.poll(None)["failure"]
    assert failure["kind"] in ("UserError", "DamagedError")
    assert f"{request.directory}.lock: No such file" in failure["message"]
    run.close()


def test_signals_of_the_first_moment_do_not_end_a_process(tmp_path: Path) -> None:
    """Before it ignores them they are held, in it and not in the rank."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    run = Background(tmp_path / "save", [], [])
    run.save(1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    for pid in (run.writer._child.pid, run.finalizer.pid):
        for number in IGNORED_SIGNALS:
            os.kill(pid, number)
    assert run.writer.poll(None)["failure"] is None
    assert run.finalizer.poll(None)["failure"] is None
    run.close()


def begin_and_die(root: Path, late: Path, told: Path, with_fork: bool) -> None:
    """A rank that is killed before its writer has begun; a data worker keeps its pipes."""
    wait = Fault("create", "attempts/7-", 1, wait_for=(str(late), "go on"))
    run = Background(root, [wait], [])
    run.save(7)
    told.write_text(f"{run.writer._child.pid} {run.finalizer.pid}")
    if with_fork and os.fork() == 0:
        wait_until(lambda: not told.exists())
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("with_fork", [False, True], ids=["alone", "forked"])
def test_killed_ranks_leave_a_complete_checkpoint_and_no_process(
    tmp_path: Path, with_fork: bool
) -> None:
    root, late, told = (tmp_path / name for name in ("save", "late", "told"))
    assert in_child(partial(begin_and_die, root, late, told, with_fork)) == -9
    pids = [int(word) for word in told.read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    late.write_text("go on")
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert holds_step(open_checkpoint(root), 7)
    told.unlink()


def test_the_jobs_signals_do_not_reach_the_processes(tmp_path: Path) -> None:
    late = tmp_path / "late"
    wait = Fault("create", "attempts/1-", 1, wait_for=(str(late), "go on"))
    run = Background(tmp_path / "save", [wait], [])
    run.save(1)
    pids = (run.writer._child.pid, run.finalizer.pid)
    assert all(os.getpgid(pid) != os.getpgid(0) for pid in pids), "not in the job's group"
    wait_until(lambda: all(_ignores(pid) for pid in pids))
    for pid in pids:
        for number in IGNORED_SIGNALS:
            os.kill(pid, number)
    late.write_text("go on")
    assert run.finalizer.poll(None)["failure"] is None
    assert holds_step(open_checkpoint(tmp_path / "save"), 1)
    run.close()


def _ignores(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.split("SigIgn:\t")[1].split()[0], 16)
    return all(ignored >> (number - 1) & 1 for number in IGNORED_SIGNALS)


def test_a_snapshot_of_another_state_is_refused() -> None:
    one = [StateEntry("a", torch.zeros(3), (3,), (0,), True)]
    buffer = SnapshotBuffer(one)
    with pytest.raises(ValueError, match="a: not what the snapshot was made for"):
        buffer.fill([StateEntry("a", torch.zeros(4), (4,), (0,), True)])
    with pytest.raises(ValueError, match="2 pieces"):
        buffer.fill([*one, StateEntry("b", torch.zeros(3), (3,), (0,), True)])
    buffer.close()


def test_lines_are_bounded_and_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.checkpoint.pipes.MAX_LINE_BYTES", 64)
    for sent, told in ((b'{"a":NaN}\n', "not valid JSON"), (b"x" * 100, "more than 64 bytes")):
        read_end, write_end = os.pipe()
        os.write(write_end, sent)
        with pytest.raises(DamagedError, match=told):
            Lines(read_end).take(1.0)
        os.close(read_end)
        os.close(write_end)


def test_a_child_that_cannot_start_says_how_it_ended() -> None:
    child = Child(["megatron_lite.checkpoint.no_such_module"])
    with pytest.raises(Ended):
        child.take(None)
    assert child.ending() == "ended with code 1"
    child.close(1.0)
