"""Every small damage to a table, and the proof that a damaged table trains the same numbers.

`interpret` executes a table symbolically and without the verifier: messages carry what they
were computed from, channels are first in, first out, and the receiver takes whatever comes.
Two tables with equal results compute the same losses and the same gradients, added up in
the same order, so a surviving mutant with an equal result is an equivalent schedule.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_lite.pipeline.actions import Action, Kind, Schedule


def mutants(schedule: Schedule, stride: int = 1) -> Iterator[tuple[str, Schedule]]:
    """Drop, duplicate, swap and move every action, to every place of its rank and the other's.

    Args:
        stride: take every so many of the pairs; 1 is all of them.
    """
    for rank, row in enumerate(schedule.ranks):
        others = [k for k in range(len(schedule.ranks)) if k != rank]
        places = range(len(row))
        for i in places:
            yield f"drop {row[i]}", _with(schedule, rank, (*row[:i], *row[i + 1 :]))
            yield f"repeat {row[i]}", _with(schedule, rank, (*row[: i + 1], *row[i:]))
            for other in others:
                target = schedule.ranks[other]
                moved = _with(schedule, rank, (*row[:i], *row[i + 1 :]))
                k = i % (len(target) + 1)
                yield f"give away {row[i]}", _with(moved, other, (*target[:k], row[i], *target[k:]))
        pairs = [(i, j) for i in places for j in places if i != j]
        for i, j in pairs[::stride]:
            if i < j:
                swapped = list(row)
                swapped[i], swapped[j] = row[j], row[i]
                yield f"swap {row[i]} and {row[j]}", _with(schedule, rank, tuple(swapped))
            rest = [*row[:i], *row[i + 1 :]]
            rest.insert(j, row[i])
            if tuple(rest) != row and abs(i - j) > 1:  # neighbours are swapped already
                yield f"move {row[i]} to {j}", _with(schedule, rank, tuple(rest))


def _with(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = row
    return replace(schedule, ranks=tuple(ranks))


def interpret(schedule: Schedule) -> Any:
    """Run the table and return what it trains; raises when it cannot run."""
    last = schedule.num_stages - 1
    channels: dict[tuple[int, int, bool], deque[Any]] = defaultdict(deque)
    inputs: dict[tuple[bool, int, int], Any] = {}
    outputs: dict[tuple[bool, int, int], Any] = {}
    saved: dict[tuple[int, int], Any] = {}
    forwards: dict[int, list[Any]] = defaultdict(list)
    immediate: dict[int, list[Any]] = defaultdict(list)  # gradients that I itself writes
    gradients: dict[int, list[Any]] = defaultdict(list)
    closed: list[Any] = []
    place = schedule.placement

    def step(rank: int, action: Action) -> bool:
        kind, s, m = action.kind, action.stage, action.microbatch
        if kind is Kind.NORM or m is None:
            state = (str(action), str(gradients.get(s, ())) if s is not None else "")
            closed.append((rank, state))
            return True
        assert s is not None
        if kind is Kind.F:
            x = ("batch", m) if s == 0 else inputs.pop((True, s, m))
            saved[s, m] = outputs[True, s, m] = ("F", s, x)
            forwards[s].append(x)
        elif kind in (Kind.I, Kind.B):
            dy = ("loss", m) if s == last else inputs.pop((False, s, m))
            outputs[False, s, m] = ("I", s, dy, saved[s, m])
            immediate[s].append((dy, saved[s, m]))
            saved[s, m] = (saved[s, m], dy)
            if kind is Kind.B:
                gradients[s].append(saved.pop((s, m)))
        elif kind is Kind.W:
            value = saved.pop((s, m))
            assert len(value) == 2, "W before I"
            gradients[s].append(value)
        elif kind in (Kind.LOCAL_F, Kind.LOCAL_B):
            forward = kind is Kind.LOCAL_F
            inputs[forward, s + (1 if forward else -1), m] = outputs.pop((forward, s, m))
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            forward = kind is Kind.SEND_F
            other = place[s + (1 if forward else -1)]
            channels[rank, other, forward].append(outputs.pop((forward, s, m)))
        else:
            forward = kind is Kind.RECV_F
            other = place[s - 1 if forward else s + 1]
            if not channels[other, rank, forward]:
                return False
            inputs[forward, s, m] = channels[other, rank, forward].popleft()
        return True

    position = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while position[rank] < len(row) and step(rank, row[position[rank]]):
                position[rank] += 1
                moved = True
    assert all(at == len(row) for at, row in zip(position, schedule.ranks, strict=True)), "stuck"
    assert not any(channels.values()), "a message is left over"
    return dict(forwards), dict(immediate), dict(gradients), sorted(closed)
