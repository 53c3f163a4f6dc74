"""Amax, scales from amax and delayed scaling of csrc/fp8/scaling.cu: equal bits.

| result                  | bound                                                               |
|-------------------------|---------------------------------------------------------------------|
| amax, scales, histories | equal bits; scales and inverses finite and above 0 for every amax   |
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.kernels import fp8_oracle as oracle
from tests.kernels.fp8_calls import DTYPES, NAMES, SOURCES, Result, code_of, inputs
from tests.kernels.fp8_oracle import BFLOAT16, E4M3, FORMATS, Format
from tests.sim import build


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(SOURCES)


@pytest.fixture(params=["fwd", "rev", "rand:3"])
def ordered(request: pytest.FixtureRequest, kernels: build.Kernels) -> Iterator[build.Kernels]:
    with kernels.options(order=request.param):
        yield kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 37), (7, 520), (300, 16)], ids=str)
@pytest.mark.parametrize("special", [None, np.inf, np.nan])
def test_amax(
    ordered: build.Kernels, shape: tuple[int, int], dtype: Any, special: float | None
) -> None:
    x = inputs(np.random.default_rng(5), *shape, dtype)
    if x.size and special is not None:
        x.flat[x.size // 2] = special
    partial, amax = build.poisoned(4, np.uint32), build.poisoned(1, np.float32)
    stride = max(shape[1], 1)
    ordered.call(
        "launch_fp8_amax", x, code_of(dtype), partial, 4, amax, *shape, stride
    )  # fmt: skip
    np.testing.assert_array_equal(amax[0], oracle.amax_of(x, (0, 1)))


def test_quantization_leaves_the_amax_for_the_next_step(kernels: build.Kernels) -> None:
    x = inputs(np.random.default_rng(6), 140, 300, BFLOAT16)
    got = Result(kernels, x, "tensor", E4M3, scale=2.0)
    amax = build.poisoned(1, np.float32)
    assert got.partial is not None
    kernels.call("launch_fp8_amax_finish", got.partial, got.partial.size, amax)
    assert amax[0] == oracle.amax_of(x, (0, 1))


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_from_amax(kernels: build.Kernels, form: Format, power_of_two: bool) -> None:
    amax = np.float32([0, 1e-45, 1e-40, 1e-38, 1e-30, 0.1, 1, 448, 449, 3.4e38, np.inf, np.nan])
    scale, inverse = build.poisoned(12, np.float32), build.poisoned(12, np.float32)
    kernels.call("launch_fp8_scales", build.placed(amax), scale, inverse, 12, form.code, 0.0,
                 int(power_of_two))  # fmt: skip
    np.testing.assert_array_equal(scale, oracle.scale_of(amax, form, 0.0, power_of_two))
    np.testing.assert_array_equal(inverse, np.float32(1) / scale)
    assert np.all(np.isfinite(scale)) and np.all(np.isfinite(inverse)) and np.all(inverse > 0)
    usable = np.isfinite(amax)
    assert np.all(amax[usable].astype(np.float64) * scale[usable] <= form.largest * (1 + 1e-7))


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("most_recent", [False, True])
def test_delayed_scaling_follows_the_history(
    kernels: build.Kernels, length: int, most_recent: bool
) -> None:
    rng = np.random.default_rng(length)
    history = build.placed(np.abs(rng.standard_normal((length, 6))).astype(np.float32))
    history[0, :4] = np.float32([0, np.nan, np.inf, 1e-40])
    history[1:, 0] = 0  # nothing to go by: the old scale stays
    old = build.placed(np.arange(1, 7, dtype=np.float32))
    before, scale, inverse = history.copy(), build.placed(old), build.poisoned(6, np.float32)
    kernels.call("launch_fp8_delayed_update", history, scale, inverse, length, 6,
                 int(most_recent), 0.5, 0, 0.0, 0)  # fmt: skip
    for i in range(6):
        seen = before[:1, i] if most_recent else before[:, i]
        seen = seen[np.isfinite(seen) & (seen > 0)]
        want = oracle.scale_of(np.max(seen), E4M3) * np.float32(0.5) if seen.size else old[i]
        assert scale[i] == want
    np.testing.assert_array_equal(inverse, np.float32(1) / scale)
    rolled = np.roll(before, -1, axis=0)
    rolled[0] = 0
    np.testing.assert_array_equal(history, rolled)
