"""However ranks fail, one message, the same code on all of them, and no hang.

The ranks are processes without a launcher: nobody kills the ones that would hang.
"""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mesh.guard import RunStatus, describe, run_guarded
from megatron_lite.mesh.launch import run_program
from megatron_lite.mesh.world import WorldInfo
from tests.mesh.rank_program import main
from tests.pool import REPOSITORY, RankExit, fork_ranks, run_ranks

PROGRAM = "tests/mesh/rank_program.py"


def stand_still() -> int:
    return 0


@pytest.fixture(scope="module", autouse=True)
def loaded_server() -> None:
    """The first fork waits until torch is loaded; that is in no test's time."""
    fork_ranks(1, stand_still)


def fail(case: str, n: int = 2, save_dir: Path | None = None) -> list[RankExit]:
    return fork_ranks(n, main, case, None if save_dir is None else str(save_dir))


def codes(exits: list[RankExit]) -> list[int]:
    return [exit.code for exit in exits]


def spoken(exits: list[RankExit]) -> list[int]:
    return [rank for rank, exit in enumerate(exits) if exit.stdout + exit.stderr]


def test_a_good_run_ends_with_0_and_without_a_word(tmp_path: Path) -> None:
    exits = fail("none", save_dir=tmp_path)
    assert codes(exits) == [0, 0], exits
    assert spoken(exits) == []
    assert json.loads((tmp_path / "exit_status.json").read_text()) == {
        "code": 0,
        "reason": "done",
        "rank": 0,
        "step": 3,
    }


def test_a_refused_command_line_is_told_once_by_rank_0_within_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
    exits = fail("refused", n=4, save_dir=tmp_path / "save")
    assert time.monotonic() - start < 5
    assert codes(exits) == [2, 2, 2, 2]
    assert spoken(exits) == [0]
    assert exits[0].stderr == "the flags do not fit\n"
    status = json.loads((tmp_path / "save" / "exit_status.json").read_text())
    assert status == {"code": 2, "reason": "the flags do not fit", "rank": 0, "step": None}


def test_silent_ranks_wait_for_a_slow_speaker() -> None:
    exits = fail("refused-slowly-on-0")
    assert codes(exits) == [2, 2]
    assert spoken(exits) == [0]


def test_a_rank_that_fails_alone_before_the_ranks_meet_is_heard() -> None:
    exits = fail("alone-before-meeting")
    assert codes(exits) == [2, 2], exits
    assert spoken(exits) == [1]
    assert exits[1].stderr == "only this rank lacks its file\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_with_a_bad_token_stops_all_with_its_message_alone(
    rank: int, tmp_path: Path
) -> None:
    exits = fail(f"token-{rank}", n=3, save_dir=tmp_path)
    assert codes(exits) == [3, 3, 3], exits
    assert spoken(exits) == [rank], exits
    message = f"rank {rank}, step 2, forward: token 99 is out of range"
    assert exits[rank].stderr == message + "\n"
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert status == {"code": 3, "reason": message, "rank": rank, "step": 2}


def test_an_error_of_every_rank_is_told_once_by_whole_programs() -> None:
    exits = run_ranks(2, ["token"], timeout=100, program=PROGRAM)
    assert codes(exits) == [3, 3]
    assert len(spoken(exits)) == 1


def test_a_defect_keeps_its_traceback_marked_with_the_rank() -> None:
    exits = fail("bug-1", n=3)
    assert codes(exits) == [1, 1, 1], exits
    assert spoken(exits) == [1]
    lines = exits[1].stderr.splitlines()
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert any("ZeroDivisionError: a planted defect" in line for line in lines)
    assert any("rank_program.py" in line for line in lines)
    assert lines[-1] == "[rank 1] rank 1, step 2, forward: failed with ZeroDivisionError"


def test_peers_of_a_killed_rank_end_with_one_traceback() -> None:
    exits = fail("killed-1", n=3)
    assert codes(exits) == [1, -9, 1]
    assert len(spoken(exits)) == 1


def test_a_stop_after_saving_ends_with_75_and_one_line() -> None:
    exits = fail("stopped")
    assert codes(exits) == [75, 75]
    assert [exits[rank].stderr for rank in spoken(exits)] == [
        "stopped on SIGTERM after saving step 2\n"
    ]


def test_a_full_disk_is_told_with_code_3_and_the_file() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "iter_0000002/shard")
    failure = describe(error, WorldInfo(rank=1, world_size=2), RunStatus(step=2, phase="save"))
    assert failure.code == 3
    assert failure.reason.startswith("rank 1, step 2, save: no space left for iter_0000002/shard")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EROFS])
def test_a_file_that_the_user_has_to_set_right_is_told_without_a_traceback(number: int) -> None:
    error = OSError(number, os.strerror(number), "data/x.idx")
    failure = describe(error, WorldInfo(), RunStatus())
    assert (failure.code, failure.reason) == (2, f"data/x.idx: {os.strerror(number)}")


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 22.8 TiB"),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory_is_told_without_a_traceback(error: Exception) -> None:
    failure = describe(error, WorldInfo(), RunStatus())
    assert (failure.code, failure.reason) == (2, f"not enough memory: {error}")
    failure = describe(error, WorldInfo(), RunStatus(step=3, phase="training"))
    assert failure.code == 1
    assert failure.reason == f"rank 0, step 3, training: not enough memory: {error}"


def test_one_process_tells_its_error_and_writes_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> int:
        raise UserError("no such file")

    assert run_guarded(program, WorldInfo(), tmp_path) == 2
    assert capsys.readouterr().err == "no such file\n"
    assert json.loads((tmp_path / "exit_status.json").read_text())["code"] == 2


def test_an_interrupt_says_that_it_saves_nothing(tmp_path: Path) -> None:
    told = describe(KeyboardInterrupt(), WorldInfo(), RunStatus(save_dir=tmp_path, step=3))
    assert (told.code, told.step) == (130, 3)
    assert "nothing is saved" in told.reason and "SIGTERM saves first" in told.reason
    assert describe(KeyboardInterrupt(), WorldInfo(), RunStatus()).reason == "interrupted"


def test_the_programs_own_exit_is_passed_on() -> None:
    def program() -> int:
        raise SystemExit(0)

    assert run_guarded(program, WorldInfo(), status=RunStatus()) == 0


def test_torchrun_does_not_kill_the_speaker(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node=2", PROGRAM, "token-1", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 1
    message = "rank 1, step 2, forward: token 99 is out of range"
    assert ended.stderr.count(message) == 1
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert status == {"code": 3, "reason": message, "rank": 1, "step": 2}


def test_an_unreadable_environment_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def program(info: WorldInfo, status: RunStatus) -> int:
        raise AssertionError("not reached")

    assert run_program(program, {"RANK": "one", "WORLD_SIZE": "2"}) == 2
    assert capsys.readouterr().err == "RANK='one' in the environment is not a number\n"


def test_a_program_gets_its_place(tmp_path: Path) -> None:
    def program(info: WorldInfo, status: RunStatus) -> int:
        status.save_dir, status.step = tmp_path, 7
        return info.world_size

    assert run_program(program, {}) == 1
    assert json.loads((tmp_path / "exit_status.json").read_text())["step"] == 7


STREAMS = """
import os, sys
from megatron_lite.errors import UserError
from megatron_lite.mesh.guard import run_guarded
from megatron_lite.mesh.world import WorldInfo
def main():
    path = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"from a library")
        except OSError:
            pass
    assert path > 2
    raise UserError("told")
sys.exit(run_guarded(main, WorldInfo(), sys.argv[2]))
"""


@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full"]
)
def test_closed_and_full_outputs_change_no_code_and_hurt_no_file(
    tmp_path: Path, redirection: str
) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "program.py").write_text(STREAMS)
    command = f"{sys.executable} program.py data save {redirection}"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, capture_output=True)
    reason = json.loads((tmp_path / "save" / "exit_status.json").read_text())["reason"]
    assert (done.returncode, reason) == (2, "told"), done.stderr
    assert (tmp_path / "data").read_bytes() == b""


WATCHED = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from megatron_lite.mesh import guard
from megatron_lite.mesh.failure_board import StoreBoard
from megatron_lite.mesh.world import WorldInfo

guard._WATCH_S, guard._LEAVE_WAIT_S = 0.0, float(sys.argv[2])
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)

class Slow(StoreBoard):
    def posted(self):
        store.wait(["never"], timedelta(seconds=float(sys.argv[1])))

status = guard.RunStatus()
status.attach(Slow(store, 2))

def main():
    time.sleep(0.2)
    print("done")
    return 5

sys.exit(guard.run_guarded(main, WorldInfo(0, 2, 0, 2, launcher="test"), status=status))
"""


@pytest.mark.parametrize(
    ("asks_s", "waits_s"), [("0.1", "20"), ("0.25", "20"), ("0.5", "20"), ("600", "0.5")]
)
def test_a_watcher_inside_a_call_of_the_store_aborts_no_finished_run(
    asks_s: str, waits_s: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED, asks_s, waits_s],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 5, ended.stderr
    assert ended.stdout == "done\n"
    assert "terminate called" not in ended.stderr
