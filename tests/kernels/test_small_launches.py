"""Addresses, undefined behaviour and races of the row-wise kernels, by the sanitizers."""

from __future__ import annotations

import pytest

from tests.sim import build

FAMILIES = ("norm", "dropout", "cross_entropy", "optimizer", "activation", "rotary")


@pytest.mark.timeout(300)  # room for building on a busy machine
@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_launches_are_clean_under(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    status, output = build.run_python(mode, ["-m", "tests.kernels.small_launches", *FAMILIES])
    assert status == 0, output
    assert output.split() == [word for name in (*FAMILIES, "done") for word in ("==", name)], output
