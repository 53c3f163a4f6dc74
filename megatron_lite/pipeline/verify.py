"""Proof of a schedule before it runs: what it must contain, and in which order.

Per rank: every microbatch has one F and one B (or I then W) on every stage; backward work
of a stage is in microbatch order, so that accumulation is bitwise the same under every
schedule; the last W precedes REDUCE, all REDUCEs precede NORM, NORM precedes STEP. Across
ranks: every transfer has its partner, and the table runs to its end when each rank waits
for what it needs, which excludes cycles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_lite.pipeline.actions import OF_MICROBATCH, Action, Kind, Schedule


class ScheduleError(ValueError):
    """The table cannot run, or would train something else; lists every violation."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"schedule {name}: " + "; ".join(problems))


def check_schedule(schedule: Schedule) -> None:
    """Check a table.

    Raises:
        ScheduleError: with all violations found.
    """
    problems = list(_check_placement(schedule))
    if not problems:
        for rank in range(len(schedule.ranks)):
            problems += _check_rank(schedule, rank)
        problems = problems or list(_check_progress(schedule))
    if problems:
        raise ScheduleError(schedule.name, problems)


def _check_placement(schedule: Schedule) -> Iterator[str]:
    ranks = range(len(schedule.ranks))
    for stage, holder in enumerate(schedule.placement):
        if holder not in ranks:
            yield f"stage {stage} is placed on rank {holder} of {len(ranks)}"
    for rank, actions in enumerate(schedule.ranks):
        held = schedule.stages_of(rank)
        for action in actions:
            if action.stage is not None and action.stage not in held:
                yield f"rank {rank}: {action} of a stage it does not hold {held}"
            elif action.microbatch is not None and action.microbatch >= schedule.num_microbatches:
                yield f"rank {rank}: {action} of {schedule.num_microbatches} microbatches"


def _check_rank(schedule: Schedule, rank: int) -> Iterator[str]:
    """Completeness and order of one rank's list."""
    actions = schedule.ranks[rank]
    for action, count in Counter(actions).items():
        if count > 1:
            yield f"rank {rank}: {action} occurs {count} times"
    at = {action: index for index, action in enumerate(actions)}
    norm = at.get(Action(Kind.NORM))
    if norm is None:
        yield f"rank {rank}: NORM is missing"
    for stage in schedule.stages_of(rank):
        yield from _check_stage(schedule, rank, stage, at)
        reduce, step = at.get(Action(Kind.REDUCE, stage)), at.get(Action(Kind.STEP, stage))
        if reduce is None or step is None:
            yield f"rank {rank}: REDUCE{stage} or STEP{stage} is missing"
        elif norm is not None and not reduce < norm < step:
            yield f"rank {rank}: REDUCE{stage}, NORM and STEP{stage} are out of order"


def _check_stage(
    schedule: Schedule, rank: int, stage: int, at: Mapping[Action, int]
) -> Iterator[str]:
    """F, B (or I, W) of each microbatch once, in order, before the stage's REDUCE."""
    reduce = at.get(Action(Kind.REDUCE, stage), len(at))
    last = -1
    for microbatch in range(schedule.num_microbatches):
        where = f"rank {rank}: stage {stage} microbatch {microbatch}"
        f, i, w, b = (
            at.get(Action(kind, stage, microbatch)) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)
        )
        if f is None:
            yield f"{where}: F is missing"
            continue
        if (b is None) == (i is None) or (i is None) != (w is None):
            yield f"{where}: needs either B, or I and W"
            continue
        first = b if b is not None else i
        final = b if b is not None else w
        assert first is not None and final is not None
        if not f < first <= final:
            yield f"{where}: F, I, W are out of order"
        if final > reduce:
            yield f"{where}: its weight gradient comes after REDUCE{stage}"
        if final < last:
            yield f"{where}: its weight gradient comes before that of an earlier microbatch"
        last = max(last, final)


def _needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Actions, of any rank, that must have run before `action` may start."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind not in OF_MICROBATCH:
        return ()
    assert stage is not None
    local = schedule.placement

    def same_rank(other: int) -> bool:
        return local[stage] == local[other]

    last = schedule.num_stages - 1
    if action.kind is Kind.F and stage > 0:
        kind, of = (Kind.F, stage - 1) if same_rank(stage - 1) else (Kind.RECV_F, stage)
        return (Action(kind, of, microbatch),)
    if action.kind in (Kind.I, Kind.B) and stage < last and not same_rank(stage + 1):
        return (Action(Kind.RECV_B, stage, microbatch),)
    sources = {
        Kind.SEND_F: (Kind.F, stage),
        Kind.SEND_B: (Kind.I, stage),
        Kind.RECV_F: (Kind.SEND_F, stage - 1),
        Kind.RECV_B: (Kind.SEND_B, stage + 1),
    }
    if action.kind in (Kind.I, Kind.B) and stage < last:
        return (Action(Kind.I, stage + 1, microbatch),)
    if action.kind not in sources:
        return ()
    kind, of = sources[action.kind]
    return (Action(kind, of, microbatch),)


def _check_progress(schedule: Schedule) -> Iterator[str]:
    """Let every rank run as far as it can, again and again, until all are through."""
    done: set[Action] = set()
    position = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if any(need not in done for need in _needs(schedule, action)):
                    break
                done.add(action)
                if action.kind is Kind.B:
                    done.add(Action(Kind.I, action.stage, action.microbatch))
                position[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.ranks):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            needs = ", ".join(map(str, _needs(schedule, action)))
            yield f"rank {rank} is stuck at action {position[rank]}, {action}, waiting for {needs}"
