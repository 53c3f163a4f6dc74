"""Grad norm (GNORM): every logical element counts once, so clipping is the same everywhere.

Clipping at 0.05 always acts here: a norm that counted norm weights TP times would change
every weight. Unit forms stand in tests/optim.
"""

import json

import numpy as np
import pytest

from megatron_lite.config.plan import ParallelShape
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.sgd import SGD
from megatron_lite.spec.params import Cut, ParamSpec
from tests.cases.conftest import STEPS, Replicated
from tests.cases.layouts import EXPERT_LAYOUTS, LAYOUTS, PARALLEL, REFERENCE
from tests.shard.stand import build_buffers


@pytest.mark.parametrize("layout", PARALLEL)
def test_c053_grad_norms_and_clipped_weights_equal_one_process(
    replicated: Replicated, layout: str
) -> None:
    run = replicated(layout)
    assert run.differences == ()
    for row, wanted in zip(run.record.train_rows, run.reference.train_rows, strict=True):
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c053_the_norm_is_that_of_the_logical_gradients_and_the_clip_acts(
    replicated: Replicated, layout: str
) -> None:
    record = replicated(layout).record
    for step in range(1, STEPS + 1):
        path = record.directory / "dump" / f"step_{step:07d}.json"
        figures = json.loads(path.read_text())
        gradients = record.tensors(step, "grad").values()
        norm = sum(float(np.square(values).sum()) for values in gradients) ** 0.5
        assert figures["grad_norm"] == pytest.approx(norm, rel=1e-12)
        assert figures["clip_coefficient"] == pytest.approx(0.05 / (norm + 1e-6), rel=1e-12)
        assert figures["clip_coefficient"] < 1


def test_c055_an_expert_on_every_tensor_rank_counts_once_in_the_norm() -> None:
    """TP 2, EP 2, expert TP 1 on two ranks: a replicated scalar and an expert's on each rank."""
    parallel = ParallelShape(
        world_size=2, tp=2, cp=1, ep=2, etp=1, dp=1, edp=1, pp=1, vpp=1,
        sequence_parallel=False, order="tp-cp-ep-dp-pp",
    )  # fmt: skip
    specs = (
        ParamSpec("norm.weight", (1,), uses=("layer.0",)),
        ParamSpec(
            "experts.weight", (2, 1, 1), "expert", (Cut(0, "ep", 2),), uses=("layer.0",),
            matrix=(1, 1),
        ),
    )  # fmt: skip
    squares, zeros = 0.0, 0
    for rank in range(2):
        buffers, _ = build_buffers(specs, parallel, rank)
        held = list(buffers.gradient_pieces())
        assert [piece.box.elements for piece in held] == [1, 1]
        zeros += sum(int((piece.tensor == 0).sum()) for piece in held if piece.owned)
        for piece in held:
            piece.tensor.fill_(1.0)
        squares += float(Optimizer(buffers, SGD(momentum=0.0)).squared_norm()[0])
    assert squares**0.5 == pytest.approx(1.732051, abs=1e-6)
    assert zeros == 3


@pytest.mark.parametrize("layout", [name for name in EXPERT_LAYOUTS if name != REFERENCE])
def test_c055_norms_clips_and_updates_of_a_mixture_equal_one_process(
    mixture: Replicated, layout: str
) -> None:
    run = mixture(layout)
    assert run.differences == ()
    for row, wanted in zip(run.record.train_rows, run.reference.train_rows, strict=True):
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)
        assert row["grad_norm"] > 0.05  # the clip acts
        assert row["num_zeros"] == wanted["num_zeros"] > 0  # words that did not occur
    gradients = run.record.tensors(1, "grad").values()
    norm = sum(float(np.square(values).sum()) for values in gradients) ** 0.5
    assert run.record.train_rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-12)
