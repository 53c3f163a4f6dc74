"""Resume (OPTRES): new processes continue a run as if it had never stopped, bit by bit."""

import pytest
import torch

from megatron_lite.checkpoint.reader import open_checkpoint
from tests.cases.conftest import Resumed
from tests.cases.layouts import REFERENCE


@pytest.mark.parametrize("layout", [REFERENCE, "tp2-sp", "dp2", "tp2-sp-dp2"])
def test_c033_a_resumed_run_prints_the_same_lines_and_leaves_the_same_bits(
    resumed: Resumed, layout: str
) -> None:
    whole, rest = resumed(layout)
    assert len(whole.lines) == 10 and len(rest.lines) == 5
    assert rest.lines == whole.lines[5:]
    for found, wanted in zip(rest.rows, whole.rows[5:], strict=True):
        for key in ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert found[key] == wanted[key], key
    first, second = open_checkpoint(whole.save), open_checkpoint(rest.save)
    assert first.step == second.step == 10
    assert first.names == second.names
    assert any(name.startswith("optim/exp_avg_sq/") for name in first.names)
    for name in first.names:
        assert torch.equal(first.read(name), second.read(name)), name
