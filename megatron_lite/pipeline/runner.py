"""The one loop that executes every schedule.

The runner knows nothing of models: each kind of action has a handler, and the table says
when it is called. It counts what it ran and says where it was when a handler fails, so
that an error on one rank of many names its rank, action and place in the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lite.errors import UserError
from megatron_lite.mesh.failure_board import WAITS
from megatron_lite.pipeline.actions import Action, Kind

Handler = Callable[[Action], None]


class ActionError(RuntimeError):
    """A handler failed; the message names rank, step and action, the cause is chained."""


@dataclass
class Runner:
    """Executes action lists on one rank.

    Attributes:
        rank: global rank, for messages.
        counts: actions executed so far, by kind; of a pair its halves.
        current: the action being executed, for watchdogs; None between runs.
        index, total, step: its place in the list, for watchdogs too.
        waiting: what it waits for in words, "" while it waits for nobody.
    """

    rank: int
    waiting: Callable[[], str] = lambda: ""
    counts: Counter[Kind] = field(default_factory=Counter)
    current: Action | None = None
    index: int = 0
    total: int = 0
    step: int = 0

    def where(self) -> str:
        """Say where this rank is, in words; "" between runs."""
        if self.current is None:
            return ""
        waits = self.waiting()
        place = f"step {self.step + 1}: {self.current} (action {self.index} of {self.total})"
        return f"{place} {WAITS} {waits}" if waits else place

    def run(
        self, actions: Sequence[Action], handlers: Mapping[Kind, Handler], step: int = 0
    ) -> None:
        """Call the handler of each action, in order.

        Args:
            actions: this rank's list of a verified schedule.
            handlers: one per kind that occurs.
            step: zero-based, for messages.

        Raises:
            ActionError: a handler failed with anything but a message for the user.
        """
        self.total, self.step = len(actions), step
        for index, action in enumerate(actions):
            self.index, self.current = index, action
            try:
                handlers[action.kind](action)
            except UserError:
                raise
            except Exception as error:
                raise ActionError(f"rank {self.rank}, {self.where()} failed: {error}") from error
            self.counts.update(single.kind for single in action.singles)
        self.current = None
