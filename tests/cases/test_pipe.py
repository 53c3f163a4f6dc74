"""Pipeline schedules (PIPE): a step that is left out, and what cannot be cut into microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_lite.config.flags import parse_config
from megatron_lite.config.rules import violations
from megatron_lite.train.parts import Parts
from megatron_lite.train.state import TrainState
from megatron_lite.train.step import TrainStep
from tests.cases.tiny import flags
from tests.pool import RankPool
from tests.train.program import build_and

POISONED_STEP, POISONED_STAGE = 2, 2
PP4 = "--pipeline-model-parallel-size 4 --fp64 --nan-policy skip"
OPTIMIZERS = {
    "sgd": "--optimizer sgd --sgd-momentum 0 --lr 0.1",
    "adam": "--optimizer adam --lr 1e-3",
}


def poisoned_steps(argv: Sequence[str], rank: int, world_size: int) -> list[Any]:
    """Five steps; in the third an element of one stage's gradients is infinite."""

    def use(parts: Parts, state: TrainState, status: object) -> list[Any]:
        del status
        finish = parts.gradients.finish

        def poison() -> None:
            finish()
            if state.iteration == POISONED_STEP and parts.groups.pp.rank == POISONED_STAGE:
                next(iter(parts.buffers.gradient_pieces())).tensor.flatten()[0] = float("inf")

        parts.gradients.finish = poison  # type: ignore[method-assign]
        found = []
        for _ in range(5):
            report = TrainStep(parts, state).run()
            found.append((report.skipped, report.lm_loss, report.grad_norm, weights(parts)))
        return found

    result: list[Any] = build_and(use, argv, rank, world_size)
    return result


def weights(parts: Parts) -> str:
    """Hash of the bits of this rank's weights."""
    digest = hashlib.sha256()
    for name in sorted(parts.stage.physical):
        weight = parts.stage.param(name).detach().contiguous()
        digest.update(weight.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c074_a_step_with_inf_on_one_stage_is_left_out_on_all_in_every_schedule(
    rank_pool: RankPool, optimizer: str
) -> None:
    runs = {}
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        text = f"{PP4} {OPTIMIZERS[optimizer]} --pipeline-schedule {schedule}"
        runs[schedule] = rank_pool.run(4, poisoned_steps, argv=flags(text))
    for ranks in runs.values():
        for steps in ranks:
            assert [step[0] for step in steps] == [False, False, True, False, False]
            assert steps[2][3] == steps[1][3]  # the skipped step has changed no bit
            assert len({step[3] for step in steps}) == 4
    # All ranks see one loss and norm; another schedule has the same bits of every weight.
    for ranks in runs.values():
        assert [step[1:3] for step in ranks[0][3:]] == [step[1:3] for step in ranks[3][3:]]
    reference = [[step[3] for step in steps] for steps in runs["1f1b"]]
    for schedule in ("zb-h1", "zb-h2"):
        assert [[step[3] for step in steps] for steps in runs[schedule]] == reference


def test_c075_a_batch_that_microbatches_do_not_divide_is_refused_with_the_arithmetic() -> None:
    text = "--num-layers 3 --pipeline-model-parallel-size 3 --global-batch-size 8"
    found = dict(violations(parse_config(flags(f"{text} --micro-batch-size 3"), {}), 3))
    assert list(found) == ["batch-divides"]
    for part in ("--global-batch-size 8", "--micro-batch-size 3", "6 or 9"):
        assert part in found["batch-divides"]
