"""Addresses, undefined behaviour and races of attention at every compiled head dim.

The sanitizer runs of test_attention_limits.py have every option at one dim; tiles, stages and,
above d 128, the launches of the key side are others at other dims. Numbers are checked, too.
As a program (`python -m`) it runs the cases once.
"""

from __future__ import annotations

import pytest

from tests.kernels import attention_calls as calls
from tests.kernels.attention_calls import Case
from tests.sim import build

CASES = (
    Case(q_len=70, k_len=70, dim=32, value_dim=32, causal=True),
    Case(q_len=70, k_len=40, dim=96, value_dim=96),
    Case(q_len=70, k_len=70, dim=128, value_dim=128, causal=True, window=20, layout="fused"),
    Case(heads=2, q_len=70, k_len=70, dim=192, value_dim=128, causal=True),
    Case(q_len=40, k_len=70, dim=256, value_dim=256, causal=True),
)


@pytest.mark.timeout(300)  # room for building on a busy machine
@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_every_head_dim_is_clean_under(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    status, output = build.run_python(mode, ["-m", "tests.kernels.test_attention_dims"])
    assert status == 0 and output.split() == ["done"], output[-4000:]


def main() -> None:
    for case in CASES:
        calls.run(calls.built(), case)
    print("done")


if __name__ == "__main__":
    main()
