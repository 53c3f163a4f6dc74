"""A transport with a clock: collectives take logical time on one link, computing its own.

Nothing sleeps and nothing is timed. Whoever computes advances the clock, an asynchronous
collective occupies the link from when it is started and the link is free, and a wait that
comes before its end moves the clock there: so much of it was exposed. The collectives
themselves run at once, so results are real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from megatron_lite.mesh import collectives

IGNORED = 64  # elements; counts and other scalars that a step sums on the side


@dataclass(eq=False)
class Link:
    """One link of a rank; times are in ticks.

    Attributes:
        per_element: ticks that one element of a message takes.
        now: the clock.
        exposed: ticks that were waited for, by purpose ("reduce", "gather").
    """

    per_element: float
    now: float = 0.0
    exposed: Counter[str] = field(default_factory=Counter)
    _free: float = 0.0

    def compute(self, ticks: float) -> None:
        """Let time pass."""
        self.now += ticks

    def start(self, elements: int) -> float:
        """Queue a message; return when it will have arrived."""
        self._free = max(self._free, self.now) + elements * self.per_element
        return self._free

    def wait(self, purpose: str, end: float) -> None:
        """Let time pass until `end`."""
        waited = max(0.0, end - self.now)
        self.exposed[purpose] += waited  # type: ignore[assignment]  # ticks may be fractions
        self.now += waited


@dataclass(eq=False)
class DelayedWork:
    """The handle of a collective that has run and is still on the link."""

    link: Link
    work: Any
    purpose: str
    end: float
    waited: bool = False

    def wait(self) -> object:
        """Wait by the link's clock, once."""
        if not self.waited:
            self.link.wait(self.purpose, self.end)
        self.waited = True
        return self.work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _delayed(
    link: Link, collective: Callable[..., Any], message: int, purpose: str
) -> Callable[..., Any]:
    """The collective with its time; `message` is the argument that counts its elements."""

    def run(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        elements = args[message].numel()
        work = collective(*args, async_op=True, **kwargs)
        if elements <= IGNORED:
            return work if async_op else work.wait()
        delayed = DelayedWork(link, work, purpose, link.start(elements))
        return delayed if async_op else delayed.wait()

    return run


@contextmanager
def delayed_collectives(link: Link) -> Iterator[None]:
    """All collectives of this process go over the link."""
    dist = collectives.dist
    with ExitStack() as stack:
        for owner, name, message, purpose in (
            (dist, "all_reduce", 0, "reduce"),
            (dist, "all_to_all_single", 1, "reduce"),  # carries the reduce-scatter on gloo
            (collectives, "_all_gather", 0, "gather"),
            (collectives, "_reduce_scatter", 1, "reduce"),
        ):
            delayed = _delayed(link, getattr(owner, name), message, purpose)
            stack.enter_context(patch.object(owner, name, delayed))
        yield
