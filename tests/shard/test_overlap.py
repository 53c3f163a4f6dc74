"""Communication hides behind computing: what is left over is its last or its first message.

A step runs on a link whose logical clock advances with every gradient and every use-site, so
that what a step waits for is a number of ticks and no measured time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.mesh.recorder import Recorder
from megatron_lite.shard.gather import GatheredWeights, UpdatedWeights
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.cases.tiny import flags
from tests.pool import RankPool
from tests.shard.link import Link, delayed_collectives
from tests.train.program import build_and

STRATEGY = "--data-parallel-sharding-strategy"
BUCKETS = "--ddp-bucket-size 9000"  # several, of about a quarter layer
PER_ELEMENT = 0.25  # so a bucket's message is shorter than what is computed meanwhile
REDUCING = ("all_reduce.sum", "reduce_scatter.sum")


def ticks(argv: Sequence[str], overlap: bool, rank: int, world_size: int) -> dict[str, Any]:
    """The second of two steps on a slow link: ticks waited for, and what had left when.

    Computing takes a tick per element: of a gradient when it is written, of a use-site's
    parameters when its forward pass is over.
    """
    recorder = Recorder()

    def use(parts: Parts, state: TrainState, status: RunStatus) -> dict[str, Any]:
        link, sink = Link(PER_ELEMENT), type(parts.gradients)
        parts.gradients.overlap = overlap
        written = sink.written
        sizes: dict[str, int] = {}
        for slot in parts.buffers.layout.slots.values():
            for site in slot.physical.uses:
                sizes[site] = sizes.get(site, 0) + slot.numel
        reduced: list[int] = []

        def write(self: Any, param: Any) -> None:
            link.compute(param.numel())
            reduced[:] = [r.elements for r in recorder.records if r.op in REDUCING]
            written(self, param)

        def computed(method: Any) -> Any:
            def run(self: Any, uses: tuple[str, ...], *args: Any, **kwargs: Any) -> None:
                link.compute(sum(sizes[use] for use in uses))
                method(self, uses, *args, **kwargs)

            return run

        with (
            delayed_collectives(link),
            patch.object(sink, "written", write),
            patch.object(UpdatedWeights, "after_forward", computed(UpdatedWeights.after_forward)),
            patch.object(GatheredWeights, "after_forward", computed(GatheredWeights.after_forward)),
        ):
            TrainStep(parts, state).run()
            link.exposed.clear()
            recorder.clear()
            TrainStep(parts, state).run()
        buckets = [bucket.elements for bucket in parts.gradients.buckets]
        ends = {parts.buffers.layout.slots[name].bucket for name in parts.stage.physical
                if "embedding" in parts.stage.physical[name].uses}  # fmt: skip
        return {
            "exposed": dict(link.exposed),
            "buckets": buckets,
            "first": [buckets[index] for index in sorted(ends)],
            "before_last": [elements for elements in reduced if elements > 1],
        }

    found: dict[str, Any] = build_and(use, argv, rank, world_size, recorder)
    return found


def run(pool: RankPool, strategy: str, ranks: int, more: str = "", overlap: bool = True) -> Any:
    """One microbatch per data rank."""
    text = f"--global-batch-size {ranks} {BUCKETS} {STRATEGY} {strategy} {more}"
    return pool.run(ranks, ticks, argv=flags(text, steps=2), overlap=overlap)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_buckets_leave_during_the_backward_pass_and_the_last_is_exposed(
    rank_pool: RankPool, strategy: str, ranks: int
) -> None:
    more = "--reshard-after step" if strategy == "optim_grads_params" else ""  # no gathers there
    for told in run(rank_pool, strategy, ranks, more):
        assert len(told["buckets"]) > 4
        assert told["before_last"] == told["buckets"][:-1]
        assert told["exposed"]["reduce"] == PER_ELEMENT * told["buckets"][-1]


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_without_overlap_all_reductions_are_exposed(rank_pool: RankPool, strategy: str) -> None:
    for told in run(rank_pool, strategy, 2, overlap=False):
        assert told["before_last"] == []
        assert told["exposed"]["reduce"] == PER_ELEMENT * sum(told["buckets"])


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_of_overlapped_gathers_the_first_is_exposed(rank_pool: RankPool, strategy: str) -> None:
    for told in run(rank_pool, strategy, 2, "--overlap-param-gather"):
        assert told["exposed"]["gather"] == PER_ELEMENT * sum(told["first"])
    for told in run(rank_pool, strategy, 2):
        assert told["exposed"]["gather"] == PER_ELEMENT * sum(told["buckets"])


def test_sharded_parameters_are_gathered_ahead(rank_pool: RankPool) -> None:
    norm = 64  # ticks of the final norm, all that the head and the last layer hide behind
    for told in run(rank_pool, "optim_grads_params", 2, "--overlap-param-gather"):
        head, padded_norm, *layers, embedding = told["buckets"]
        last_layer = sum(layers[:3])
        turn = head + last_layer  # the norm is gathered for the way back behind the head
        assert padded_norm >= norm
        assert told["exposed"]["gather"] == PER_ELEMENT * (embedding + turn) - 2 * norm
        assert len(layers) == 4 * 3
