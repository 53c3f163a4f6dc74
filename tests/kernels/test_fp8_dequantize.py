"""Dequantization of csrc/fp8/dequantize.cu gives the oracle's bits.

| result | bound      |
|--------|------------|
| values | equal bits |
"""

from typing import Any

import numpy as np
import pytest

from tests.kernels import fp8_oracle as oracle
from tests.kernels.fp8_calls import DTYPES, NAMES, SCALINGS, SOURCES, Result, dequantized, inputs
from tests.kernels.fp8_oracle import E4M3, FORMATS, Array, Format
from tests.sim import build


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(SOURCES)


def check(got: Array, codes: Array, scale_inv: Array, scaling: str, form: Format) -> None:
    want = oracle.dequantize(codes, scale_inv, scaling, form, got.dtype)
    np.testing.assert_array_equal(got.view(want.dtype), want)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize(
    "scale", [1.0, -0.3, 2.0**-140, 3e38, 0.0, np.inf, np.nan], ids=lambda s: f"{s:.3g}"
)
def test_every_code_at_any_scale(
    kernels: build.Kernels, form: Format, dtype: Any, scale: float
) -> None:
    codes = build.placed(np.arange(256, dtype=np.uint8).reshape(4, 64))
    scale_inv = build.placed(np.float32([scale]))
    got = dequantized(kernels, codes, scale_inv, "tensor", form, dtype)
    check(got, codes, scale_inv, "tensor", form)


def test_every_exponent_byte(kernels: build.Kernels) -> None:
    codes = build.placed(np.tile(np.arange(0, 256, 8, dtype=np.uint8), (256, 1)))
    scale_inv = build.placed(np.arange(256, dtype=np.uint8)[:, None])
    got = dequantized(kernels, codes, scale_inv, "mx", E4M3, np.float32)
    check(got, codes, scale_inv, "mx", E4M3)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (128, 128), (130, 144), (33, 392)], ids=str)
@pytest.mark.parametrize("order", ["fwd", "rev"])
def test_both_outputs_of_a_quantization(
    kernels: build.Kernels, scaling: str, dtype: Any, shape: tuple[int, int], order: str
) -> None:
    x = inputs(np.random.default_rng(1), *shape, dtype)
    result = Result(kernels, x, scaling, E4M3)
    scale_inv_t = result.scale_inv_t
    if scaling == "tensor":
        result.scale_inv = scale_inv_t = build.placed(np.float32([0.25]))
    elif scaling == "square":
        assert result.scale_inv is not None
        scale_inv_t = build.placed(np.ascontiguousarray(result.scale_inv.T))
    with kernels.options(order=order):
        for codes, scales in ((result.codes, result.scale_inv), (result.codes_t, scale_inv_t)):
            assert codes is not None and scales is not None
            got = dequantized(kernels, codes, scales, scaling, E4M3, dtype)
            check(got, codes, scales, scaling, E4M3)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_bytes_are_the_least(kernels: build.Kernels, dtype: Any) -> None:
    rows, cols = 256, 512
    codes = build.placed(np.zeros((rows, cols), np.uint8))
    scale_inv = build.placed(np.ones((cols // 128, rows), np.float32))
    out = build.poisoned((rows, cols), dtype)
    counts = kernels.count("launch_fp8_dequantize", codes, 0, 1, scale_inv, out,
                           DTYPES.index(np.dtype(dtype)), rows, cols)  # fmt: skip
    scales = 4 * rows * cols // (16 // out.itemsize)  # one read per vector, from the caches
    assert counts["global_load_bytes"] == rows * cols + scales
    assert counts["global_store_bytes"] == out.nbytes
    assert counts["global_store_sectors"] == out.nbytes // 32


def test_no_elements_is_no_launch(kernels: build.Kernels) -> None:
    for shape in ((0, 5), (5, 0)):
        codes = build.placed(np.zeros(shape, np.uint8))
        dequantized(
            kernels, codes, build.placed(np.ones(1, np.float32)), "tensor", E4M3, np.float32
        )


def test_offsets_beyond_two_to_the_31(kernels: build.Kernels) -> None:
    rows, cols = 70_000, 40_000
    codes, out = build.sparse((rows, cols), np.uint8), build.sparse((rows, cols), np.float32)
    last = np.arange(1, 65, dtype=np.uint8)
    codes[-1, -64:] = last
    scale_inv = build.placed(np.float32([2.0]))
    blocks = rows * cols // 4 // 256
    with kernels.options(blocks=f"{blocks - 1}:1"):
        kernels.call("launch_fp8_dequantize", codes, 0, 0, scale_inv, out, 0, rows, cols)
    want = oracle.dequantize(last[None], scale_inv, "tensor", E4M3, np.float32)
    np.testing.assert_array_equal(out[-1, -64:].view(np.uint32), want[0])


def test_wrong_arguments_are_refused(kernels: build.Kernels) -> None:
    for dtype, scaling, rows in ((3, 0, 1), (0, 4, 1), (0, 0, -1)):
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call("launch_fp8_dequantize", None, 0, scaling, None, None, dtype, rows, 1)
