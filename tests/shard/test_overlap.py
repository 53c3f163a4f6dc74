"""Reductions hide behind the backward pass: what is left over is the last bucket."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.cases.tiny import flags
from tests.pool import RankPool
from tests.shard.link import Link, delayed_collectives
from tests.train.program import build_and

BUCKETS = "--ddp-bucket-size 9000"  # several, of about a quarter layer
PER_ELEMENT = 0.25  # so a bucket's reduction is shorter than the next one's gradients


def exposed_ticks(argv: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """One step on a slow link: ticks waited for in reductions, and the buckets' sizes."""

    def use(parts: Parts, state: TrainState, status: RunStatus) -> dict[str, Any]:
        link = Link(PER_ELEMENT)
        sink = type(parts.gradients)
        written, finish = sink.written, sink.finish
        told: dict[str, Any] = {"buckets": [bucket.elements for bucket in parts.gradients.buckets]}

        def write(self: Any, param: Any) -> None:
            link.compute(param.numel())
            written(self, param)

        def end(self: Any) -> Any:
            told["before"] = link.exposed
            absent = finish(self)
            told["after"] = link.exposed
            return absent

        with (
            delayed_collectives(link),
            patch.object(sink, "written", write),
            patch.object(sink, "finish", end),
        ):
            TrainStep(parts, state).run()
        return told

    found: dict[str, Any] = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_only_the_last_bucket_is_exposed(rank_pool: RankPool, ranks: int) -> None:
    argv = flags(f"--global-batch-size {ranks} {BUCKETS}", steps=1)
    for told in rank_pool.run(ranks, exposed_ticks, argv=argv):
        assert len(told["buckets"]) > 4
        assert told["before"] == 0
        assert told["after"] == PER_ELEMENT * told["buckets"][-1]
