"""Stop requests: signals, --exit-interval and --exit-duration-in-mins, agreed by all ranks.

A handler only notes the signal; nothing is saved or communicated inside it, because it
may arrive in the middle of a collective. At the end of each step every rank contributes
`local_vote` to the reduction that closes the step, and `decide` maps the reduced value to
the same order everywhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from megatron_lite.errors import RunStopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

EXIT_DONE = 0
EXIT_FAILED = 1

# Votes survive a sum as well as a maximum: one signal outweighs a duration vote of each of
# up to 65,535 ranks. News of a save is no wish to stop: it lies above both, in digits of its
# own, and every rank may have it beside a wish (fp64 holds all of them exactly).
NO_VOTE = 0.0
DURATION_VOTE = 1.0
SIGNAL_VOTE = 65536.0
NEWS_VOTE = 2.0**32


def has_news(reduced_vote: float) -> bool:
    """Whether a rank knows that a save in the background has ended."""
    return reduced_vote >= NEWS_VOTE


class StopSignals:
    """Note the stop signals while the block runs; earlier handlers come back afterwards.

    A child process forked inside the block (a data worker) that gets such a signal dies of
    it as if no handler were there, unless it called `shield_worker`.

    Attributes:
        received: the first signal noted, None so far.
    """

    def __init__(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = tuple(dict.fromkeys(signals))
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self.received: signal.Signals | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received = signal.Signals(number)

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back.
            restored = signal.SIG_DFL if handler is None else handler
            signal.signal(number, restored)
        self._previous.clear()


def shield_worker() -> None:
    """Ignore the stop signals in a data worker, first thing after the fork.

    A signal to the whole process group must not take the data away from the step that is
    still to be finished; the worker ends when its owner does.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class StopOrder:
    """Stop after this step, the same on every rank.

    Attributes:
        reason: "signal", "exit_interval" or "exit_duration".
        exit_code: of every rank: 0, 75 (saved, start me again) or 1 (nothing saved).
        save: whether to save before leaving.
        message: one line for the console.
    """

    reason: str
    exit_code: int
    save: bool
    message: str


class StopDecision:
    """When to stop.

    Args:
        signals: the noted signals of this rank.
        can_save: `--save` was given.
        exit_interval: stop after a step that it divides; None = never.
        exit_duration_in_mins: stop after this time; None = never.
        news: whether this rank knows of the end of a save in the background.
        clock: monotonic seconds; the duration counts from now.
    """

    def __init__(
        self,
        signals: StopSignals,
        *,
        can_save: bool,
        exit_interval: int | None = None,
        exit_duration_in_mins: float | None = None,
        news: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._can_save = can_save
        self._exit_interval = exit_interval
        self._exit_duration_in_mins = exit_duration_in_mins
        self._news = news
        self._clock = clock
        self._begin = clock()

    def local_vote(self) -> float:
        """What this rank adds to the step's closing reduction (sum or maximum)."""
        return self._wish_to_stop() + (NEWS_VOTE if self._news() else NO_VOTE)

    def _wish_to_stop(self) -> float:
        if self._signals.received is not None:
            return SIGNAL_VOTE
        limit = self._exit_duration_in_mins
        if limit is not None and self._clock() - self._begin >= limit * 60.0:
            return DURATION_VOTE
        return NO_VOTE

    def decide(self, reduced_vote: float, iteration: int) -> StopOrder | None:
        """Map the reduced vote and the finished iteration to an order; None = go on.

        Of several reasons the signal wins: after it somebody has to start the run again.
        """
        reduced_vote %= NEWS_VOTE
        if reduced_vote >= SIGNAL_VOTE:
            return self._signal_order(iteration)
        if reduced_vote >= DURATION_VOTE:
            minutes = self._exit_duration_in_mins
            message = f"exiting program after {minutes} minutes at iteration {iteration}"
            return StopOrder("exit_duration", EXIT_DONE, self._can_save, message)
        if self._exit_interval is not None and iteration % self._exit_interval == 0:
            message = f"exiting program at iteration {iteration}"
            return StopOrder("exit_interval", EXIT_DONE, self._can_save, message)
        return None

    def _signal_order(self, iteration: int) -> StopOrder:
        received = self._signals.received
        name = received.name if received is not None else "a signal on another rank"
        if self._can_save:
            message = (
                f"exiting program after receiving {name} at iteration {iteration}, saved; "
                "the same command continues"
            )
            return StopOrder("signal", RunStopped.exit_code, True, message)
        message = (
            f"exiting program after receiving {name} at iteration {iteration}; "
            "nothing is saved because --save is not given"
        )
        return StopOrder("signal", EXIT_FAILED, False, message)
