"""Activations of a pipeline rank at the peak of a step, from its table.

A microbatch in a stage costs what the stage keeps between F and its backward, and less
between I and W. Which of them are alive together is the table's business, so the peak is
a walk along the rank's actions; messages are counted beside them, from the posting of a
receive to the computation that takes it, and one per outgoing channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.telemetry.memory import StageMemory

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_TAKES = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}


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
        stages: of this rank, by number.
        message_bytes: of every message between stages.
    """
    kept = deferred = 0
    posted: set[tuple[Kind, int | None, int | None]] = set()
    leaving: set[tuple[Kind, int | None]] = set()
    alive = []
    for action in actions:
        freed_kept = freed_deferred = working = 0
        kind = action.kind
        taken = (_TAKES.get(kind, kind), action.stage, action.microbatch)
        if kind in (Kind.RECV_F, Kind.RECV_B):
            posted.add(taken)
        elif kind in _SENDS:
            leaving.add((kind, action.stage))
        elif kind in _TAKES or kind is Kind.W:
            assert action.stage is not None
            stage = stages[action.stage]
            if kind is Kind.F:
                posted.discard(taken)  # it is the first thing that the stage keeps
                kept += stage.kept_bytes
            elif kind is Kind.W:
                freed_deferred = stage.deferred_bytes
            else:
                freed_kept, working = stage.kept_bytes, stage.working_bytes
                if kind is Kind.I:
                    # The one is freed while the other grows.
                    deferred += stage.deferred_bytes
                    working -= min(stage.kept_bytes, stage.deferred_bytes)
        messages = (len(posted) + len(leaving)) * message_bytes
        alive.append(Alive(kept + deferred + working, messages))
        posted.discard(taken if kind in _TAKES else (Kind.NORM, None, None))
        kept -= freed_kept
        deferred -= freed_deferred
    return alive


def peak_alive(
    actions: Sequence[Action], stages: Mapping[int, StageMemory], message_bytes: int
) -> Alive:
    """Return the greatest of `walk_alive`."""
    return max(walk_alive(actions, stages, message_bytes), key=lambda alive: alive.total_bytes)
