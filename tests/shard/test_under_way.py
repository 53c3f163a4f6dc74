"""What is on the wire at once is bounded and counted, and changes neither bits nor order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lite.shard import gather, reduce
from megatron_lite.shard.buckets import MOST_UNDER_WAY
from megatron_lite.shard.gather import SITES_AHEAD, UpdatedWeights
from megatron_lite.spec.physical import PhysicalParam
from tests.pool import RankPool
from tests.shard.stand import Stand, build_stand, parallel_shape


class Flights:
    """Collectives that have been started and not waited for, by their full length."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.most = 0
        self.started: list[int] = []

    def following(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(out: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            work = collective(out, t, *args, **kwargs)
            elements = max(out.numel(), t.numel())
            self.started.append(elements)
            self.live.append(elements)
            self.most = max(self.most, len(self.live))
            return _Flight(self, elements, work)

        return run


class _Flight:
    def __init__(self, flights: Flights, elements: int, work: Any) -> None:
        self._flights, self._elements, self._work = flights, elements, work

    def wait(self) -> object:
        if self._elements:
            self._flights.live.remove(self._elements)
            self._elements = 0
        return self._work.wait()


@contextmanager
def followed(module: Any, name: str) -> Iterator[Flights]:
    flights = Flights()
    with patch.object(module, name, flights.following(getattr(module, name))):
        yield flights


def backward(stand: Stand, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)

    def draw(physical: PhysicalParam) -> torch.Tensor:
        return torch.randn(physical.shape, generator=generator)

    stand.contribute(draw)


def reduced(
    rank: int, layout: dict[str, int], overlap: bool, microbatches: int, **options: Any
) -> dict[str, Any]:
    """A step's gradients as bits, what was on the wire, and the order of all collectives."""
    parallel = parallel_shape(**layout)
    stand = build_stand(parallel, rank, dtype="float32", overlap=overlap, **options)
    under_way = []
    with followed(reduce, "reduce_scatter_into") as flights:
        stand.sink.start_step(microbatches)
        for _ in range(microbatches):
            backward(stand, rank)
            under_way.append(len(flights.live))
        stand.sink.finish()
    return {
        "bits": [t.numpy().tobytes() for t in stand.buffers.owned_gradients.values()],
        "order": [(r.op, r.group, r.elements) for r in stand.recorder.records],
        "most": flights.most,
        "left": len(flights.live),
        "under way": under_way,
        "scattered": len(flights.started),
        "buckets": len(stand.sink.buckets),
    }


WAYS: dict[str, dict[str, Any]] = {
    "optim": {"stage": 1},
    "grads": {"stage": 2, "sharded_accumulation": True},
    "grads-whole": {"stage": 2},
    "params": {"stage": 3, "sharded_accumulation": True},
    "levels": {"stage": 0, "instances": 2},
    "optim-hybrid": {"stage": 1, "instances": 2},
    "grads-hybrid": {"stage": 2, "instances": 2, "sharded_accumulation": True},
    "grads-whole-hybrid": {"stage": 2, "instances": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_few_buckets_are_under_way_and_overlap_changes_no_bit(
    rank_pool: RankPool, way: str
) -> None:
    options = {"layout": {"dp": 4}, "microbatches": 2, **WAYS[way]}
    has_levels = "instances" in WAYS[way] and not WAYS[way].get("sharded_accumulation")
    ahead = rank_pool.run(4, reduced, overlap=True, **options)
    alone = rank_pool.run(4, reduced, overlap=False, **options)
    for told, other in zip(ahead, alone, strict=True):
        assert told["bits"] == other["bits"]
        assert told["buckets"] > MOST_UNDER_WAY + 1
        # With two levels the second of one bucket is on the wire beside the first of the next.
        assert told["most"] == (1 if has_levels else MOST_UNDER_WAY) and other["most"] == 1
        assert told["left"] == other["left"] == 0
        assert told["under way"][-1] > 0  # and not all are waited for where they start
        assert told["scattered"] in (told["buckets"], 2 * told["buckets"])
        assert told["order"] == ahead[0]["order"]
        assert sorted(told["order"]) == sorted(other["order"])


def gathered(rank: int, world_size: int, uses: list[str] | None, **options: Any) -> Any:
    """Gather after an update, use-site by use-site; how many travel at once."""
    stand = build_stand(parallel_shape(dp=world_size), rank, stage=1, **options)
    weights, buffers = stand.weights, stand.buffers
    assert isinstance(weights, UpdatedWeights)
    for index, owned in buffers.owned_values.items():
        owned.fill_(100.0 * rank + index)
    sites = [*dict.fromkeys(use for physical in stand.physicals for use in physical.uses)]
    live, wrong = [], []
    with followed(gather, "all_gather_into") as flights:
        weights.updated()
        live.append(len(flights.live))
        for use in sites if uses is None else uses:
            weights.before_forward((use,), 0)
            live.append(len(flights.live))
            for physical in stand.physicals:
                slot = buffers.layout.slots[physical.name]
                expected = [100.0 * r + slot.bucket for r in range(world_size)]
                if use in physical.uses:
                    whole = buffers.values[slot.bucket].view(world_size, -1)
                    wrong += [use] * (whole[:, 0].tolist() != expected)
        weights.settle()
        assert flights.live == []
        weights.before_forward((sites[0],), 0)
    sizes = [bucket.elements for bucket in stand.sink.buckets]
    in_a_site = max(len(weights._runs[number]) for number in range(len(weights._runs)))
    return {"live": live, "most": flights.most, "wrong": wrong, "started": flights.started,
            "sizes": sizes, "runs": len(weights._runs), "in a site": in_a_site}  # fmt: skip


@pytest.mark.parametrize("bucket_size", [1, 500, 3000])
def test_parameters_are_gathered_few_use_sites_ahead_in_forward_order(
    rank_pool: RankPool, bucket_size: int
) -> None:
    for told in rank_pool.run(2, gathered, uses=None, bucket_size=bucket_size):
        assert told["wrong"] == []
        assert told["started"] == told["sizes"][::-1]
        assert told["most"] <= SITES_AHEAD * told["in a site"]
        assert told["live"][0] > 0 and told["live"][-1] == 0
        assert told["runs"] > SITES_AHEAD or bucket_size == 3000


@pytest.mark.parametrize("uses", [[], ["head"], ["layer.1", "embedding"]], ids=str)
def test_an_odd_order_of_uses_gathers_every_bucket_once(
    rank_pool: RankPool, uses: list[str]
) -> None:
    for told in rank_pool.run(2, gathered, uses=uses):
        assert told["wrong"] == []
        assert sorted(told["started"]) == sorted(told["sizes"])
        assert told["most"] <= SITES_AHEAD * told["in a site"]


def test_without_overlap_one_use_site_travels_at_a_time(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, gathered, uses=None, overlap=False, bucket_size=1):
        assert told["live"] == [0] * len(told["live"])
        assert told["most"] == told["in a site"]
        assert told["started"] == told["sizes"][::-1]
