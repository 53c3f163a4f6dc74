"""Messages between the ranks of a pipeline, each channel on its own path.

A channel is one direction between two ranks, (source, destination, "F" or "B") in pipeline
coordinates. Messages of different directions have process groups of their own (up to four
lanes: F and B, down and up the ranks), so that they neither overtake nor block each other.
All channels exchange one element when they are opened, in one order on every rank: what
connects lazily would connect in an order that depends on timing, and may deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.mesh.collectives import Work, group_device
from megatron_lite.mesh.groups import Group
from megatron_lite.mesh.recorder import Recorder

Channel: TypeAlias = tuple[int, int, str]
LANES = (("F", True), ("F", False), ("B", True), ("B", False))


@dataclass(frozen=True, eq=False)
class Link:
    """One channel as one of its two ends sees it; `peer` is the other end's global rank."""

    peer: int
    process_group: dist.ProcessGroup
    name: str
    recorder: Recorder | None = field(default=None, repr=False)


def open_links(
    channels: Sequence[Channel], pp: Group, timeout: timedelta | None = None
) -> dict[Channel, Link]:
    """Open the channels of a pipeline; every rank of the world calls it.

    Args:
        channels: all of the pipeline, the same list on every rank.
        pp: this rank's pipeline group.
        timeout: of each message; the default group's when None.

    Returns:
        The channels that begin or end at this rank.

    Comm: rendezvous among the pipeline's ranks, then one element per channel.
    """
    lanes: dict[tuple[str, bool], dist.ProcessGroup] = {}
    used = {(direction, low < high) for low, high, direction in channels}
    for lane in LANES:
        if lane in used:
            group = dist.new_group(
                pp.ranks, timeout=timeout, use_local_synchronization=True, group_desc=str(lane)
            )
            assert isinstance(group, dist.ProcessGroup), "this rank is a member"
            lanes[lane] = group
    links: dict[Channel, Link] = {}
    for channel in channels:
        source, destination, direction = channel
        if pp.rank not in (source, destination):
            continue
        other = destination if pp.rank == source else source
        link = Link(
            pp.ranks[other], lanes[direction, source < destination], f"pp.{direction}", pp.recorder
        )
        links[channel] = link
        token = torch.zeros(1, device=group_device(pp))
        if pp.rank == source:
            dist.send(token, link.peer, group=link.process_group)
        else:
            dist.recv(token, link.peer, group=link.process_group)
    return links


def send(t: Tensor, link: Link) -> Work:
    """Start sending; `t` must stay as it is until the handle has been waited for.

    Comm: one message of t.numel() elements.
    """
    _record(link, "send", t)
    work = dist.isend(t, link.peer, group=link.process_group)
    assert work is not None
    return work


def receive_into(t: Tensor, link: Link) -> Work:
    """Start receiving into `t`, which has exactly the sender's shape and dtype.

    Comm: one message of t.numel() elements.
    """
    _record(link, "recv", t)
    work = dist.irecv(t, link.peer, group=link.process_group)
    assert work is not None
    return work


def _record(link: Link, op: str, t: Tensor) -> None:
    if not t.is_contiguous():
        raise ValueError(f"{op} over {link.name}: the tensor is not contiguous")
    if link.recorder is not None:
        dtype = str(t.dtype).removeprefix("torch.")
        link.recorder.record(op, link.name, t.numel(), dtype)
