"""Streams that execute in the order of issue: the second model of deadlock, without the verifier.

Every rank has a compute stream and one stream per communicator. An operation starts when
those before it on its stream have ended; a transfer also waits for the computations issued
before it (the backend synchronises with the current stream) and ends together with its
partner; a computation waits for the receives of its input.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace

from megatron_lite.pipeline.actions import COMPUTE, TRANSFER, Action, Kind, Schedule
from megatron_lite.pipeline.channels import Channel, channel_of, partner_of

_NEEDS = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}


def runs_on_streams(schedule: Schedule, communicator: Callable[[Channel], Hashable]) -> bool:
    """Whether every operation of every stream comes to its end."""
    queues, before = _queues(schedule, communicator)
    queue_of = {action: number for number, queue in enumerate(queues) for action in queue}
    present = {action for row in schedule.ranks for action in row}
    heads = [0] * len(queues)
    done: set[Action | None] = {None}

    def is_head(action: Action) -> bool:
        number = queue_of[action]
        return heads[number] < len(queues[number]) and queues[number][heads[number]] == action

    moved = True
    while moved:
        moved = False
        for number, queue in enumerate(queues):
            while heads[number] < len(queue):
                action = queue[heads[number]]
                if action.kind in TRANSFER:
                    partner = partner_of(action)
                    ready = is_head(partner) and {before[action], before[partner]} <= done
                    ended = [action, partner]
                else:
                    need = _NEEDS.get(action.kind)
                    receive = None
                    if need is not None:
                        receive = Action(need, action.stage, action.microbatch)
                    ready = receive not in present or receive in done
                    ended = [action]
                if not ready:
                    break
                for one in ended:
                    done.add(one)
                    heads[queue_of[one]] += 1
                moved = True
    return all(head == len(queue) for head, queue in zip(heads, queues, strict=True))


def _queues(
    schedule: Schedule, communicator: Callable[[Channel], Hashable]
) -> tuple[list[list[Action]], dict[Action, Action | None]]:
    """Return the streams, and the computation issued before each transfer."""
    queues: list[list[Action]] = []
    before: dict[Action, Action | None] = {}
    for row in schedule.ranks:
        streams: dict[Hashable, list[Action]] = {}
        latest: Action | None = None
        for action in row:
            if action.kind in TRANSFER:
                key = communicator(channel_of(action, schedule.placement))
                streams.setdefault(("p2p", key), []).append(action)
                before[action] = latest
            elif action.kind in COMPUTE:
                streams.setdefault("compute", []).append(action)
                latest = action
        queues += streams.values()
    return queues, before


def lower_late(schedule: Schedule, odd_receive_first: bool = False) -> Schedule:
    """Put every receive directly before its consumer, as a runtime without a global order does."""
    rows = []
    for rank, row in enumerate(schedule.ranks):
        receives = {a for a in row if a.kind in (Kind.RECV_F, Kind.RECV_B)}
        late: list[Action] = []
        for action in row:
            if action in receives:
                continue
            need = _NEEDS.get(action.kind)
            if need is not None:
                receive = Action(need, action.stage, action.microbatch)
                if receive in receives:
                    late.append(receive)
            late.append(action)
        if odd_receive_first and rank % 2:
            for k in range(len(late) - 1):
                if late[k].kind in (Kind.SEND_F, Kind.SEND_B) and late[k + 1] in receives:
                    late[k], late[k + 1] = late[k + 1], late[k]
        rows.append(tuple(late))
    return replace(schedule, ranks=tuple(rows))
