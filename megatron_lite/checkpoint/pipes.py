"""Child processes that answer one JSON line with another, and their side of the pipes.

A rank talks so with its writer and with the finalizer. Lines are bounded and parsed
strictly. A child is of the training but not a part of it: the job's signals do not reach
it, it finishes what it has begun when its parent is gone, and then ends by itself.
Torch-free.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.strict_json import encode_json, parse_json
from megatron_lite.errors import DamagedError

MAX_LINE_BYTES = 256 * 2**20
IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
)
STOP: Mapping[str, str] = {"do": "stop"}
_READ_BYTES = 2**20
_PARENT_SECONDS = 1.0  # between looks whether the parent lives
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class Ended(Exception):
    """The other side is gone; nothing more will come."""


class Lines:
    """JSON lines arriving on a descriptor.

    Args:
        descriptor: a pipe's read end.
        parent: process whose end counts as the pipe's end: a forked process of it may
            still hold the write end. 0: nobody.
    """

    def __init__(self, descriptor: int, parent: int = 0):
        self._descriptor = descriptor
        self._parent = parent
        self._buffer = bytearray()
        self._searched = 0

    def take(self, wait_seconds: float | None = 0.0) -> Any:
        """Return the next line's value, None if none came in time (None: wait for ever).

        Raises:
            Ended: the other side is gone.
            DamagedError: a line is too long or not the JSON we write.
        """
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._buffer[: end + 1])
                del self._buffer[: end + 1]
                self._searched = 0
                return parse_json(line, "pipe", MAX_LINE_BYTES)
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE_BYTES:
                raise DamagedError(f"pipe: a line of more than {MAX_LINE_BYTES} bytes")
            rest = _PARENT_SECONDS if deadline is None else deadline - time.monotonic()
            if not self._is_readable(max(0.0, min(rest, _PARENT_SECONDS))):
                if self._parent and os.getppid() != self._parent:
                    raise Ended
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                continue
            data = os.read(self._descriptor, _READ_BYTES)
            if not data:
                raise Ended
            self._buffer += data

    def _is_readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))


def send_line(descriptor: int, value: Any) -> None:
    """Write one line.

    Raises:
        Ended: the other side is gone.
    """
    rest = memoryview(encode_json(value))
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BrokenPipeError:
        raise Ended from None


class Child:
    """A child process as its parent sees it.

    Args:
        words: what to run: a module's name and its arguments.
        pass_fds: descriptors that the child inherits under their numbers.
    """

    def __init__(self, words: Sequence[str], pass_fds: Sequence[int] = ()):
        paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
        # Held until the child ignores them: before, one to the job's group would end it.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", words[0], str(os.getpid()), *words[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=tuple(pass_fds),
                # Not in the job's process group: a signal to the group is not for it.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._lines = Lines(self._replies.fileno())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, value: Any) -> None:
        """Send a request.

        Raises:
            Ended: the child is gone.
        """
        send_line(self._requests.fileno(), value)

    def take(self, wait_seconds: float | None = 0.0) -> Any:
        """Return the next reply, None if none came in time.

        Raises:
            Ended: the child is gone, and so is what it had not said.
        """
        return self._lines.take(wait_seconds)

    def kill(self) -> None:
        """End the child at once, even a stopped one."""
        self._process.kill()
        self.close(1.0)

    def ending(self) -> str:
        """Say how the child ended, for a message."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return "closed its pipe"

    def close(self, wait_seconds: float) -> None:
        """Let the child end. One that is not idle finishes its work first, alone."""
        with suppress(Ended, OSError, ValueError):  # the last: it is closed already
            send_line(self._requests.fileno(), STOP)
        for pipe in (self._requests, self._replies):
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_seconds)


def ignore_signals() -> None:
    """First thing in a child: what stops the training must not stop what it saves."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
