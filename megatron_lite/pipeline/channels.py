"""Which messages share a channel, and the fixed order in which channels are created.

A channel is one direction between two ranks: (source, destination, F or B). It has a
communicator of its own, so a message can never overtake or be mistaken for one of another
kind, also where the next and the previous rank are the same one. On a channel the k-th
send meets the k-th receive; the verifier proves that both are the same message.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_lite.pipeline.actions import Action, Kind


class Channel(NamedTuple):
    """Messages from one rank to another: activations (F) or their gradients (B)."""

    source: int
    destination: int
    direction: str


def list_channels(placement: Sequence[int]) -> tuple[Channel, ...]:
    """Return all channels of a placement in the one order in which every rank creates them."""
    found = set()
    for rank, following in pairwise(placement):
        if rank != following:
            found.add(Channel(rank, following, "F"))
            found.add(Channel(following, rank, "B"))
    return tuple(sorted(found))


def channel_of(action: Action, placement: Sequence[int]) -> Channel:
    """Return the channel of a transfer.

    Args:
        action: SEND_F, RECV_F, SEND_B or RECV_B whose other end exists.
    """
    stage = action.stage
    assert stage is not None
    if action.kind is Kind.SEND_F:
        return Channel(placement[stage], placement[stage + 1], "F")
    if action.kind is Kind.RECV_F:
        return Channel(placement[stage - 1], placement[stage], "F")
    if action.kind is Kind.SEND_B:
        return Channel(placement[stage], placement[stage - 1], "B")
    assert action.kind is Kind.RECV_B
    return Channel(placement[stage + 1], placement[stage], "B")


def partner_of(action: Action) -> Action:
    """Return the transfer at the other end: SEND_F0.3 and RECV_F1.3 belong together."""
    stage = action.stage
    assert stage is not None
    kind, other = {
        Kind.SEND_F: (Kind.RECV_F, stage + 1),
        Kind.RECV_F: (Kind.SEND_F, stage - 1),
        Kind.SEND_B: (Kind.RECV_B, stage - 1),
        Kind.RECV_B: (Kind.SEND_B, stage + 1),
    }[action.kind]
    return Action(kind, other, action.microbatch)
