"""What ranks hold of their child processes: the writer of each, the finalizer of rank 0.

Both are started when they are first needed and used again. A handle answers without
waiting whether its child has something to say; one that died is one failure of a save,
never of the training. Torch-free.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_lite.checkpoint.finalizer import Job
from megatron_lite.checkpoint.pipes import Child, Ended

WRITER = ("megatron_lite.checkpoint.writer",)
FINALIZER = ("megatron_lite.checkpoint.finalizer",)
CLOSE_SECONDS = 5.0
# A finalizer gives an attempt up after 600 s without a change; one that is silent for longer
# is stopped or hangs.
SILENCE_SECONDS = 660.0
LATE_SECONDS = 5.0


def _failure(message: str) -> dict[str, str]:
    return {"kind": "DamagedError", "message": message}


def _left(job: Job) -> str:
    """What nobody has removed, for the message."""
    attempt = job.request.plan.attempt
    return f"; attempts/{attempt} is not published and stays until a later save or run sweeps it"


class Writer:
    """A rank's handle of its writer.

    Args:
        memory: descriptor and bytes of the snapshot.
        words: module and arguments of the process; tests have writers of their own.
    """

    def __init__(self, memory: tuple[int, int], words: Sequence[str] = WRITER):
        self._memory = memory
        self._words = words
        self._child: Child | None = None
        self._attempt: str | None = None
        self._reply: dict[str, Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it still reads the snapshot."""
        return self._attempt is not None

    def start(self) -> None:
        """Start the process if it is not there: it gets ready while the snapshot is taken."""
        with suppress(OSError):  # `submit` tries again, and then it is a failure of the save
            self._ready()

    def _ready(self) -> Child:
        if self._child is None:
            self._child = Child(self._words, [self._memory[0]])
        return self._child

    def submit(self, job: Mapping[str, Any]) -> None:
        """Ask for a write; the writer must not be busy."""
        assert not self.is_busy
        try:
            child = self._ready()
        except OSError as error:
            failure = _failure(f"the writer process cannot be started: {error.strerror}")
            self._reply = {"attempt": job["attempt"], "failure": failure}
            return
        self._attempt, self._reply = job["attempt"], None
        with suppress(Ended):  # `poll` tells it
            child.send({**job, "memory": self._memory[0], "memory_bytes": self._memory[1]})

    def poll(self, wait_seconds: float | None = 0.0) -> dict[str, Any] | None:
        """Return the reply to the last request, once it is there; None before."""
        if self._attempt is None or self._child is None:
            return self._reply
        try:
            reply = self._child.take(wait_seconds)
        except Ended:
            failure = _failure(f"the writer process {self._child.ending()}")
            self._child.close(0.0)
            self._child = None
            reply = {"attempt": self._attempt, "failure": failure}
        if reply is not None:
            self._attempt, self._reply = None, reply
        return self._reply

    def free(self, wait_seconds: float = LATE_SECONDS) -> None:
        """Have the snapshot free again, after the end of the attempt that it was written for.

        A process that still reads it hangs in its write, or is stopped: it is killed.
        """
        if self.poll(wait_seconds) is None and self._child is not None and self.is_busy:
            self._child.kill()
            self._child, self._attempt = None, None

    def close(self, wait_seconds: float = CLOSE_SECONDS) -> None:
        """Let the process end; it finishes a write that it has."""
        if self._child is not None:
            self._child.close(wait_seconds)
            self._child = None


class Finalizer:
    """Rank 0's handle of the finalizer.

    Args:
        words: module and arguments of the process; tests have finalizers of their own.
        silence_seconds: a finalizer that is waited for and silent for so long is ended and
            started again, as one that died.
    """

    def __init__(self, words: Sequence[str] = FINALIZER, silence_seconds: float = SILENCE_SECONDS):
        self._words = words
        self._silence_seconds = silence_seconds
        self._child: Child | None = None
        self._job: Job | None = None
        self._aborted: dict[str, str] | None = None
        self._restarted = False
        self._reply: dict[str, Any] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None while there is no process."""
        return None if self._child is None else self._child.pid

    def submit(self, job: Job) -> None:
        """Ask for the end of an attempt; the one before must have got its reply."""
        assert self._job is None
        self._job, self._reply, self._aborted, self._restarted = job, None, None, False
        self._send_job()

    def abort(self, failure: Mapping[str, str]) -> None:
        """Give the attempt up: a rank has failed in a way that left no trace in it."""
        if self._job is not None:
            self._aborted = {"kind": failure["kind"], "message": failure["message"]}
            self._send_abort()

    def poll(self, wait_seconds: float | None = 0.0) -> dict[str, Any] | None:
        """Return the reply to the last job, once it is there; None before."""
        while self._job is not None and self._child is not None:
            try:
                limit = self._silence_seconds if wait_seconds is None else wait_seconds
                reply = self._child.take(limit)
                if reply is None and wait_seconds is None:
                    self._child.kill()
                    raise Ended
            except Ended:
                ending = self._child.ending()
                self._child.close(0.0)
                self._child = None
                if self._restarted:
                    message = f"the finalizer process {ending}, twice{_left(self._job)}"
                    reply = {"bytes": 0, "notes": [], "failure": _failure(message)}
                else:
                    self._restarted = True
                    self._send_job()
                    continue
            if reply is not None:
                self._job, self._reply = None, reply
            break
        return self._reply

    def close(self, wait_seconds: float = CLOSE_SECONDS) -> None:
        """Let the process end; it finishes an attempt that it has."""
        if self._child is not None:
            self._child.close(wait_seconds)
            self._child = None

    def _send_job(self) -> None:
        assert self._job is not None
        if self._child is None:
            try:
                self._child = Child(self._words)
            except OSError as error:
                message = f"the finalizer process cannot be started: {error.strerror}"
                message += _left(self._job)
                self._reply = {"bytes": 0, "notes": [], "failure": _failure(message)}
                self._job = None
                return
        with suppress(Ended):  # `poll` tells it
            self._child.send(self._job.to_json())
        if self._aborted is not None:
            self._send_abort()

    def _send_abort(self) -> None:
        assert self._job is not None
        if self._child is not None and self._aborted is not None:
            abort = {"do": "abort", "attempt": self._job.request.plan.attempt, **self._aborted}
            with suppress(Ended):
                self._child.send(abort)
