"""Proof of a schedule before it runs: what it must contain, and in which order.

Per rank: everything once and nothing else; F, I and W (or B) of a stage in microbatch
order, so that accumulation is bitwise the same under every schedule; W before REDUCE
before NORM before STEP; activations within the declared bound; the halves of a pair of
different microbatches, so that neither needs the other. Across ranks: the messages
of each channel are sent and received in one order, and the table runs to its end although
every transfer waits for its partner, which excludes cycles and deadlocks of any transport.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import TypeAlias

from megatron_lite.pipeline.actions import COMPUTE, TRANSFER, Action, Kind, Schedule, singles_of
from megatron_lite.pipeline.channels import Channel, are_partners, channel_of, partner_of
from megatron_lite.pipeline.simulate import peak_live

_Places: TypeAlias = Mapping[tuple[Kind, int | None, int | None], int]

_COMPUTE, _TRANSFER = frozenset(COMPUTE), frozenset(TRANSFER)
_OUTPUT = frozenset((Kind.SEND_F, Kind.SEND_B, Kind.LOCAL_F, Kind.LOCAL_B))
_GATHER = frozenset((Kind.UNSHARD, Kind.RESHARD))
_MAX_TOLD = 10


class ScheduleError(ValueError):
    """The table cannot run, or would train something else; lists the violations."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        told = "; ".join(problems[:_MAX_TOLD])
        if len(problems) > _MAX_TOLD:
            told += f"; and {len(problems) - _MAX_TOLD} more"
        super().__init__(f"schedule {name}: {told}")


def check_schedule(schedule: Schedule) -> None:
    """Check a table: what it must be, rank by rank, then the messages between ranks.

    Raises:
        ScheduleError: with all violations of the first of these parts that has any.
    """
    check_placement(schedule)
    problems: list[str] = []
    for rank in range(len(schedule.ranks)):
        problems += _check_rank(schedule, rank)
    problems = problems or list(_check_channels(schedule))
    problems = problems or list(_check_rendezvous(schedule))
    if problems:
        raise ScheduleError(schedule.name, problems)


def check_placement(schedule: Schedule) -> None:
    """Check that every stage is on a rank and every action on the rank that holds its stage.

    Raises:
        ScheduleError: with what is misplaced; nothing else may be computed from the table.
    """
    problems = list(_misplaced(schedule))
    if problems:
        raise ScheduleError(schedule.name, problems)


def _misplaced(schedule: Schedule) -> Iterator[str]:
    ranks = range(len(schedule.ranks))
    if schedule.num_microbatches < 1 or not schedule.placement or not schedule.ranks:
        yield "a table needs a rank, a stage and a microbatch"
    if schedule.bounds and len(schedule.bounds) != len(ranks):
        yield f"bounds of {len(schedule.bounds)} ranks for {len(ranks)} ranks"
    for stage, holder in enumerate(schedule.placement):
        if holder not in ranks:
            yield f"stage {stage} is placed on rank {holder} of {len(ranks)}"
    for rank, actions in enumerate(schedule.ranks):
        held = set(schedule.stages_of(rank))
        if not held:
            yield f"rank {rank} holds no stage"
        for action in singles_of(actions):
            if action.stage is not None and action.stage not in held:
                yield f"rank {rank}: {action} of a stage it does not hold {sorted(held)}"
            elif action.microbatch is not None and action.microbatch >= schedule.num_microbatches:
                yield f"rank {rank}: {action} of {schedule.num_microbatches} microbatches"


def _check_rank(schedule: Schedule, rank: int) -> list[str]:
    """Everything that one rank's list must be for itself."""
    actions = schedule.ranks[rank]
    singles = singles_of(actions)
    # Both halves of a pair are at its place, and are one computation.
    places = {
        (a.kind, a.stage, a.microbatch): index
        for index, action in enumerate(actions)
        for a in action.singles
    }
    problems: list[str] = []
    if len(places) < len(singles):
        problems += [
            f"rank {rank}: {action} occurs {count} times"
            for action, count in Counter(singles).items()
            if count > 1
        ]
    computed = [0, *accumulate(action.singles[0].kind in _COMPUTE for action in actions)]
    problems += _check_pairs(schedule, rank)
    stages = schedule.stages_of(rank)
    expected = 0
    for stage in stages:
        proof = _StageProof(schedule, rank, stage, places, computed)
        problems += proof.check()
        expected += proof.expected
    if not schedule.forward_only:
        problems += _check_closing(rank, stages, actions, places)
        expected += 1 + 2 * len(stages)
    expected += sum(action.kind in _GATHER for action in actions)
    if not problems:
        problems += _check_gathers(rank, singles)
    if not problems and expected != len(singles):
        problems.append(f"rank {rank}: {len(singles)} actions, but only {expected} belong there")
    if not problems and schedule.bounds:
        alive = peak_live(actions)[0]
        if alive > schedule.bounds[rank]:
            problems.append(
                f"rank {rank}: {alive} activations alive at once, the declared bound is "
                f"{schedule.bounds[rank]}"
            )
    return problems


def _check_pairs(schedule: Schedule, rank: int) -> Iterator[str]:
    """Neither half needs what the other computes, through whatever stages and ranks.

    A backward needs the forwards of its own microbatch and nothing else of others, a
    forward needs forwards of its own.
    """
    for action in schedule.ranks[rank]:
        if action.halves and action.halves[0].microbatch == action.halves[1].microbatch:
            yield f"rank {rank}: {action}: halves of one microbatch, the B needs the F"


def _check_closing(
    rank: int, stages: Sequence[int], actions: Sequence[Action], places: _Places
) -> Iterator[str]:
    """REDUCE before NORM before STEP, and nothing but STEPs after NORM."""
    norm = places.get((Kind.NORM, None, None))
    if norm is None:
        yield f"rank {rank}: NORM is missing"
        return
    for stage in stages:
        reduce = places.get((Kind.REDUCE, stage, None))
        step = places.get((Kind.STEP, stage, None))
        if reduce is None or step is None:
            yield f"rank {rank}: REDUCE{stage} or STEP{stage} is missing"
        elif not reduce < norm < step:
            yield f"rank {rank}: REDUCE{stage}, NORM and STEP{stage} are out of order"
    for action in actions[norm + 1 :]:
        if action.kind not in (Kind.STEP, Kind.NORM):
            yield f"rank {rank}: {action} comes after NORM"


def _check_gathers(rank: int, actions: Sequence[Action]) -> Iterator[str]:
    """UNSHARD and RESHARD alternate, and no stage computes without its parameters."""
    sharded = {action.stage for action in actions if action.kind in _GATHER}
    gathered: set[int | None] = set()
    for action in actions if sharded else ():
        stage = action.stage
        if action.kind is Kind.UNSHARD:
            if stage in gathered:
                yield f"rank {rank}: {action} while the parameters are gathered"
            gathered.add(stage)
        elif action.kind is Kind.RESHARD:
            if stage not in gathered:
                yield f"rank {rank}: {action} without UNSHARD{stage} before it"
            gathered.discard(stage)
        elif action.kind in _COMPUTE and stage in sharded and stage not in gathered:
            yield f"rank {rank}: {action} without UNSHARD{stage} before it"
    for stage in sorted(stage for stage in gathered if stage is not None):
        yield f"rank {rank}: UNSHARD{stage} without RESHARD{stage} after it"


class _StageProof:
    """Every microbatch of one stage: complete, in order, its outputs handed on at once.

    Attributes:
        expected: number of actions that belong to the stage, once checked.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stage: int,
        places: _Places,
        computed: Sequence[int],
    ) -> None:
        self.schedule, self.rank, self.stage = schedule, rank, stage
        self.places, self.computed = places, computed
        self.expected = 0
        last = schedule.num_stages - 1
        # What brings and takes a microbatch: (kind, stage in the action's name), or none.
        self.input_f = self._link(stage - 1, Kind.RECV_F, stage, Kind.LOCAL_F, stage - 1, last)
        self.output_f = self._link(stage + 1, Kind.SEND_F, stage, Kind.LOCAL_F, stage, last)
        self.input_b = self._link(stage + 1, Kind.RECV_B, stage, Kind.LOCAL_B, stage + 1, last)
        self.output_b = self._link(stage - 1, Kind.SEND_B, stage, Kind.LOCAL_B, stage, last)

    def _link(
        self, other: int, remote: Kind, remote_stage: int, local: Kind, local_stage: int, last: int
    ) -> list[tuple[Kind, int]]:
        if not 0 <= other <= last:
            return []
        if self.schedule.placement[other] == self.rank:
            return [(local, local_stage)]
        return [(remote, remote_stage)]

    def check(self) -> list[str]:
        """Return what is wrong."""
        stage = self.stage
        reduce = self.places.get((Kind.REDUCE, stage, None))
        problems: list[str] = []
        previous = [-1, -1, -1]  # places of the latest F, I and W (or B)
        for microbatch in range(self.schedule.num_microbatches):
            where = f"rank {self.rank}: stage {stage} microbatch {microbatch}"
            needed = self.needed(microbatch)
            self.expected += sum(of == stage for _, of in needed)
            found = [self.places.get((kind, of, microbatch), -1) for kind, of in needed]
            if -1 in found:
                kind, of = needed[found.index(-1)]
                why = " (needs either B, or I and W)" if kind in (Kind.I, Kind.W) else ""
                problems.append(f"{where}: {kind.value}{of}.{microbatch} is missing{why}")
                continue
            if found != sorted(found):
                right = ", ".join(f"{kind.value}{of}.{microbatch}" for kind, of in needed)
                problems.append(f"{where}: out of order; right is {right}")
                continue
            work = [
                place for place, (kind, _) in zip(found, needed, strict=True) if kind in _COMPUTE
            ]
            if not self.schedule.forward_only and len(work) == 2:
                work.append(work[-1])  # B is I and W at once
            if any(place < before for place, before in zip(work, previous, strict=False)):
                problems.append(f"{where}: work comes before that of an earlier microbatch")
            previous = work
            if reduce is not None and work[-1] > reduce:
                problems.append(f"{where}: its weight gradient comes after REDUCE{stage}")
            problems += self.late_outputs(where, needed, found)
        return problems

    def needed(self, microbatch: int) -> list[tuple[Kind, int]]:
        """Return all actions of a microbatch in the order in which they must stand."""
        forward = [*self.input_f, (Kind.F, self.stage), *self.output_f]
        if self.schedule.forward_only:
            return forward
        if (Kind.B, self.stage, microbatch) in self.places:
            return [*forward, *self.input_b, (Kind.B, self.stage), *self.output_b]
        split = [(Kind.I, self.stage), *self.output_b, (Kind.W, self.stage)]
        return [*forward, *self.input_b, *split]

    def late_outputs(
        self, where: str, needed: Sequence[tuple[Kind, int]], found: Sequence[int]
    ) -> Iterator[str]:
        """An output leaves before the rank computes anything else: memory, and the others."""
        for (kind, of), producer, place in zip(needed[1:], found, found[1:], strict=False):
            is_output = kind in _OUTPUT and of == self.stage
            if is_output and self.computed[place] != self.computed[producer + 1]:
                yield f"{where}: {kind.value} does not directly follow what it hands on"


def _check_channels(schedule: Schedule) -> Iterator[str]:
    """The k-th send of a channel is the k-th receive: else messages are mistaken silently."""
    sent: dict[Channel, list[Action]] = defaultdict(list)
    received: dict[Channel, list[Action]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            if action.kind is Kind.SEND_F or action.kind is Kind.SEND_B:
                sent[channel_of(action, schedule.placement)].append(action)
            elif action.kind in _TRANSFER:
                received[channel_of(action, schedule.placement)].append(action)
    for channel in sorted(sent.keys() | received.keys()):
        pairs = zip_longest(sent[channel], received[channel])
        for k, (send, receive) in enumerate(pairs):
            if send is None or receive is None or not are_partners(send, receive):
                yield (
                    f"channel {channel.source} to {channel.destination} ({channel.direction}): "
                    f"message {k} is sent by {send} and received by {receive}"
                )
                break


def _check_rendezvous(schedule: Schedule) -> Iterator[str]:
    """Run the transfers as if each blocked its rank until the partner reaches its own.

    That is the strictest transport: whatever it lets through also runs with eager sends,
    with batches (a run of adjacent transfers started together), and with any set of
    communicators that execute their operations in the order of issue, because each of
    them only waits for a part of what this one waits for.
    """
    lists = [[a for a in actions if a.kind in _TRANSFER] for actions in schedule.ranks]
    placement = schedule.placement
    position = [0] * len(lists)
    candidates = list(range(len(lists)))
    while candidates:
        rank = candidates.pop()
        while position[rank] < len(lists[rank]):
            action = lists[rank][position[rank]]
            other = _other_rank(action, placement)
            at = position[other]
            if at == len(lists[other]) or not are_partners(action, lists[other][at]):
                break
            position[rank] += 1
            position[other] += 1
            candidates.append(other)
    for rank, transfers in enumerate(lists):
        if position[rank] < len(transfers):
            action = transfers[position[rank]]
            yield f"rank {rank} is stuck at {action}: {partner_of(action)} is never reached"


def _other_rank(action: Action, placement: Sequence[int]) -> int:
    """The rank that holds the other end of a transfer."""
    stage = action.stage
    assert stage is not None
    step = 1 if action.kind is Kind.SEND_F or action.kind is Kind.RECV_B else -1
    return placement[stage + step]
