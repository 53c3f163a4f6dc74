"""Activations of a pipeline rank at the peak of a step, from its table.

A microbatch in a stage costs what the stage keeps between F and its backward, and less
between I and W. Which of them are alive together is the table's business, so the peak is
a walk along the rank's actions; messages are counted beside them, from the computation or
receive that makes them to the one that takes them, and the last that was sent per stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.telemetry.memory import StageMemory


@dataclass(frozen=True)
class Alive:
    """Bytes alive during one action."""

    activations_bytes: int
    messages_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.activations_bytes + self.messages_bytes


def walk_alive(
    actions: Sequence[Action], stages: Mapping[int, StageMemory], message_bytes: int
) -> list[Alive]:
    """Return what is alive during each action of a rank.

    Args:
        actions: of one rank, a verified table.
        stages: all of the model, by number.
        message_bytes: of every message between stages.
    """
    last = max(stages)
    kept = deferred = 0
    messages: set[tuple[str, int, int]] = set()  # of (direction, stage that takes it, microbatch)
    leaving: set[tuple[Kind, int]] = set()  # one per channel, until the next is sent
    alive = []
    for whole in actions:
        freed_kept = freed_deferred = working = 0
        taken = None
        for kind, number, microbatch in _of_microbatches(whole):
            stage = stages[number]
            if kind is Kind.RECV_F or kind is Kind.RECV_B:
                messages.add((kind.name[-1], number, microbatch))
            elif kind is Kind.SEND_F or kind is Kind.SEND_B:
                following = number + 1 if kind is Kind.SEND_F else number - 1
                messages.discard((kind.name[-1], following, microbatch))
                leaving.add((kind, number))
            elif kind is Kind.F:
                messages.discard(("F", number, microbatch))  # what the stage keeps first
                kept += stage.kept_bytes
                if number < last:
                    messages.add(("F", number + 1, microbatch))
            elif kind is Kind.W:
                freed_deferred = stage.deferred_bytes
            elif kind is Kind.I or kind is Kind.B:
                taken = ("B", number, microbatch)
                freed_kept, working = stage.kept_bytes, stage.working_bytes
                if kind is Kind.I:
                    # The one is freed while the other grows.
                    deferred += stage.deferred_bytes
                    working -= min(stage.kept_bytes, stage.deferred_bytes)
                if number > 0:
                    messages.add(("B", number - 1, microbatch))
        waiting = len(messages) + len(leaving)
        alive.append(Alive(kept + deferred + working, waiting * message_bytes))
        if taken is not None:
            messages.discard(taken)
        kept -= freed_kept
        deferred -= freed_deferred
    return alive


def _of_microbatches(action: Action) -> list[tuple[Kind, int, int]]:
    """Kind, stage and microbatch of an action that has them; a pair has those of both halves."""
    return [
        (single.kind, single.stage, single.microbatch)
        for single in action.singles
        if single.stage is not None and single.microbatch is not None
    ]


def peak_alive(
    actions: Sequence[Action], stages: Mapping[int, StageMemory], message_bytes: int
) -> Alive:
    """Return the greatest of `walk_alive`."""
    return max(walk_alive(actions, stages, message_bytes), key=lambda alive: alive.total_bytes)
