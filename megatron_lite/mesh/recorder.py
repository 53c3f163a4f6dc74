"""A record of the collectives that a rank started, in order.

Tests compare it with the closed formula of a layout (nothing extra is sent), telemetry
sums it up. One entry per collective, never per message; `elements` counts the full,
unsharded message, so an all-reduce of n equals a reduce-scatter plus an all-gather of n.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective as this rank started it.

    `op` is the function's name in `collectives.py`, with the reduction where it has one
    ("all_reduce.sum", "all_gather"); `group` the group's name ("tp"); `elements` the full
    message (all-reduce n, all-gather output, reduce-scatter and all-to-all input);
    `dtype` without the torch prefix ("bfloat16"); `phase` what the caller was doing.
    """

    op: str
    group: str
    elements: int
    dtype: str
    phase: str


@dataclass
class Recorder:
    """Collects records while `enabled`; shared by all groups of one rank."""

    enabled: bool = True
    records: list[CollectiveRecord] = field(default_factory=list, repr=False)
    current_phase: str = ""

    def record(self, op: str, group: str, elements: int, dtype: str) -> None:
        """Append one collective under the phase in force."""
        if self.enabled:
            self.records.append(CollectiveRecord(op, group, elements, dtype, self.current_phase))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside; the phase before it is restored afterwards.

        The phase belongs to the recorder and not to a thread: autograd may run a backward
        on a thread of its own while the caller waits inside the phase.
        """
        before, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = before

    def clear(self) -> None:
        """Forget what was recorded."""
        self.records.clear()

    def counts(self) -> Counter[tuple[str, str, str]]:
        """Number of collectives by (phase, op, group)."""
        return Counter((entry.phase, entry.op, entry.group) for entry in self.records)

    def elements(self) -> Counter[tuple[str, str, str]]:
        """Elements of the full messages, summed by (phase, op, group)."""
        total: Counter[tuple[str, str, str]] = Counter()
        for entry in self.records:
            total[entry.phase, entry.op, entry.group] += entry.elements
        return total
