"""When a run saves: every so many steps, or as often as pays (`--save-interval auto`).

Automatic: first after a few steps, which tell how long a step and a save take; then at
Daly's interval, decided by rank 0 after each save and taken over by all ranks in the
exchange that a save needs anyway.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from megatron_lite.checkpoint.interval import expected_mean_time, interval_steps, wasted_share
from megatron_lite.config.schema import Config

FIRST_STEPS = 5
REMEMBERED_STEPS = 50
AUTO = "auto"


class SaveSchedule:
    """The steps at which a run saves; the same on every rank.

    Args:
        start: iterations done before this process.
        ranks: of the whole job.
    """

    def __init__(self, config: Config, start: int, ranks: int):
        self._interval = config.save_interval
        self._in_background = config.async_save
        self._next: float = start + FIRST_STEPS
        self._mean_time_s = config.mean_time_between_failures or expected_mean_time(ranks)
        self._step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def is_due(self, iteration: int) -> bool:
        """Whether to save after this iteration."""
        if self._interval is None:
            return False
        if self._interval == AUTO:
            return iteration >= self._next
        return iteration % int(self._interval) == 0

    def note_step(self, seconds: float) -> None:
        """Remember how long a step took."""
        self._step_seconds.append(seconds)

    def begin(self) -> None:
        """A save has begun: the next is planned when it has ended."""
        self._next = math.inf

    def propose(self, pause_s: float, elapsed_s: float) -> dict[str, Any] | None:
        """On rank 0: the steps until the next save and a line that says why, as JSON."""
        if self._interval != AUTO or not self._step_seconds:
            return None
        step_s = median(self._step_seconds)
        least_s = elapsed_s if self._in_background else 0.0
        steps = interval_steps(pause_s, self._mean_time_s, step_s, least_s)
        waste = wasted_share(max(steps * step_s, 1e-9), pause_s, self._mean_time_s)
        text = (
            f"save interval auto: every {steps} steps (pause {pause_s:.3g} s, step {step_s:.3g} s, "
            f"a failure every {self._mean_time_s / 3600.0:.4g} h: {waste:.2%} of the time lost)"
        )
        return {"steps": steps, "text": text}

    def take(self, iteration: int, proposal: dict[str, Any] | None) -> None:
        """On all ranks: follow rank 0's proposal; without one try again soon."""
        self._next = iteration + (proposal["steps"] if proposal else FIRST_STEPS)
