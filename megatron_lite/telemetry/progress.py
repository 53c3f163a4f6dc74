"""One live line on a terminal: how far, how fast, how long still, and the loss.

It is redrawn in place with a carriage return, never more often than ten times a second,
and wiped before anything else is printed. Not a terminal, not drawn: log files stay clean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

REDRAW_SECONDS = 0.1
SMOOTHING = 0.1  # weight of the newest iteration in the averaged iteration time
ERASE_LINE = "\r\x1b[K"


def format_duration(seconds: float) -> str:
    """h:mm:ss, with days in front when there are any."""
    whole = max(round(seconds), 0)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def format_rate(tokens_per_s: float) -> str:
    """Tokens per second with three significant digits and a unit."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_s >= limit:
            return f"{tokens_per_s / limit:.3g}{unit} tokens/s"
    return f"{tokens_per_s:.3g} tokens/s"


class ProgressLine:
    """The live line of one run.

    Args:
        stream: usually stderr; drawn only when it is a terminal.
        train_iters: the last iteration.
        clock: monotonic seconds.
    """

    def __init__(
        self, stream: TextIO, train_iters: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._train_iters = train_iters
        self._clock = clock
        self._drawn = False
        self._drawn_at = -REDRAW_SECONDS
        self._average_ms: float | None = None
        self._enabled = stream.isatty()

    def update(
        self, iteration: int, loss: float, elapsed_ms: float, tokens_per_s: float | None
    ) -> None:
        """Note an iteration and redraw when it is time (always after the last one)."""
        if not self._enabled:
            return
        if self._average_ms is None:
            self._average_ms = elapsed_ms
        else:
            self._average_ms += SMOOTHING * (elapsed_ms - self._average_ms)
        now = self._clock()
        if now - self._drawn_at < REDRAW_SECONDS and iteration < self._train_iters:
            return
        self._drawn_at = now
        remaining_s = (self._train_iters - iteration) * self._average_ms * 1e-3
        percent = 100 * iteration // max(self._train_iters, 1)
        rate = "" if tokens_per_s is None else f" | {format_rate(tokens_per_s)}"
        self._stream.write(
            f"{ERASE_LINE}{iteration}/{self._train_iters} {percent}% | loss {loss:.4f}{rate} | "
            f"{self._average_ms:.0f} ms | ETA {format_duration(remaining_s)}"
        )
        self._stream.flush()
        self._drawn = True

    def clear(self) -> None:
        """Wipe the line so that other output starts at an empty one."""
        if self._drawn:
            self._stream.write(ERASE_LINE)
            self._stream.flush()
            self._drawn = False

    def close(self) -> None:
        """Leave the last state on the screen and go to the next line."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False
