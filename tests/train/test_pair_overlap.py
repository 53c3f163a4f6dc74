"""What pairs hide: the time of a step's all-to-alls, on a clock that computation costs nothing.

Every all-to-all takes one unit from its departure, in the lane that waits for it. The lanes
are real threads of a real run; their clocks meet where a pair begins and ends. So the time
of a step is exact: all of its all-to-alls that nothing hides.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron_lite.expert import alltoall
from megatron_lite.mesh import collectives
from megatron_lite.mesh.lane import Errand, Lane
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, build_and

LAYERS, MICROBATCHES = 2, 8
EXPERTS = (
    f"--num-layers {LAYERS} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 16 --expert-model-parallel-size 2 "
    f"--moe-token-dispatcher-type alltoall --global-batch-size {2 * MICROBATCHES}"
)


class Clocks:
    """The time of every thread, in all-to-alls."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.exchanges = 0

    def read(self) -> int:
        return self.now.get(threading.get_ident(), 0)

    def reach(self, time: int) -> None:
        self.now[threading.get_ident()] = max(self.read(), time)


class Slow:
    """An all-to-all that arrives one unit after its departure."""

    def __init__(self, clocks: Clocks, work: Any) -> None:
        self.clocks, self.work, self.departure = clocks, work, clocks.read()

    def wait(self) -> None:
        self.work.wait()
        self.clocks.exchanges += 1
        self.clocks.reach(self.departure + 1)


@contextmanager
def slow_transport(clocks: Clocks) -> Iterator[None]:
    send: Any = collectives.all_to_all_single
    start, wait = Lane.start, Errand.wait
    ends: list[int] = []  # of the errand under way

    def sending(*args: Any, async_op: bool = False) -> Any:
        work = send(*args, async_op=async_op)
        return Slow(clocks, work) if async_op else work

    def starting(self: Lane, work: Callable[[], None]) -> Errand:
        begin = clocks.read()

        def timed() -> None:
            clocks.reach(begin)
            work()
            ends.append(clocks.read())

        return start(self, timed)

    def waiting(self: Errand) -> None:
        wait(self)
        clocks.reach(ends.pop())

    shim = SimpleNamespace(all_to_all_single=sending, Work=collectives.Work)
    with (
        patch.object(alltoall, "collectives", shim),
        patch.object(Lane, "start", starting),
        patch.object(Errand, "wait", waiting),
    ):
        yield


def timed_step(argv: list[str], rank: int, world_size: int) -> tuple[int, int, int]:
    """(time, all-to-alls, pairs) of one step."""

    def use(parts: Parts, state: TrainState, status: object) -> tuple[int, int, int]:
        clocks = Clocks()
        with slow_transport(clocks):
            TrainStep(parts, state).run()
        pairs = sum(bool(a.halves) for a in parts.pipeline.actions(MICROBATCHES))
        return clocks.read(), clocks.exchanges, pairs

    found: tuple[int, int, int] = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("is_paired", [False, True])
def test_pairs_hide_half_of_the_all_to_alls_of_a_step(rank_pool: RankPool, is_paired: bool) -> None:
    argv = [*LLAMA, *RUN, *EXPERTS.split()]
    argv += ["--overlap-moe-expert-parallel-comm"] if is_paired else []
    one_way = 2 * LAYERS  # there and back
    for time, exchanges, pairs in rank_pool.run(2, timed_step, argv=argv, timeout_s=60):
        assert exchanges == 2 * one_way * MICROBATCHES
        if is_paired:
            assert pairs == MICROBATCHES - 1
            assert time == one_way * (MICROBATCHES + 1)
        else:
            assert (pairs, time) == (0, exchanges)


def alive_after(argv: list[str], rank: int, world_size: int) -> list[int]:
    """Tensors that exist after every third step, without the collector."""

    def use(parts: Parts, state: TrainState, status: object) -> list[int]:
        counts = []
        TrainStep(parts, state).run()
        gc.collect()
        gc.disable()
        for _ in range(3):
            for _ in range(3):
                TrainStep(parts, state).run()
            counts.append(sum(type(found) is Tensor for found in gc.get_objects()))
        gc.enable()
        return counts

    found: list[int] = build_and(use, argv, rank, world_size)
    return found


def test_nothing_outlives_steps_with_pairs(rank_pool: RankPool) -> None:
    argv = [*LLAMA, *RUN, *EXPERTS.split(), "--overlap-moe-expert-parallel-comm"]
    for counts in rank_pool.run(2, alive_after, argv=argv, timeout_s=60):
        assert counts[-1] <= counts[0] + 12, counts  # a batch may be under way
