"""The instruction set of pipeline schedules.

A schedule is data: for every rank the list of actions it executes, in order. Stages are
numbered 0 ... p*v - 1 over the whole model, whatever rank holds them; microbatches are
those of one data-parallel rank. A pair is one action of two halves, a forward and a
backward of different microbatches, which run at the same time. The text form ("F0.3",
"F0.3&B1.2", "REDUCE1", "NORM") is what traces, errors and schedule files show.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does; the value is its name in the text form."""

    F = "F"  # forward
    I = "I"  # input gradient  # noqa: E741 - the field's own letter
    W = "W"  # weight gradient
    B = "B"  # I and W at once
    SEND_F = "SEND_F"  # activations to the next stage
    RECV_F = "RECV_F"  # activations from the previous stage
    SEND_B = "SEND_B"  # activation gradients to the previous stage
    RECV_B = "RECV_B"  # activation gradients from the next stage
    LOCAL_F = "LOCAL_F"  # activations to the next stage, which this rank holds too
    LOCAL_B = "LOCAL_B"  # activation gradients to the previous stage, which this rank holds too
    UNSHARD = "UNSHARD"  # gather the stage's parameters
    RESHARD = "RESHARD"  # drop what UNSHARD gathered
    REDUCE = "REDUCE"  # the stage's gradients are complete: reduce them
    NORM = "NORM"  # closing reduction: global norm, counts, votes
    STEP = "STEP"  # update the stage's parameters, or skip everywhere
    PAIR = "PAIR"  # an F and a B (or I) of another microbatch, at the same time

    # Members are singletons, and tables hash each of them ten thousands of times; Enum's
    # own hash is a Python function. Nothing here iterates over a set.
    __hash__ = object.__hash__


COMPUTE = (Kind.F, Kind.I, Kind.W, Kind.B)
TRANSFER = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
HANDOVER = (Kind.LOCAL_F, Kind.LOCAL_B)
OF_MICROBATCH = frozenset((*COMPUTE, *TRANSFER, *HANDOVER))
_WITHOUT_STAGE = (Kind.NORM, Kind.PAIR)
_PAIRS = ((Kind.F, Kind.B), (Kind.F, Kind.I))


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction; NORM has no stage, only compute and transfer have a microbatch.

    A pair has neither, but two halves: F first, then B or I.
    """

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None
    halves: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        kinds = tuple(half.kind for half in self.halves)
        if kinds not in (_PAIRS if self.kind is Kind.PAIR else ((),)):
            halves = " and ".join(map(str, self.halves)) or "no halves"
            raise ValueError(f"{self.kind.value} of {halves}; right is F and B, or F and I")
        if (self.stage is None) != (self.kind in _WITHOUT_STAGE):
            raise ValueError(f"{self.kind.value} with stage {self.stage}")
        if (self.microbatch is None) == (self.kind in OF_MICROBATCH):
            raise ValueError(f"{self.kind.value} with microbatch {self.microbatch}")

    @property
    def singles(self) -> tuple[Action, ...]:
        """The halves of a pair; any other action alone."""
        return self.halves or (self,)

    def __str__(self) -> str:
        if self.halves:
            return "&".join(map(str, self.halves))
        stage = "" if self.stage is None else str(self.stage)
        return f"{self.kind.value}{stage}" + (
            "" if self.microbatch is None else f".{self.microbatch}"
        )


def pair(forward: Action, backward: Action) -> Action:
    """Return the action that runs an F and a B (or I) at the same time."""
    return Action(Kind.PAIR, halves=(forward, backward))


def singles_of(actions: Iterable[Action]) -> list[Action]:
    """Return the actions with every pair as its two halves, F first."""
    return [single for action in actions for single in action.singles]


_TEXT = re.compile(r"([A-Z]+(?:_[FB])?)([0-9]+)?(?:\.([0-9]+))?")


def parse_action(text: str) -> Action:
    """Read the text form of an action.

    Raises:
        ValueError: unknown kind, or a stage or microbatch too many or too few.
    """
    first, *second = text.strip()[:64].split("&")
    if second:
        return Action(Kind.PAIR, halves=tuple(parse_action(half) for half in (first, *second)))
    match = _TEXT.fullmatch(first)
    if match is None:
        raise ValueError(f"{text[:64]!r} is not an action")
    kind, stage, microbatch = match.groups()
    if kind == Kind.PAIR.value:
        raise ValueError(f"{text[:64]!r} is not an action; a pair is written F0.1&B0.0")
    return Action(
        Kind(kind),
        None if stage is None else int(stage),
        None if microbatch is None else int(microbatch),
    )


@dataclass(frozen=True)
class Schedule:
    """A complete table.

    Attributes:
        name: of the generator, for messages.
        num_microbatches: per step and data-parallel rank.
        placement: stage -> pipeline rank that holds it.
        ranks: per pipeline rank its actions in order.
        bounds: per rank the most (stage, microbatch) pairs whose activations may be alive
            at once, from F to B or W; empty: not declared.
        forward_only: evaluation, nothing but F and what moves its outputs.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    bounds: tuple[int, ...] = ()
    forward_only: bool = False

    @property
    def has_pairs(self) -> bool:
        """Whether anything in the table runs at the same time on one rank."""
        return any(action.halves for row in self.ranks for action in row)

    @property
    def num_stages(self) -> int:
        """Number of model pieces, p * v."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank holds, ascending; the position is the chunk index."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def digest(self) -> str:
        """Return the sha256 of everything but the name; equal tables have equal digests."""
        lines = [
            f"{self.num_microbatches} {self.placement} {self.bounds} {self.forward_only}",
            *(" ".join(map(str, row)) for row in self.ranks),
        ]
        return hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()
