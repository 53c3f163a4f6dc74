"""Steps of a pipeline: what is alive when, what is left behind, and in which order it runs.

Clocks are logical where that is enough: a message carries its sender's time, so the
measured figures are exact on any machine.
"""

import ctypes
import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.mesh.groups import Group, world_group
from megatron_lite.mesh.p2p import open_links
from megatron_lite.pipeline import exchange as exchange_module
from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.channels import list_channels
from megatron_lite.pipeline.costs import Costs
from megatron_lite.pipeline.exchange import Exchange, MessageShape, Place
from megatron_lite.pipeline.runner import Runner
from megatron_lite.pipeline.schedules import FIXED_CHUNKS, build_schedule
from megatron_lite.pipeline.simulate import live_counts, peak_live, simulate
from megatron_lite.train.parts import Parts
from megatron_lite.train.passes import Passes
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.pool import RankPool
from tests.train.program import LLAMA, RUN, build_and

# name -> (ranks, flags)
PIPELINES = {
    "gpipe-2": (2, "--pipeline-schedule gpipe"),
    "1f1b-4": (4, ""),
    "interleaved-2x2": (2, "--num-virtual-stages-per-pipeline-rank 2"),
    "zb-h1-2": (2, "--pipeline-schedule zb-h1"),
    "zb-h2-4": (4, "--pipeline-schedule zb-h2"),
    "zbv-2": (2, "--pipeline-schedule zbv"),
    "v-half-2": (2, "--pipeline-schedule v-half"),
    "dualpipev-2": (2, "--pipeline-schedule dualpipev"),
}


def flags_of(name: str, *more: str) -> tuple[int, list[str]]:
    ranks, schedule = PIPELINES[name]
    sizes = f"--num-layers 4 --global-batch-size 8 --pipeline-model-parallel-size {ranks}"
    return ranks, [*LLAMA, *RUN, *sizes.split(), *schedule.split(), *more]


class Watch:
    """Weak references to what the passes of a step save, by stage and microbatch.

    To storages: autograd hands out new tensors of the same storage. What is saved is a copy,
    so that its storage is nobody else's.
    """

    def __init__(self) -> None:
        self.saved: dict[Place, list[StorageWeakRef]] = {}
        self.received: list[StorageWeakRef] = []
        self.executed: list[str] = []
        self.alive: list[int] = []
        self.left_last = 0

    def places(self) -> int:
        """Number of (stage, microbatch) of which something is alive."""
        return sum(any(not ref.expired() for ref in refs) for refs in self.saved.values())

    def left(self) -> int:
        """Tensors that are still alive."""
        refs = [*self.received, *(ref for refs in self.saved.values() for ref in refs)]
        return sum(not ref.expired() for ref in refs)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    handlers_of, receive = Passes.handlers, exchange_module.receive_into

    def handlers(self: Passes) -> Any:
        def wrap(handler: Any) -> Any:
            def run(action: Action) -> None:
                refs = watch.saved.setdefault((action.stage or 0, action.microbatch or 0), [])

                def pack(tensor: Tensor) -> Tensor:
                    kept = tensor.detach().clone()
                    refs.append(StorageWeakRef(kept.untyped_storage()))
                    return kept

                if action.kind is Kind.F:
                    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                        handler(action)
                else:
                    handler(action)
                watch.executed.append(str(action))
                watch.alive.append(watch.places())
                watch.left_last = watch.left()

            return run

        return {kind: wrap(handler) for kind, handler in handlers_of(self).items()}

    def receiving(tensor: Tensor, link: Any) -> Any:
        watch.received.append(StorageWeakRef(tensor.untyped_storage()))
        return receive(tensor, link)

    with (
        patch.object(Passes, "handlers", handlers),
        patch.object(exchange_module, "receive_into", receiving),
    ):
        yield


def watched_step(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """One step after another one, without the garbage collector."""

    def use(parts: Parts, state: TrainState, status: object) -> dict[str, Any]:
        TrainStep(parts, state).run()
        gc.collect()
        gc.disable()
        watch = Watch()
        with watched(watch):
            step = TrainStep(parts, state)
            step.run()
            del step
        gc.enable()
        table = parts.pipeline.actions(8)
        closing = (Kind.REDUCE, Kind.NORM, Kind.STEP)
        row = [action for action in table if action.kind not in closing]
        return {
            "executed": watch.executed,
            "row": [str(action) for action in row],
            "alive": watch.alive,
            "peak": peak_live(table)[0],
            "expected": expected_alive(row),
            "left": (watch.left_last, watch.left()),
            "saved": sum(map(len, watch.saved.values())),
            "received": len(watch.received),
        }

    found: dict[str, Any] = build_and(use, argv, rank, world_size)
    return found


def expected_alive(row: list[Action]) -> list[int]:
    """Alive after each action: the simulator counts during it."""
    ends = (Kind.W, Kind.B)
    return [
        alive - (action.kind in ends)
        for action, (alive, _, _) in zip(row, live_counts(row), strict=True)
    ]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_runs_its_table_and_keeps_what_the_simulator_says(
    rank_pool: RankPool, name: str
) -> None:
    ranks, argv = flags_of(name)
    for found in rank_pool.run(ranks, watched_step, argv=argv, timeout_s=60):
        assert found["executed"] == found["row"]
        assert found["alive"] == found["expected"]
        assert max(found["alive"]) == found["peak"]
        assert found["saved"] > 8
        assert found["received"] > 0
        # Nothing outlives the last pass, nor the step; also without the collector.
        assert found["left"] == (0, 0)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: bytes in use are `uordblks` (heap) and `hblkhd` (mapped)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """What malloc has given out; tensors of autograd's C++ nodes included."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def alive_after(argv: list[str], steps: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """(tensors, bytes) that exist after every 20th step, without the collector."""

    def use(parts: Parts, state: TrainState, status: object) -> list[tuple[int, int]]:
        counts = []
        TrainStep(parts, state).run()
        gc.collect()
        gc.disable()
        for step in range(1, steps + 1):
            TrainStep(parts, state).run()
            if step % 20 == 0:
                tensors = sum(type(found) is Tensor for found in gc.get_objects())
                counts.append((tensors, allocated_bytes()))
        gc.enable()
        return counts

    result: list[tuple[int, int]] = build_and(use, argv, rank, world_size)
    return result


@pytest.mark.parametrize("name", ["1f1b-2", "zb-h1-2"])
def test_nothing_grows_over_two_hundred_steps(rank_pool: RankPool, name: str) -> None:
    schedule = name.removesuffix("-2")
    sizes = "--train-iters 210 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4"
    argv = [*LLAMA, *RUN, *sizes.split(), "--global-batch-size", "8"]
    argv += ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    for counts in rank_pool.run(2, alive_after, argv=argv, steps=200, timeout_s=90):
        early, late = counts[1:4], counts[-3:]  # a batch may be under way at any moment
        assert min(tensors for tensors, _ in late) <= min(tensors for tensors, _ in early), counts
        # The transport grows by 2 KiB a step or so; one hidden state a step would be 32 KiB.
        grown = min(used for _, used in late) - min(used for _, used in early)
        assert grown < 120 * 8 * 1024, counts


COSTS = (3, 4, 2)  # F, I, W of every stage: unlike each other
MODELLED = {
    "gpipe": (4, 1),
    "1f1b": (4, 1),
    "interleaved": (4, 2),
    "zb-h1": (4, 1),
    "zb-h2": (4, 1),
    "interleaved-zb": (4, 2),
    "zbv": (4, 2),
    "v-half": (4, 2),
    "v-min": (4, 2),
    "dualpipev": (4, 2),
}


class Clock:
    """Handlers that compute nothing but time, on the real runner, exchange and links.

    Every message carries when it was sent; whoever takes it continues at that time or
    later. With `unit_s` the time is also slept.
    """

    def __init__(self, schedule: Schedule, exchange: Exchange, unit_s: float) -> None:
        self.now = self.busy = 0
        self.last = schedule.num_stages - 1
        self.exchange, self.unit_s = exchange, unit_s

    def handlers(self) -> dict[Kind, Any]:
        exchange = self.exchange
        return {
            Kind.F: self.forward,
            Kind.I: lambda action: self.backward(action, COSTS[1]),
            Kind.W: lambda action: self.spend(COSTS[2]),
            Kind.B: lambda action: self.backward(action, COSTS[1] + COSTS[2]),
            Kind.SEND_F: exchange.send_forward,
            Kind.RECV_F: lambda action: exchange.receive_forward(action, 1),
            Kind.LOCAL_F: exchange.hand_forward,
            Kind.SEND_B: exchange.send_backward,
            Kind.RECV_B: lambda action: exchange.receive_backward(action, 1),
            Kind.LOCAL_B: exchange.hand_backward,
            Kind.REDUCE: lambda action: None,
            Kind.NORM: lambda action: None,
            Kind.STEP: lambda action: None,
        }

    def spend(self, units: int) -> None:
        self.now += units
        self.busy += units
        if self.unit_s:
            time.sleep(units * self.unit_s)

    def forward(self, action: Action) -> None:
        place = (action.stage or 0, action.microbatch or 0)
        if action.stage:
            self.now = max(self.now, int(self.exchange.take_input(place)))
        self.spend(COSTS[0])
        if place[0] < self.last:
            self.exchange.put_output(place, self.told())

    def backward(self, action: Action, units: int) -> None:
        place = (action.stage or 0, action.microbatch or 0)
        if place[0] < self.last:
            self.now = max(self.now, int(self.exchange.take_output_gradient(place)))
        self.spend(units)
        if place[0]:
            self.exchange.put_input_gradient(place, self.told())

    def told(self) -> Tensor:
        return torch.full((1, 1, 1), float(self.now), dtype=torch.float64)


def timed_table(
    name: str, chunks: int, microbatches: int, unit_s: float, rank: int, world_size: int
) -> tuple[int, int, float]:
    """(logical end, logical busy time, seconds) of one rank."""
    schedule = build_schedule(name, world_size, chunks, microbatches)
    world = world_group(rank, world_size)
    pp = Group("pp", world.ranks, rank, world.process_group)
    links = open_links(list_channels(schedule.placement), pp)
    message = MessageShape(1, 1, torch.float64, torch.device("cpu"))
    exchange = Exchange(links, schedule.placement, message)
    clock, runner = Clock(schedule, exchange, unit_s), Runner(rank)
    torch.distributed.barrier()
    start = time.monotonic()
    runner.run(schedule.ranks[rank], clock.handlers())
    seconds = time.monotonic() - start
    exchange.finish()
    assert runner.counts == Counter(action.kind for action in schedule.ranks[rank])
    return clock.now, clock.busy, seconds


def uniform_costs(num_stages: int) -> Costs:
    return Costs(*((cost,) * num_stages for cost in COSTS))


@pytest.mark.parametrize("name", MODELLED)
def test_the_bubble_of_a_run_equals_the_simulated_one(rank_pool: RankPool, name: str) -> None:
    ranks, chunks = MODELLED[name]
    assert FIXED_CHUNKS.get(name, chunks) == chunks
    found = rank_pool.run(
        ranks, timed_table, name=name, chunks=chunks, microbatches=9, unit_s=0.0, timeout_s=30
    )
    schedule = build_schedule(name, ranks, chunks, 9)
    _, report = simulate(schedule, uniform_costs(schedule.num_stages))
    makespan = max(end for end, _, _ in found)
    busy = sum(busy for _, busy, _ in found) / ranks
    assert makespan == report.makespan
    assert (makespan - busy) / makespan == pytest.approx(float(report.bubble_fraction))


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_slept_steps_take_the_simulated_time_within_three_percent(
    rank_pool: RankPool, name: str
) -> None:
    """The best of several tries: a loaded machine only ever makes them longer."""
    ranks, chunks = MODELLED[name]
    schedule = build_schedule(name, ranks, chunks, 6)
    _, report = simulate(schedule, uniform_costs(schedule.num_stages))
    unit_s = 2.0 / float(report.makespan)
    tries: list[float] = []
    while len(tries) < 6 and (not tries or min(tries) > 1.03):
        found = rank_pool.run(
            ranks, timed_table, name=name, chunks=chunks, microbatches=6, unit_s=unit_s,
            timeout_s=30,
        )  # fmt: skip
        tries.append(max(seconds for _, _, seconds in found) / (unit_s * float(report.makespan)))
    assert 0.97 <= min(tries) <= 1.03, tries
