"""Grad norm (GNORM): every logical element counts once, so clipping is the same everywhere.

Clipping at 0.05 always acts here: a norm that counted norm weights TP times would change
every weight. Unit forms stand in tests/optim.
"""

import json

import numpy as np
import pytest

from tests.cases.conftest import STEPS, Replicated
from tests.cases.layouts import LAYOUTS, PARALLEL


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
