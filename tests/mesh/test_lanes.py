"""Two lanes of a rank: communicators of their own, whatever each rank starts first."""

import time
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_lite.config.plan import ParallelShape
from megatron_lite.mesh.collectives import all_reduce, all_to_all_single
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Groups, build_groups
from megatron_lite.mesh.lane import Lane
from megatron_lite.mesh.recorder import Recorder
from tests.pool import RankPool

ROUNDS = 6


def groups_of(rank: int, world_size: int, lane: Lane | None, recorder: Recorder) -> Groups:
    shape = ParallelShape(
        world_size=world_size,
        tp=2,
        cp=1,
        ep=2,
        etp=1,
        dp=world_size // 2,
        edp=world_size // 2,
        pp=1,
        vpp=1,
        sequence_parallel=False,
        order="tp-cp-ep-dp-pp",
    )
    grids = build_grids(shape)
    return build_groups(grids, rank, kv_heads=1, recorder=recorder, lane=lane)


def talk(groups: Groups, value: int, delay_s: float) -> list[int]:
    """All-to-alls over experts and sums over tp, of values that tell the lanes apart."""
    found = []
    for number in range(ROUNDS):
        time.sleep(delay_s)
        sent = torch.full((2,), value + number)
        received = torch.empty_like(sent)
        work = all_to_all_single(received, sent, None, None, groups.expert_block, async_op=True)
        assert work is not None
        total = torch.tensor([value])
        all_reduce(total, groups.tp)
        work.wait()
        found += [*received.tolist(), int(total)]
    return found


def both_lanes(rank: int, world_size: int) -> dict[str, Any]:
    lane, recorder = Lane(), Recorder()
    groups = groups_of(rank, world_size, lane, recorder)
    recorder.clear()
    beside: list[int] = []
    # Every other rank is late in the other lane: on one communicator they would mix.
    early = rank % 2 == 0
    errand = lane.start(
        lambda: beside.extend(talk(groups, 100 * (rank + 1), 0.01 if early else 0.0))
    )
    here = talk(groups, rank + 1, 0.0 if early else 0.01)
    errand.wait()
    lane.close()
    shared = [name for name in vars(groups) if getattr(groups, name).lane is not None]
    return {
        "here": here,
        "beside": beside,
        "lanes": shared,
        "ranks": groups.expert_block.ranks,
        "counts": Counter((r.op, r.group) for r in recorder.records),
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_lanes_do_not_mix_whatever_is_started_first(rank_pool: RankPool, world_size: int) -> None:
    for found in rank_pool.run(world_size, both_lanes, timeout_s=60):
        ranks = [rank + 1 for rank in found["ranks"]]
        for lane, unit in (("here", 1), ("beside", 100)):
            values = [unit * rank for rank in ranks]
            assert found[lane] == [
                number
                for k in range(ROUNDS)
                for number in (*(value + k for value in values), sum(values))
            ]
        assert found["lanes"] == ["tp", "ep", "expert_block", "tp_cp"]
        assert found["counts"] == {
            ("all_to_all", "expert_block"): 2 * ROUNDS,
            ("all_reduce.sum", "tp"): 2 * ROUNDS,
        }


def one_communicator(rank: int, world_size: int) -> list[bool]:
    groups = groups_of(rank, world_size, None, Recorder())
    return [
        group.communicator is group.process_group and group.twin is None
        for group in vars(groups).values()
    ]


def test_without_a_lane_there_is_one_communicator(rank_pool: RankPool) -> None:
    assert all(map(all, rank_pool.run(2, one_communicator)))
