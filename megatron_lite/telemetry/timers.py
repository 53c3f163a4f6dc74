"""Named monotonic timers, summed between two printed tables.

The set of names is fixed when the timers are built, so that every rank's vector has the
same length and order and one gather is all a table costs. A timer above the wanted log
level costs one comparison. No clock is read elsewhere: tests pass their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron_lite.telemetry.lines import format_timer_table

NOT_RUN_MS = -1.0

# Megatron's names and levels of the parts of a step that we time.
STEP_TIMERS: Mapping[str, int] = {
    "interval-time": 0,
    "save-checkpoint": 0,
    "evaluate": 0,
    "forward-backward": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
    "moe-dispatch": 2,
    "all-grads-sync": 2,
    "layernorm-grads-all-reduce": 2,
    "optimizer-clip-main-grad": 2,
    "optimizer-inner-step": 2,
}


class Timers:
    """Timers of one rank.

    Args:
        names: name -> level (0..2); the order is the table's.
        level: `--timing-log-level`: timers above it do nothing.
        clock: monotonic seconds.
        synchronize: called before each reading so that device work is inside the timer
            that launched it; None on the CPU. It stalls the device: keep it for level > 0.
    """

    def __init__(
        self,
        names: Mapping[str, int],
        level: int,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._names = {name: wanted for name, wanted in names.items() if wanted <= level}
        self._levels = dict(names)
        self._clock = clock
        self._synchronize = synchronize
        self._sums: dict[str, float] = {}
        # A part may run in two lanes at once; each has its own start.
        self._started: dict[tuple[str, int], float] = {}
        self._adding = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that are measured at this level, in table order."""
        return tuple(self._names)

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def _is_measured(self, name: str) -> bool:
        if name in self._names:
            return True
        if name not in self._levels:
            raise KeyError(f"timer {name!r} is not in the table of timers")
        return False

    def start(self, name: str) -> None:
        """Start a timer; starting it twice is a defect and raises."""
        if not self._is_measured(name):
            return
        key = name, threading.get_ident()
        if key in self._started:
            raise RuntimeError(f"timer {name!r} is already running")
        self._started[key] = self._now()

    def stop(self, name: str) -> None:
        """Stop a running timer and add its time."""
        if not self._is_measured(name):
            return
        key = name, threading.get_ident()
        if key not in self._started:
            raise RuntimeError(f"timer {name!r} is not running")
        seconds = self._now() - self._started.pop(key)
        with self._adding:
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time a block; the time also counts when the block raises."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def read_ms(self, iterations: int = 1) -> list[float]:
        """Milliseconds per iteration in `names` order, -1 where a timer never ran; resets."""
        values = [
            self._sums[name] * 1e3 / iterations if name in self._sums else NOT_RUN_MS
            for name in self._names
        ]
        self._sums.clear()
        return values

    def table(
        self,
        gather: Callable[[Sequence[float]], Sequence[Sequence[float]]],
        iterations: int = 1,
        option: str = "minmax",
    ) -> str:
        """Read, gather over ranks and format; every rank must call it at the same step.

        Args:
            gather: this rank's vector -> the vectors of all ranks in rank order.
            iterations: the sums are divided by it.
            option: `--timing-log-option`.

        Comm: one gather of len(names) floats; none when no timer is measured.
        """
        if not self._names:
            return ""
        by_rank = gather(self.read_ms(iterations))
        columns = zip(*by_rank, strict=True)
        return format_timer_table(
            {name: list(times) for name, times in zip(self._names, columns, strict=True)}, option
        )
