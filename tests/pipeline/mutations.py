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

from megatron_lite.pipeline.actions import COMPUTE, Action, Kind, Schedule, pair


def mutants(schedule: Schedule, stride: int = 1) -> Iterator[tuple[str, Schedule]]:
    """Drop, repeat, swap, move and give away to another rank: every action, every place.

    Args:
        stride: take every so many of all of them, whatever their kind.
    """
    for number, (kind, rank, i, j) in enumerate(_damages(schedule)):
        if number % stride == 0:
            yield f"{kind} {schedule.ranks[rank][i]} {j}", _damage(schedule, kind, rank, i, j)


def pair_mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Undo every pair either way round, exchange halves of two, and join neighbours."""
    for rank, row in enumerate(schedule.ranks):
        for i, action in enumerate(row):
            rest = row[:i], row[i + 1 :]
            if action.halves:
                f, b = action.halves
                yield f"undo {action}", _with(schedule, rank, (*rest[0], f, b, *rest[1]))
                yield f"undo backwards {action}", _with(schedule, rank, (*rest[0], b, f, *rest[1]))
                for j in range(i + 1, len(row)):
                    if row[j].halves:
                        other = row[j].halves
                        changed = list(row)
                        changed[i], changed[j] = pair(f, other[1]), pair(other[0], b)
                        what = f"exchange halves of {action} and {row[j]}"
                        yield what, _with(schedule, rank, tuple(changed))
            elif action.kind is Kind.F:
                for j in range(i + 1, len(row)):
                    if row[j].kind in (Kind.B, Kind.I):
                        joined = (*rest[0], *row[i + 1 : j], pair(action, row[j]), *row[j + 1 :])
                        yield f"join {action} and {row[j]}", _with(schedule, rank, joined)


def _damages(schedule: Schedule) -> Iterator[tuple[str, int, int, int]]:
    """(kind, rank, place, other place or rank)."""
    for rank, row in enumerate(schedule.ranks):
        places = range(len(row))
        for i in places:
            yield "drop", rank, i, -1
            yield "repeat", rank, i, -1
            yield from (("give", rank, i, k) for k in range(len(schedule.ranks)) if k != rank)
            yield from (("swap", rank, i, j) for j in range(i + 1, len(row)))
            # Moves to a neighbour's place are swaps.
            yield from (("move", rank, i, j) for j in places if abs(i - j) > 1)


def _damage(schedule: Schedule, kind: str, rank: int, i: int, j: int) -> Schedule:
    row = schedule.ranks[rank]
    without = (*row[:i], *row[i + 1 :])
    if kind == "repeat":
        return _with(schedule, rank, (*row[: i + 1], *row[i:]))
    if kind == "swap":
        swapped = list(row)
        swapped[i], swapped[j] = row[j], row[i]
        return _with(schedule, rank, tuple(swapped))
    if kind == "move":
        return _with(schedule, rank, (*without[:j], row[i], *without[j:]))
    dropped = _with(schedule, rank, without)
    if kind == "give":
        target = schedule.ranks[j]
        place = min(i, len(target))
        return _with(dropped, j, (*target[:place], row[i], *target[place:]))
    return dropped


def _with(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = row
    return replace(schedule, ranks=tuple(ranks))


def interpret(schedule: Schedule) -> Any:
    """Run the table and return what it trains; raises when it cannot run."""
    return _Interpreter(schedule).run()


class _Interpreter:
    """Symbolic values: a tuple says from what it was computed."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.channels: dict[tuple[int, int, bool], deque[Any]] = defaultdict(deque)
        self.inputs: dict[tuple[bool, int, int], Any] = {}
        self.outputs: dict[tuple[bool, int, int], Any] = {}
        self.saved: dict[tuple[int, int], Any] = {}
        self.forwards: dict[int, list[Any]] = defaultdict(list)
        self.immediate: dict[int, list[Any]] = defaultdict(list)  # gradients that I writes
        self.gradients: dict[int, list[Any]] = defaultdict(list)
        self.closed: list[Any] = []

    def run(self) -> Any:
        rows = self.schedule.ranks
        position = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row) and self.step(rank, row[position[rank]]):
                    position[rank] += 1
                    moved = True
        assert all(at == len(row) for at, row in zip(position, rows, strict=True)), "stuck"
        assert not any(self.channels.values()), "a message is left over"
        return (
            dict(self.forwards),
            dict(self.immediate),
            dict(self.gradients),
            sorted(self.closed),
        )

    def step(self, rank: int, action: Action) -> bool:
        """Execute; False if a message has to come first."""
        s, m = action.stage, action.microbatch
        if action.halves:
            for half in action.halves:
                assert half.stage is not None and half.microbatch is not None
                self.compute(half.kind, half.stage, half.microbatch)
        elif s is None or m is None:
            state = str(self.gradients.get(s, ())) if s is not None else ""
            self.closed.append((rank, str(action), state))
        elif action.kind in COMPUTE:
            self.compute(action.kind, s, m)
        else:
            return self.move(rank, action.kind, s, m)
        return True

    def compute(self, kind: Kind, s: int, m: int) -> None:
        if kind is Kind.F:
            x = ("batch", m) if s == 0 else self.inputs.pop((True, s, m))
            self.saved[s, m] = self.outputs[True, s, m] = ("F", s, x)
            self.forwards[s].append(x)
            return
        if kind is not Kind.W:
            last = self.schedule.num_stages - 1
            dy = ("loss", m) if s == last else self.inputs.pop((False, s, m))
            self.outputs[False, s, m] = ("I", s, dy, self.saved[s, m])
            self.immediate[s].append((dy, self.saved[s, m]))
            self.saved[s, m] = (self.saved[s, m], dy)
        if kind is not Kind.I:
            value = self.saved.pop((s, m))
            assert len(value) == 2, "W before I"
            self.gradients[s].append(value)

    def move(self, rank: int, kind: Kind, s: int, m: int) -> bool:
        forward = kind in (Kind.LOCAL_F, Kind.SEND_F, Kind.RECV_F)
        if kind in (Kind.RECV_F, Kind.RECV_B):
            source = self.schedule.placement[s - 1 if forward else s + 1]
            channel = self.channels[source, rank, forward]
            if not channel:
                return False
            self.inputs[forward, s, m] = channel.popleft()
            return True
        value, following = self.outputs.pop((forward, s, m)), s + (1 if forward else -1)
        if kind in (Kind.LOCAL_F, Kind.LOCAL_B):
            self.inputs[forward, following, m] = value
        else:
            self.channels[rank, self.schedule.placement[following], forward].append(value)
        return True
