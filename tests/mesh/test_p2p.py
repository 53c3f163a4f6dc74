"""Messages between pipeline ranks: order, channels that do not meet, dtypes, the record."""

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_lite.mesh.groups import Group, world_group
from megatron_lite.mesh.p2p import Link, open_links, receive_into, send
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.pipeline.channels import Channel, list_channels
from megatron_lite.pipeline.placement import looping, v_shape
from tests.pool import RankError, RankPool

COUNT, LENGTH = 5, 6


def pipeline_group(rank: int, world_size: int, recorder: Recorder | None = None) -> Group:
    world = world_group(rank, world_size)
    return Group("pp", world.ranks, rank, world.process_group, recorder)


def message(channel: Channel, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Tells its channel and its number; exact in every dtype."""
    source, destination, direction = channel
    mark = 64 * (direction == "B") + 16 * source + destination
    return torch.tensor([mark, number, mark, number, mark, number], dtype=dtype)


def all_at_once(placement: tuple[int, ...], dtype: str, rank: int, world_size: int) -> Any:
    """Post all messages of all channels; receives in the reverse order of the channels."""
    recorder, kind = Recorder(), getattr(torch, dtype)
    channels = list_channels(placement)
    links = open_links(channels, pipeline_group(rank, world_size, recorder))
    recorder.clear()
    arriving: list[tuple[Channel, int, torch.Tensor, Any]] = []
    leaving = []
    for channel in reversed(channels):
        if channel.destination == rank:
            for number in range(COUNT):
                tensor = torch.full((LENGTH,), -1, dtype=kind)
                arriving.append((channel, number, tensor, receive_into(tensor, links[channel])))
    for channel in channels:
        if channel.source == rank:
            for number in range(COUNT):
                tensor = message(channel, number, kind)
                leaving.append((tensor, send(tensor, links[channel])))
    for _, _, _, work in reversed(arriving):  # whichever is waited for first
        work.wait()
    for _, work in leaving:
        work.wait()
    wrong = [
        (tuple(channel), number, tensor.tolist())
        for channel, number, tensor, _ in arriving
        if not torch.equal(tensor, message(channel, number, kind))
    ]
    return wrong, len(arriving), Counter((r.op, r.group, r.elements) for r in recorder.records)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("placement", "ranks"),
    [
        ((0, 1), 2),
        (looping(2, 2), 2),  # both directions, F and B, between the same two ranks
        (v_shape(2), 2),
        (looping(4, 2), 4),
        (v_shape(4), 4),
    ],
    ids=["1f1b-2", "looping-2x2", "v-2", "looping-4x2", "v-4"],
)
def test_each_channel_keeps_its_order_and_meets_no_other(
    rank_pool: RankPool, placement: tuple[int, ...], ranks: int, dtype: str
) -> None:
    found = rank_pool.run(ranks, all_at_once, placement=placement, dtype=dtype, timeout_s=30)
    channels = list_channels(placement)
    for rank, (wrong, arrived, record) in enumerate(found):
        into = [channel for channel in channels if channel.destination == rank]
        out = [channel for channel in channels if channel.source == rank]
        assert wrong == []
        assert arrived == COUNT * len(into)
        wanted: Counter[tuple[str, str, int]] = Counter()
        for op, side in (("recv", into), ("send", out)):
            for channel in side:
                wanted[op, f"pp.{channel.direction}", LENGTH] += COUNT
        assert record == wanted


def blocked_lane(rank: int, world_size: int) -> list[float]:
    """A receive that is posted first, on another channel, does not hold the others up."""
    first, second = Channel(0, 1, "F"), Channel(0, 1, "B")
    links = open_links((second, first, Channel(1, 0, "B")), pipeline_group(rank, world_size))
    early, late, back = (torch.zeros(1) for _ in range(3))
    if rank == 1:
        waiting = receive_into(early, links[first])
        receive_into(late, links[second]).wait()
        send(late + 1, links[Channel(1, 0, "B")]).wait()
        waiting.wait()
        return [float(early), float(late)]
    send(torch.tensor([5.0]), links[second]).wait()
    receive_into(back, links[Channel(1, 0, "B")]).wait()
    send(torch.tensor([7.0]), links[first]).wait()
    return [float(back)]


def test_a_receive_posted_early_does_not_block_other_channels(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, blocked_lane, timeout_s=30) == [[6.0], [7.0, 5.0]]


def own_channels(placement: tuple[int, ...], rank: int, world_size: int) -> dict[Any, Link]:
    links = open_links(list_channels(placement), pipeline_group(rank, world_size))
    return {tuple(channel): (link.peer, link.name) for channel, link in links.items()}  # type: ignore[misc]


def test_a_rank_has_the_channels_that_begin_or_end_at_it(rank_pool: RankPool) -> None:
    found = rank_pool.run(3, own_channels, placement=(0, 1, 2), timeout_s=30)
    assert found[0] == {(0, 1, "F"): (1, "pp.F"), (1, 0, "B"): (1, "pp.B")}
    assert set(found[1]) == {(0, 1, "F"), (1, 0, "B"), (1, 2, "F"), (2, 1, "B")}
    assert set(found[2]) == {(1, 2, "F"), (2, 1, "B")}


def strided(rank: int, world_size: int) -> None:
    links = open_links(list_channels((0, 1)), pipeline_group(rank, world_size))
    link = links[Channel(rank, 1 - rank, "FB"[rank])]
    send(torch.zeros(4, 4).t(), link)


def test_what_is_not_contiguous_is_refused_not_sent_wrong(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="not contiguous"):
        rank_pool.run(2, strided, timeout_s=30)
