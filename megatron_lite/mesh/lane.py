"""A second lane of a rank: one long-lived thread for what runs beside the main thread.

Both halves of a pair talk to the same ranks. On one communicator their collectives would be
started in an order that depends on timing, and ranks would mistake them for one another; so
each lane has communicators of its own (`Group.communicator`), and within a lane the order is
that of the table. Whoever asks from inside the lane's thread is in it, all others are not:
also threads on which autograd runs backward passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Errand:
    """Work given to a lane."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; what it raises is for `wait`."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Return when the work is done, or raise what it raised."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Lane:
    """A thread that does one errand after another; it starts with the first."""

    def __init__(self) -> None:
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def is_here(self) -> bool:
        """Whether the caller runs in this lane."""
        return self._thread is threading.current_thread()

    def start(self, work: Callable[[], None]) -> Errand:
        """Have the work done beside the caller's own."""
        if self._thread is None:
            # A daemon: after a failure it may wait for ranks that never come.
            self._thread = threading.Thread(target=self._serve, name="second lane", daemon=True)
            self._thread.start()
        errand = Errand(work)
        self._errands.put(errand)
        return errand

    def close(self) -> None:
        """Let the thread end after its errands."""
        self._errands.put(None)

    def _serve(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand.run()
            # Nothing of a pass may live on until the next errand comes.
            del errand
