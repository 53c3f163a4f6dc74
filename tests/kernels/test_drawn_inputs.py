"""Drawn sizes and values for kernels whose own tests walk a grid: MoE rows, SGD, norm, codes.

Bounds are those of the families' tests, whose checks run here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import fp8_calls, test_fp8_dequantize, test_moe, test_optimizer
from tests.kernels.elements import DTYPES, load, put, wide
from tests.kernels.fp8_oracle import FORMATS, Format
from tests.sim import build

MOE = tuple(f"moe/{name}.cu" for name in ("routing", "pack", "combine"))
FP8 = tuple(f"fp8/{name}.cu" for name in ("scaling", "quantize", "dequantize"))


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 60), h=st.integers(1, 300), k=st.integers(1, 9),
    dtype=st.sampled_from(test_moe.DTYPES), weighted=st.booleans(),
)  # fmt: skip
def test_combine_and_its_gradients(tokens: int, h: int, k: int, dtype: Any, weighted: bool) -> None:
    kernels = load(*MOE)
    test_moe.test_combine_is_the_weighted_sum(kernels, dtype, tokens, h, k, weighted)
    test_moe.test_combine_backward_gives_both_gradients(kernels, dtype, tokens, h, k, weighted)


@settings(max_examples=15, deadline=None)
@given(
    h=st.integers(1, 300), dtype=st.sampled_from([np.uint8, np.uint16, np.float32, np.float64]),
    shift=st.integers(0, 16), seed=st.integers(0, 99),
)  # fmt: skip
def test_gather_of_any_rows(h: int, dtype: type, shift: int, seed: int) -> None:
    rng, kernels = np.random.default_rng(seed), load(*MOE)
    x = build.placed(rng.integers(1, 200, (9, h + 24)).astype(dtype))[:, shift : shift + h]
    source = build.placed(rng.integers(-1, 27, 40).astype(np.int32))
    packed = build.poisoned((40, h), dtype)
    kernels.call("launch_moe_gather", x, x.strides[0], source, packed, None, None, 40,
                 h * x.itemsize, 3)  # fmt: skip
    want = np.where(source[:, None] < 0, np.zeros(1, dtype), x[source // 3])
    assert packed.tobytes() == want.astype(dtype).tobytes()


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 3000), offset=st.integers(0, 7), copy=st.sampled_from(["bf16", "fp16", None]),
    clip=st.floats(0, 2), decay=st.floats(0, 0.5), momentum=st.sampled_from([0.0, 0.5, 0.99]),
    decoupled=st.booleans(),
)  # fmt: skip
def test_sgd(
    n: int, offset: int, copy: str | None, clip: float, decay: float, momentum: float,
    decoupled: bool,
) -> None:  # fmt: skip
    kernels = load(*test_optimizer.SOURCES)
    case = test_optimizer.Range(kernels, n, offset, copy, clip, decay=decay, seed=n)
    case.sgd(momentum, decoupled)
    case.verify_sgd()


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(0, 20_000), offset=st.integers(0, 9), dtype=st.sampled_from(sorted(DTYPES)),
    exponent=st.integers(-10, 10),
)  # fmt: skip
def test_squared_norm(n: int, offset: int, dtype: str, exponent: int) -> None:
    values = np.random.default_rng(n).standard_normal((1, n)) * 2.0**exponent
    x = put(values, dtype, 0, offset)[0]
    out, _ = test_optimizer.squared_norm(load(*test_optimizer.SOURCES), x, dtype)
    want = (wide(x) ** 2).sum()
    assert abs(out[0] - want) <= 1e-14 * want
    assert out[1] == 0


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 150), cols=st.integers(1, 150), form=st.sampled_from(FORMATS),
    scaling=st.sampled_from(fp8_calls.SCALINGS), dtype=st.sampled_from(fp8_calls.DTYPES),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_dequantization_of_any_codes(
    rows: int, cols: int, form: Format, scaling: str, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = build.placed(rng.integers(0, 256, (rows, cols)).astype(np.uint8))
    scales, _ = fp8_calls.scale_arrays(scaling, rows, cols)
    scales = build.placed(np.ones(1, np.float32)) if scales is None else scales
    bits = rng.integers(0, 256, scales.nbytes).astype(np.uint8)
    scales[...] = bits.view(scales.dtype).reshape(scales.shape)  # any bits, NaN among them
    got = fp8_calls.dequantized(load(*FP8), codes, scales, scaling, form, dtype)
    test_fp8_dequantize.check(got, codes, scales, scaling, form)
