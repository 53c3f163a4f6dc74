"""The last words of a run: one message, one exit code, no rank left behind.

Of the ranks that fail together one speaks; the others wait for its message and leave with
the same code, so that a launcher cannot kill the speaker first. A rank that is healthy but
blocked, because a peer is gone, is ended by its watcher. Invariant: a message is printed
before any other rank learns of the failure, so it stands last.
"""

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_lite.errors import RunStopped, UserError
from megatron_lite.mesh.failure_board import (
    MOST_ASKED,
    WAITS,
    Failure,
    FailureBoard,
    node_board,
    write_atomically,
)
from megatron_lite.mesh.world import WorldInfo

SPEAKER_WAIT_S = 15.0  # for the speaker's message, by those who stay silent
_LEAVE_WAIT_S = 5.0  # for the readers of a board that dies with this process, or its own
_POLL_S = 0.05
_ROLL_CALL_S = 4.0  # for every rank to say where it is
_MOST_SHOWN = 64
_WATCH_S = 0.5  # at a few hundred ranks; slower for more, the store is one process
_WATCH_MAX_S = 5.0
# Files that the user named and has to set right: permissions, folders in the place of files.
_USERS_OWN = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
_UNWIND_S = 2.0  # for a rank to notice by itself that a peer is gone
_STOPPED_UNWIND_S = 30.0  # ... that the run stops after saving: nothing is wrong


@dataclass
class RunStatus:
    """Where a run is, for its last words; the program keeps it up to date.

    `save_dir` gets `exit_status.json`; `step` is the iteration in progress, None before
    the first; `phase` names what the program is doing; `where` tells the place inside a step,
    which a rank is asked for when another one waits for it in vain.
    """

    save_dir: Path | None = None
    step: int | None = None
    phase: str = ""
    boards: list[FailureBoard] = field(default_factory=list)
    where: Callable[[], str] = lambda: ""

    def attach(self, board: FailureBoard) -> None:
        """Add a board that more ranks see than those before it."""
        self.boards.append(board)


def run_guarded(
    main: Callable[[], int],
    info: WorldInfo,
    save_dir: str | Path | None = None,
    *,
    status: RunStatus | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run the program on this rank and return the code to exit with.

    Errors of the user (`UserError` and its kin, no space left) are told once, without a
    traceback; any other exception keeps its traceback, each line marked with the rank.
    With a save directory the reason is also written to `exit_status.json` in it.

    Args:
        main: the program; returns its exit code.
        info: this rank's place.
        save_dir: of the run, where it is known before `main` runs.
        status: shared with `main`, which sets `save_dir` and `step` when it knows them and
            hands it to `init_distributed`.
        environ: tells runs on one node apart; the process's own by default.
    """
    _open_standard_streams()
    status = status or RunStatus()
    if save_dir is not None:
        status.save_dir = Path(save_dir)
    if info.world_size > 1:
        environ = os.environ if environ is None else environ
        status.boards.insert(0, node_board(environ, info.local_world_size))
    watcher = _Watcher(info, status)
    watcher.start()
    try:
        code = main()
    except SystemExit as stop:
        watcher.stop()
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        watcher.stop()
        code = _settle(error, info, status)
        _bound_exit(info, code)
        watcher.end(code)
        return code
    watcher.stop()
    if info.rank == 0:
        reason = "done" if code == 0 else f"ended with code {code}"
        _write_exit_status(status, Failure(code, reason, info.rank, status.step))
    watcher.end(code)
    return code


def _open_standard_streams() -> None:
    """Give closed standard streams (`>&-`, daemons) a place to write to.

    Otherwise the next file that is opened gets descriptor 1 or 2, and whatever a library
    prints goes into it: an index, a checkpoint.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            break
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def describe(error: BaseException, info: WorldInfo, status: RunStatus) -> Failure:
    """The exit code and the whole message that belong to an exception."""
    if isinstance(error, RunStopped):
        return Failure(error.exit_code, str(error), info.rank, status.step)
    place = _place(info, status)
    if isinstance(error, UserError):
        return Failure(error.exit_code, place + str(error), info.rank, status.step)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return Failure(3, f"{place}no space left{where} ({error})", info.rank, status.step)
    if isinstance(error, OSError) and error.filename and error.errno in _USERS_OWN:
        return Failure(2, f"{place}{error.filename}: {error.strerror}", info.rank, status.step)
    if _is_out_of_memory(error):
        # Before the first step the flags ask for too much; later it may be the machine.
        code = UserError.exit_code if status.step is None else 1
        reason = str(error).partition("\n")[0]
        return Failure(code, f"{place}not enough memory: {reason}", info.rank, status.step)
    if isinstance(error, KeyboardInterrupt):
        # A request to save is SIGTERM; Ctrl-C ends at once, in the middle of a step.
        reason = "interrupted by SIGINT, nothing is saved (SIGTERM saves first)"
        return Failure(130, reason if status.save_dir else "interrupted", info.rank, status.step)
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    text += f"\n{place or f'rank {info.rank}: '}failed with {type(error).__name__}"
    if info.world_size > 1:
        text = "\n".join(f"[rank {info.rank}] {line}" for line in text.split("\n"))
    return Failure(1, text, info.rank, status.step)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch (not imported here) found no memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _place(info: WorldInfo, status: RunStatus) -> str:
    """Rank, step and phase of a failure; nothing before the first step, where all ranks
    do the same."""
    if status.step is None:
        return ""
    phase = f", {status.phase}" if status.phase else ""
    return f"rank {info.rank}, step {status.step}{phase}: "


def _settle(error: BaseException, info: WorldInfo, status: RunStatus) -> int:
    """Speak, or wait for who does; the code of the failure that was told."""
    failure = describe(error, info, status)
    boards = status.boards
    met = len(boards) > 1
    # Before the ranks met they all fail over the same thing, and rank 0 tells it. A rank
    # that fails alone speaks up when rank 0 has been silent for long enough.
    told = None
    if boards and not (met or info.rank == 0):
        told = _wait_for_word(info, status, SPEAKER_WAIT_S)
    if told is None and not _may_speak(boards):
        told = _wait_for_word(info, status, SPEAKER_WAIT_S)
    if told is None:
        # What is wrong with flags, data or numbers is no matter of who waits for whom.
        told = failure if isinstance(error, UserError) else _call_roll(failure, info, status)
        _speak(told, status)
    _leave(boards, wait=info.rank == 0)
    return told.code


def _may_speak(boards: list[FailureBoard]) -> bool:
    """Claim the word on the board that most ranks see, of those that still work."""
    for board in reversed(boards):
        try:
            return board.claim()
        except (OSError, RuntimeError):
            continue
    return True


def _speak(failure: Failure, status: RunStatus) -> None:
    """Tell the user, keep the reason, and only then let the others know."""
    # A full or closed output must keep nobody from hearing of the failure.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(failure.reason, file=sys.stderr, flush=True)
    _write_exit_status(status, failure)
    for board in status.boards:
        try:
            board.post(failure)
        except (OSError, RuntimeError):
            continue


def _word(boards: list[FailureBoard]) -> Failure | None:
    """The failure that any board knows of; a board that is gone knows none."""
    # A copy: the main thread may attach a board while the watcher looks.
    for board in list(boards):
        try:
            failure = board.posted()
        except (OSError, RuntimeError, ValueError):
            continue
        if failure is not None:
            return failure
    return None


def _call_roll(failure: Failure, info: WorldInfo, status: RunStatus) -> Failure:
    """Add where every rank is to a failure inside a step, and who must be the cause.

    A rank that was killed or stopped does not answer; of those that do, one that waits for
    nobody holds up the others.
    """
    here = status.where()
    if failure.code != 1 or not here or not status.boards:
        return failure
    board = status.boards[-1]
    asked = range(min(info.world_size, MOST_ASKED))
    deadline = time.monotonic() + _ROLL_CALL_S
    found: dict[int, str] = {}
    try:
        board.call()
        while len(found) < len(asked) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = {rank: text for rank, text in board.answers().items() if rank != info.rank}
    except (OSError, RuntimeError, ValueError):
        if not found:
            return failure
    found[info.rank] = here
    silent = [rank for rank in asked if rank not in found]
    busy = [rank for rank in found if WAITS not in found[rank]]
    cause = ""
    if silent:
        cause = f"ranks that do not answer, killed or stopped: {_shown_ranks(silent)}"
    elif busy:
        cause = f"ranks that wait for no other: {_shown_ranks(sorted(busy))}"
    lines = [f"  rank {rank}, {found[rank]}" for rank in sorted(found)[:_MOST_SHOWN]]
    text = "\n".join([failure.reason, "where the ranks are:", *lines, *([cause] if cause else [])])
    return replace(failure, reason=text)


def _shown_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
    return ", ".join(map(str, ranks[:_MOST_SHOWN])) + more


def _answer(info: WorldInfo, status: RunStatus) -> bool:
    """Say where this rank is if somebody asks; whether it is said."""
    for board in list(status.boards):
        try:
            if board.called():
                board.answer(info.rank, status.where() or "not in a step")
                return True
        except (OSError, RuntimeError):
            continue
    return False


def _wait_for_word(info: WorldInfo, status: RunStatus, timeout_s: float) -> Failure | None:
    boards = status.boards
    answered = False
    deadline = time.monotonic() + timeout_s
    while True:
        answered = answered or _answer(info, status)
        failure = _word(boards)
        if failure is not None or time.monotonic() > deadline:
            return failure
        time.sleep(_POLL_S)


def _leave(boards: list[FailureBoard], wait: bool) -> None:
    """Sign off; rank 0, whose process may host the store, waits for the others to."""
    deadline = time.monotonic() + _LEAVE_WAIT_S
    for board in list(boards):
        try:
            board.leave()
            while wait and not board.all_left() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except (OSError, RuntimeError):
            continue


def _write_exit_status(status: RunStatus, failure: Failure) -> None:
    if status.save_dir is None:
        return
    try:
        status.save_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(status.save_dir / "exit_status.json", failure.to_json() + "\n")
    except OSError:
        # The failure may be this very directory; the message is out already.
        return


def _bound_exit(info: WorldInfo, code: int) -> None:
    """End the process even if taking down a broken process group never returns."""
    if info.world_size > 1:
        timer = threading.Timer(SPEAKER_WAIT_S, os._exit, (code,))
        timer.daemon = True
        timer.start()


class _Watcher:
    """A thread that ends this rank when another one has told of a failure.

    gloo notices that a peer is gone, NCCL and a rendezvous may wait for minutes; the main
    thread gets a moment to unwind, then the process ends without it.
    """

    def __init__(self, info: WorldInfo, status: RunStatus) -> None:
        self._info = info
        self._status = status
        self._stopped = threading.Event()
        self._interval_s = min(max(_WATCH_S, info.world_size / 512), _WATCH_MAX_S)
        self._thread = threading.Thread(target=self._watch, name="failure watcher", daemon=True)

    def start(self) -> None:
        """Watch from now on; one process has nobody to watch."""
        if self._info.world_size > 1:
            self._thread.start()

    def stop(self) -> None:
        """The main thread takes care of the end itself."""
        self._stopped.set()

    def end(self, code: int) -> None:
        """Wait for the thread, so that the interpreter may end; call after `stop`.

        It may be inside a call of the store. A thread that comes back from one while the
        interpreter is being taken down ends the whole process with an abort; one that does not
        come back in time must not live to see that, so the process ends here.
        """
        if not self._thread.is_alive():
            return
        self._thread.join(_LEAVE_WAIT_S)
        if self._thread.is_alive():
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    def _watch(self) -> None:
        answered = False
        while not self._stopped.wait(self._interval_s):
            answered = answered or _answer(self._info, self._status)
            failure = _word(self._status.boards)
            if failure is None:
                continue
            stopped = failure.code == RunStopped.exit_code
            if self._stopped.wait(_STOPPED_UNWIND_S if stopped else _UNWIND_S):
                return
            _leave(self._status.boards, wait=self._info.rank == 0)
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(failure.code)
