"""Communication that overlaps (OVLP): when it happens changes no bit of what is computed.

Gradient reductions during or after the backward pass, parameter gathers ahead of need or on
it; and buckets that were filled in another order than the model computes in.
"""

import dataclasses
import random
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from megatron_lite.config import plan
from megatron_lite.mesh.launch import RunStatus
from megatron_lite.train import data_axis
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from megatron_lite.train.weights_hash import hash_weights
from tests.cases.tiny import SGD, flags
from tests.pool import RankPool
from tests.train.program import build_and

STEPS = 5
TEXT = f"{SGD} --num-layers 2 --micro-batch-size 2 --clip-grad 0.05 --ddp-bucket-size 3000"
OVERLAPS = tuple(product((False, True), repeat=2))
Told = tuple[list[tuple[float, float]], str, list[str]]


def overlapped_steps(
    argv: Sequence[str], overlap: tuple[bool, bool], shuffled: bool, rank: int, world_size: int
) -> Told:
    """Losses and norms, hash of the weights at the end, and parameters in bucket order.

    Args:
        overlap: of reductions, of gathers.
        shuffled: register the parameters in an order that is not the model's.
    """
    original_plan, original_trained = plan.plan_sharding, data_axis.trained

    def planned(config: Any) -> Any:
        reduce, gather = overlap
        sharding = original_plan(config)
        return dataclasses.replace(sharding, overlap_reduce=reduce, overlap_gather=gather)

    def in_other_order(*args: Any) -> Any:
        found = list(original_trained(*args))
        random.Random(7).shuffle(found)
        return tuple(found)

    def use(parts: Parts, state: TrainState, status: RunStatus) -> Told:
        reports = [TrainStep(parts, state).run() for _ in range(STEPS)]
        figures = [(report.lm_loss, report.grad_norm) for report in reports]
        names = [name for bucket in parts.gradients.buckets for name in bucket.names]
        return figures, hash_weights(parts), names

    with ExitStack() as stack:
        stack.enter_context(patch.object(plan, "plan_sharding", planned))
        if shuffled:
            stack.enter_context(patch.object(data_axis, "trained", in_other_order))
        found: Told = build_and(use, argv, rank, world_size)
    return found


@pytest.mark.parametrize("shuffled", [False, True], ids=["forward-order", "other-order"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_c061_overlap_changes_no_bit(rank_pool: RankPool, strategy: str, shuffled: bool) -> None:
    argv = [word for word in flags(TEXT, steps=STEPS) if "untie" not in word]
    argv += ["--data-parallel-sharding-strategy", strategy]
    found = {}
    for overlap in OVERLAPS:
        ranks = rank_pool.run(2, overlapped_steps, argv=argv, overlap=overlap, shuffled=shuffled)
        assert len({(tuple(figures), digest) for figures, digest, _ in ranks}) == 1
        found[overlap] = ranks[0]
    off = found[False, False]
    assert len(set(off[0])) == STEPS
    for overlap, other in found.items():
        assert other == off, overlap
    (plain,) = {
        tuple(figures)
        for figures, _, _ in rank_pool.run(
            1, overlapped_steps, argv=argv[:-2], overlap=(True, False), shuffled=False
        )
    }
    for mine, wanted in zip(off[0], plain, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-10)


def test_c061_the_other_order_is_not_that_of_the_model(rank_pool: RankPool) -> None:
    argv = [*flags(TEXT, steps=STEPS), "--data-parallel-sharding-strategy", "optim"]
    names = [
        rank_pool.run(2, overlapped_steps, argv=argv, overlap=(True, True), shuffled=way)[0][2]
        for way in (False, True)
    ]
    assert sorted(names[0]) == sorted(names[1])
    layers = [[name.split(".")[2] for name in order if ".layers." in name] for order in names]
    assert layers[0] == sorted(layers[0], reverse=True)
    assert layers[1] != sorted(layers[1], reverse=True)
