"""Every collective on real gloo ranks, in every dtype, and what the recorder says of it."""

import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.plan import ParallelShape
from megatron_lite.errors import UserError
from megatron_lite.mesh.collectives import (
    agree,
    all_gather_into,
    all_gather_json,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    gather_bytes,
    reduce_scatter_into,
)
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import Groups, build_groups, local_group, local_groups
from megatron_lite.mesh.recorder import CollectiveRecord, Recorder
from tests.pool import RankPool

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "uint8"]


def groups_of(rank: int, tp: int, dp: int, recorder: Recorder | None = None) -> Groups:
    shape = ParallelShape(
        world_size=tp * dp,
        tp=tp,
        cp=1,
        ep=1,
        etp=1,
        dp=dp,
        edp=tp * dp,
        pp=1,
        vpp=1,
        sequence_parallel=False,
        order="tp-cp-ep-dp-pp",
    )
    return build_groups(build_grids(shape), rank, kv_heads=1, recorder=recorder)


def every_collective(rank: int, world_size: int, dtype: str) -> dict[str, Any]:
    """Small integers, exact in every dtype: rank r holds [r, r+1, ...]."""
    warnings.simplefilter("error")
    world = groups_of(rank, tp=1, dp=world_size).world
    kind = getattr(torch, dtype)
    mine = torch.arange(rank, rank + 2 * world_size).to(kind)
    out: dict[str, torch.Tensor] = {}
    for op in ("sum", "max", "min"):
        out[op] = mine.clone()
        assert all_reduce(out[op], world, op) is None
    out["gather"] = torch.zeros(world_size, 2, dtype=kind)
    all_gather_into(out["gather"], mine[:2].unsqueeze(0).contiguous(), world)
    out["scatter"] = torch.zeros(2, dtype=kind)
    reduce_scatter_into(out["scatter"], mine.clone(), world)
    out["broadcast"] = mine.clone()
    broadcast(out["broadcast"], world, src_index=world_size - 1)
    # Rank r sends r+1 rows to everybody.
    rows = torch.full(((rank + 1) * world_size,), rank).to(kind)
    sizes = [peer + 1 for peer in range(world_size)]
    out["all_to_all"] = torch.zeros(sum(sizes), dtype=kind)
    all_to_all_single(out["all_to_all"], rows, sizes, [rank + 1] * world_size, world)
    barrier(world)
    assert all(t.dtype == kind for t in out.values())
    return {name: t.tolist() for name, t in out.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 4])
def test_collectives_are_exact(rank_pool: RankPool, n: int, dtype: str) -> None:
    results = rank_pool.run(n, every_collective, dtype=dtype)
    of_rank = [list(range(rank, rank + 2 * n)) for rank in range(n)]
    total = [sum(column) for column in zip(*of_rank, strict=True)]
    for rank, result in enumerate(results):
        assert result == {
            "sum": total,
            "max": of_rank[-1],
            "min": of_rank[0],
            "gather": [row[:2] for row in of_rank],
            "scatter": total[2 * rank : 2 * rank + 2],
            "broadcast": of_rank[-1],
            "all_to_all": [peer for peer in range(n) for _ in range(peer + 1)],
        }


def asynchronous(rank: int, world_size: int) -> list[Any]:
    tp = groups_of(rank, tp=world_size, dp=1).tp
    a = torch.full((3,), float(rank))
    gathered, part = torch.zeros(2 * world_size), torch.full((2,), float(rank))
    scattered, whole = torch.zeros(1), torch.ones(world_size)
    works = [
        all_reduce(a, tp, async_op=True),
        all_gather_into(gathered, part, tp, async_op=True),
        reduce_scatter_into(scattered, whole, tp, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [a.tolist(), gathered.tolist(), scattered.tolist()]


def test_asynchronous_collectives_hold_their_results_after_wait(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, asynchronous) == [[[3.0] * 3, [0.0, 0.0, 1, 1, 2, 2], [3.0]]] * 3


def gather_in_place(rank: int, world_size: int) -> list[float]:
    tp = groups_of(rank, tp=world_size, dp=1).tp
    out = torch.full((world_size,), -1.0)
    out[rank] = rank
    all_gather_into(out, out[rank : rank + 1], tp)
    return [t.item() for t in out]


def test_a_gather_may_start_from_its_own_slice(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, gather_in_place) == [[0.0, 1.0, 2.0, 3.0]] * 4


def over_each_axis(rank: int) -> list[float]:
    groups = groups_of(rank, tp=2, dp=2)
    sums = []
    for group in (groups.tp, groups.dp, groups.world, groups.dp_cp, groups.kv_replica, groups.pp):
        t = torch.tensor(float(2**rank))
        all_reduce(t, group)
        sums.append(t.item())
    return sums


def test_each_group_reduces_over_its_own_ranks(rank_pool: RankPool) -> None:
    tp, dp = [3, 3, 12, 12], [5, 10, 5, 10]
    assert rank_pool.run(4, over_each_axis) == [
        [tp[r], dp[r], 15, dp[r], tp[r], 2**r] for r in range(4)
    ]


def recorded(rank: int) -> list[CollectiveRecord]:
    recorder = Recorder()
    groups = groups_of(rank, tp=2, dp=2, recorder=recorder)
    with recorder.phase("forward"):
        all_reduce(torch.ones(3, 5, dtype=torch.bfloat16), groups.tp)
        all_gather_into(torch.ones(4, 3), torch.ones(2, 3), groups.dp)
        with recorder.phase("loss"):
            all_reduce(torch.ones(1, dtype=torch.float64), groups.world, "max")
        reduce_scatter_into(torch.ones(2, 3), torch.ones(4, 3), groups.tp)
    broadcast(torch.ones(7, dtype=torch.int64), groups.world)
    all_to_all_single(torch.ones(4), torch.ones(4), None, None, groups.tp)
    barrier(groups.tp)
    all_reduce(torch.ones(9), groups.cp)
    recorder.enabled = False
    all_reduce(torch.ones(9), groups.tp)
    return recorder.records


def test_the_recorder_holds_each_collective_once_in_order(rank_pool: RankPool) -> None:
    expected = [
        CollectiveRecord("all_reduce.sum", "tp", 15, "bfloat16", "forward"),
        CollectiveRecord("all_gather", "dp", 12, "float32", "forward"),
        CollectiveRecord("all_reduce.max", "world", 1, "float64", "loss"),
        CollectiveRecord("reduce_scatter.sum", "tp", 12, "float32", "forward"),
        CollectiveRecord("broadcast", "world", 7, "int64", ""),
        CollectiveRecord("all_to_all", "tp", 4, "float32", ""),
        CollectiveRecord("barrier", "tp", 0, "none", ""),
    ]
    assert rank_pool.run(4, recorded) == [expected] * 4


def test_the_recorder_sums_up_by_phase_op_and_group() -> None:
    recorder = Recorder()
    recorder.record("all_gather", "tp", 5, "float32")
    recorder.record("all_gather", "tp", 6, "float32")
    assert recorder.counts() == {("", "all_gather", "tp"): 2}
    assert recorder.elements() == {("", "all_gather", "tp"): 11}
    recorder.clear()
    assert not recorder.counts()


def messages(rank: int, world_size: int) -> tuple[Any, Any, str]:
    world = groups_of(rank, tp=1, dp=world_size).world
    agree("the same", world)
    said = ""
    try:
        agree("same" if rank < 2 else "other", world, "the seed")
    except UserError as error:
        said = str(error)
    objects = all_gather_json({"rank": rank, "text": "ä" * rank}, world)
    return objects, gather_bytes(b"x" * (rank * 1000), world), said


def test_objects_and_bytes_of_unequal_length_are_gathered(rank_pool: RankPool) -> None:
    for objects, parts, said in rank_pool.run(3, messages):
        assert objects == [{"rank": r, "text": "ä" * r} for r in range(3)]
        assert parts == [b"x" * (r * 1000) for r in range(3)]
        assert said == "the seed differs between ranks: 'same' on rank 0, 'other' on rank 2"


def test_a_group_of_one_is_the_identity_and_records_nothing() -> None:
    recorder = Recorder()
    one = local_group("tp", recorder)
    t, out = torch.arange(4.0), torch.zeros(4)
    assert all_reduce(t, one) is None
    assert t.tolist() == [0, 1, 2, 3]
    for collective in (all_gather_into, reduce_scatter_into):
        collective(out.zero_(), t, one)
        assert out.tolist() == [0, 1, 2, 3]
    all_to_all_single(out.zero_(), t, None, None, one)
    assert out.tolist() == [0, 1, 2, 3]
    work = all_reduce(t, one, async_op=True)
    assert work is not None
    work.wait()
    broadcast(t, one)
    barrier(one)
    agree("x", one)
    assert all_gather_json((1, 2), one) == [[1, 2]]
    assert recorder.records == []


def test_rows_that_do_not_stack_are_refused() -> None:
    with pytest.raises(ValueError, match=r"all_gather_into over tp of 1: \[2, 3\]"):
        all_gather_into(torch.ones(3, 2), torch.ones(2, 3), local_group("tp"))
    with pytest.raises(ValueError, match="float64"):
        reduce_scatter_into(torch.ones(2), torch.ones(2, dtype=torch.float64), local_group("tp"))


def test_the_groups_of_one_process_need_no_torch_distributed() -> None:
    groups = local_groups()
    assert not dist.is_initialized()
    assert all(group.size == 1 for group in vars(groups).values())
    assert {name: group.name for name, group in vars(groups).items()} == {
        name: name for name in vars(groups)
    }


@pytest.mark.parametrize("name", ["_all_gather", "_reduce_scatter"])
def test_older_names_of_torch_are_the_fallback(name: str) -> None:
    from megatron_lite.mesh import collectives

    newer = getattr(dist, name[1:] + "_single", None)
    chosen = getattr(collectives, name)
    assert isinstance(chosen, types.FunctionType)
    assert newer is None or chosen is newer
