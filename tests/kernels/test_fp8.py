"""The fp8 kernels of csrc/fp8 give the oracle's bits, in every order of threads.

| from fp32, bf16, fp16 to  | bound of |value - x| per block with amax a                       |
|---------------------------|------------------------------------------------------------------|
| E4M3, nearest             | 2^-4 * |x| + 2^-10 / scale, scale >= 448 / (2 * a)                |
| E5M2, nearest             | 2^-3 * |x| + 2^-17 / scale, scale >= 57344 / (2 * a)              |
| stochastic                | twice that, and right on average                                 |
| codes, scales, amax       | equal bits                                                       |
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import fp8_oracle as oracle
from tests.kernels.fp8_calls import DTYPES, NAMES, SCALINGS, SOURCES, Result, ceil_div, inputs
from tests.kernels.fp8_oracle import BFLOAT16, E4M3, E5M2, FORMATS, Array, Format
from tests.sim import build

RELATIVE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
ABSOLUTE = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}


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


def check(got: Result, x: Array, scaling: str, form: Format, **more: Any) -> None:
    """Both outputs equal the oracle's, byte by byte."""
    words = more.pop("words", None)
    sides = [(got.codes, got.scale_inv, x, words)]
    transposed_words = None if words is None else words.T
    sides.append((got.codes_t, got.scale_inv_t, x.T, transposed_words))
    for side, (codes, scale_inv, values, side_words) in enumerate(sides):
        want = oracle.quantize(values, scaling, form, words=side_words, **more)
        if codes is not None:
            np.testing.assert_array_equal(codes, want.codes)
        if scale_inv is not None and not (scaling == "square" and side == 1):
            bits = np.uint8 if scaling == "mx" else np.uint32
            np.testing.assert_array_equal(scale_inv.view(bits), want.scale_inv.view(bits))


# ---- rounding ------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=NAMES[1:])
def test_every_16_bit_value_gets_the_code_of_ml_dtypes(
    kernels: build.Kernels, form: Format, dtype: Any
) -> None:
    x = build.placed(np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256))
    got = Result(kernels, x, "tensor", form)
    check(got, x, "tensor", form)
    assert got.codes is not None
    values = x.astype(np.float32)
    assert np.all(got.codes[np.isnan(values)] == 0x7F)
    largest = np.float32(form.largest).astype(form.dtype).view(np.uint8)
    assert np.all(got.codes[values == np.inf] == largest)
    assert np.all(got.codes[values == -np.inf] == (largest | 0x80))


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_ties_and_their_neighbours_round_to_even(kernels: build.Kernels, form: Format) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.sort(oracle.decode(codes, form))
    values = values[np.isfinite(values)].astype(np.float32)
    ties = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    beyond = np.float32(form.largest) * np.float32([1.03, 1.07, 2, -1.03, -3])
    special = np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-38, np.inf, -np.inf, np.nan])
    points = np.concatenate([values, ties, beyond, special])
    points = np.concatenate([points, np.nextafter(points, -np.inf), np.nextafter(points, np.inf)])
    x = build.placed(np.float32(points)[None, :])
    check(Result(kernels, x, "tensor", form), x, "tensor", form)


# ---- all layouts ---------------------------------------------------------------------------
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 128), (3, 37), (128, 128), (130, 144), (33, 392)], ids=str
)
def test_codes_and_scales_equal_the_oracle(
    kernels: build.Kernels, shape: tuple[int, int], dtype: Any, form: Format, scaling: str
) -> None:
    x = inputs(np.random.default_rng(7), *shape, dtype)
    more = {"scale": 3.7} if scaling == "tensor" else {"power_of_two": shape[0] % 2 == 1}
    got = Result(kernels, x, scaling, form, **more)
    check(got, x, scaling, form, **more)
    want = oracle.quantize(x, scaling, form, **more)
    exact = x.astype(np.float64)
    room = 3.7 if scaling == "tensor" else form.largest / (2 * np.abs(exact).max() + 1e-300)
    saturated = np.abs(exact) * 3.7 > form.largest if scaling == "tensor" else False
    bound = RELATIVE[form.name] * np.abs(exact) * (1 + 1e-6) + ABSOLUTE[form.name] / room
    assert np.all((np.abs(want.values - exact) <= bound) | saturated)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_outputs_do_not_depend_on_the_order_of_threads(
    ordered: build.Kernels, scaling: str
) -> None:
    x = inputs(np.random.default_rng(1), 140, 272, BFLOAT16)
    got = Result(ordered, x, scaling, E4M3)
    check(got, x, scaling, E4M3)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_each_output_can_be_left_out(kernels: build.Kernels, scaling: str) -> None:
    x = inputs(np.random.default_rng(2), 48, 160, BFLOAT16)
    for missing in ("rowwise", "transposed"):
        got = Result(kernels, x, scaling, E5M2, **{missing: False})
        present = got.codes if missing == "transposed" else got.codes_t
        side = x if missing == "transposed" else x.T
        np.testing.assert_array_equal(present, oracle.quantize(side, scaling, E5M2).codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_strided_and_misaligned_inputs(kernels: build.Kernels, dtype: Any, offset: int) -> None:
    wide = inputs(np.random.default_rng(3), 40, 1024 + 8 * offset + offset, dtype)
    x = wide[:, offset : offset + 176]
    check(Result(kernels, x, "rows", E4M3), x, "rows", E4M3)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_no_elements_is_no_launch(kernels: build.Kernels, shape: tuple[int, int]) -> None:
    for scaling in SCALINGS:
        Result(kernels, build.placed(np.zeros(shape, np.float32)), scaling, E4M3)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 150), st.integers(1, 150), st.data())
def test_drawn_shapes_and_exponents(
    kernels: build.Kernels, seed: int, rows: int, cols: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (rows, cols), dtype=np.uint32)  # any float32, also NaN
    few = bits & np.uint32(0x9FFFFFFF) | np.uint32(0x20000000)
    x = build.placed(np.where(rng.random((rows, cols)) < 0.01, bits, few).view(np.float32))
    scaling, form = data.draw(st.sampled_from(SCALINGS)), data.draw(st.sampled_from(FORMATS))
    check(Result(kernels, x, scaling, form), x, scaling, form)


# ---- blocks without a usable amax ------------------------------------------------------------
SPECIAL = {
    "zeros": np.zeros(128),
    "negative zeros": np.full(128, -0.0),
    "subnormal": np.linspace(-1e-40, 1e-40, 128),
    "least": np.r_[np.zeros(127), 1e-45],
    "tiny": np.linspace(-1e-38, 1e-38, 128),
    "huge": np.linspace(-3.4e38, 3.4e38, 128),
    "infinite": np.r_[np.linspace(-500, 500, 127), np.inf],
    "nan": np.r_[np.linspace(-5, 5, 127), np.nan],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_without_a_usable_amax_have_finite_scales(
    kernels: build.Kernels, name: str, form: Format, power_of_two: bool
) -> None:
    x = build.placed(np.float32(SPECIAL[name])[None, :])
    for scaling in ("rows", "square"):
        got = Result(kernels, x, scaling, form, power_of_two=power_of_two)
        check(got, x, scaling, form, power_of_two=power_of_two)
        assert got.scale_inv is not None and got.codes is not None
        assert np.all(np.isfinite(got.scale_inv)) and np.all(got.scale_inv > 0)
        values = oracle.decode(got.codes, form)
        assert np.array_equal(np.isnan(values), np.isnan(x))


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_mx_scales_are_exact_at_both_ends(kernels: build.Kernels, form: Format) -> None:
    x = build.placed(np.float32(np.concatenate([*SPECIAL.values()]))[None, :])
    got = Result(kernels, x, "mx", form)
    check(got, x, "mx", form)
    assert got.scale_inv is not None and got.codes is not None
    amax = oracle.amax_of(x.reshape(-1, 32), (1,)).astype(np.float64)
    finite = np.isfinite(amax)
    power = got.scale_inv[0].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert np.all(amax[finite] <= form.largest * power[finite])
    tight = amax[finite] > form.largest * power[finite] / 2
    assert np.all(tight | (got.scale_inv[0][finite] == 0))
    assert np.all(got.scale_inv[0][np.isnan(amax)] == 0xFF)
    assert np.all(got.scale_inv[0][np.isinf(amax)] == 0xFE)
    values = oracle.decode(got.codes.reshape(-1, 32), form)
    assert not np.any(np.isnan(values[~np.isnan(amax)]))
    assert np.all(np.isnan(values[np.isnan(amax)]))


def test_epsilon_bounds_the_scale(kernels: build.Kernels) -> None:
    x = build.placed(np.float32(np.linspace(-1e-6, 1e-6, 128))[None, :])
    got = Result(kernels, x, "rows", E4M3, epsilon=1e-4)
    check(got, x, "rows", E4M3, epsilon=1e-4)
    assert got.scale_inv is not None
    assert got.scale_inv[0, 0] == 1 / (np.float32(448) / np.float32(1e-4))


# ---- stochastic rounding ---------------------------------------------------------------------
def test_random_words_are_those_of_the_published_generator() -> None:
    ones = 0xFFFFFFFF
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]
    for counter, key, words in known:
        assert tuple(oracle.philox(np.array(counter, np.uint64), key)) == words


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("start, more_stride", [(0, 0), (2**35 + 4, 4), (1, 0), (2, 3), (3, 5)])
def test_stochastic_codes_equal_the_oracle(
    kernels: build.Kernels, scaling: str, form: Format, start: int, more_stride: int
) -> None:
    seed, c2, c3, rows, cols = 2**40 + 17, 5, 0xDEADBEEF, 40, 52
    x = inputs(np.random.default_rng(4), rows, cols, np.float32)
    x[0, :8] = np.float32([0, -0.0, np.nan, 1e-30, 3e-6, -1e-3, 1e30, -np.inf])
    stride = cols + more_stride
    elements = start + np.arange(rows)[:, None] * stride + np.arange(cols)
    words = oracle.words_of(elements, c2, c3, seed)
    got = Result(kernels, x, scaling, form, stochastic=(seed, c2, c3, start, stride))
    check(got, x, scaling, form, words=words)


def test_words_are_those_of_the_python_generator() -> None:
    # From megatron_lite.ops.random.flat_words, key 2^40 + 17, c2 5, c3 77: elements 1-4 and 21-24
    # of rows of 10, and four from 2^35 + 3 on.
    known = {
        1: (0x8370A80B, 0x8FB857D6, 0xF36673AB, 0xF6996C33),
        21: (0x3FCA6441, 0x21721941, 0xC0C17DE9, 0x9D300AC1),
        2**35 + 3: (0x5CBAC463, 0xA8779BE0, 0x71EC357F, 0xAFEE7ABD),
    }
    for first, words in known.items():
        got = oracle.words_of(first + np.arange(4), 5, 77, 2**40 + 17)
        assert tuple(map(int, got)) == words


def test_stochastic_rounding_is_right_on_average(kernels: build.Kernels) -> None:
    # 1.3 lies 0.4 of the way from 1.25 to 1.375; a subnormal 0.3 of the way from 0 to 2^-9.
    x = build.placed(np.full((128, 128), 1.3, np.float32))
    x[64:] = 0.3 * 2.0**-9
    got = Result(kernels, x, "tensor", E4M3, stochastic=(9, 0, 0, 0, 128))
    assert got.codes is not None
    values = oracle.decode(got.codes, E4M3)
    deviation = 5 * np.sqrt(0.25 / (64 * 128))
    assert abs(np.mean(values[:64] == 1.375) - 0.4) < deviation
    assert abs(np.mean(values[64:] == 2.0**-9) - 0.3) < deviation


# ---- sizes, counts, compilers ----------------------------------------------------------------
@pytest.mark.parametrize("scaling", SCALINGS)
def test_bytes_are_the_least_and_banks_do_not_collide(kernels: build.Kernels, scaling: str) -> None:
    rows, cols = 256, 384
    x = inputs(np.random.default_rng(8), rows, cols, BFLOAT16)
    got = Result(kernels, x, scaling, E4M3, count=True)
    n = rows * cols
    scales = {"tensor": 6 * 1028, "rows": 2 * n // 32, "square": n // 4096, "mx": 2 * n // 32}
    least_loads = 2 * n + (4 * 256 * 6 if scaling == "tensor" else 0)
    least_stores = 2 * n + (scales[scaling] if scaling != "tensor" else 24)
    assert least_loads <= got.counts["global_load_bytes"] <= 1.05 * least_loads
    assert least_stores <= got.counts["global_store_bytes"] <= 1.05 * least_stores
    assert got.counts["shared_replays"] == 0
    assert got.counts["global_store_sectors"] <= 1.1 * least_stores / 32


def test_offsets_beyond_two_to_the_31(kernels: build.Kernels) -> None:
    rows, cols = 70_000, 40_000
    x = build.sparse((rows, cols), BFLOAT16)
    codes, codes_t = (build.sparse(shape, np.uint8) for shape in ((rows, cols), (cols, rows)))
    last = inputs(np.random.default_rng(9), rows % 128, cols % 128, BFLOAT16)
    x[-last.shape[0] :, -last.shape[1] :] = last
    scale_inv = build.sparse((ceil_div(rows, 128), ceil_div(cols, 128)), np.float32)
    tiles = scale_inv.size
    with kernels.options(blocks=f"{tiles - 1}:1"):
        kernels.call("launch_fp8_quantize", x, 1, rows, cols, cols, 2, 0, codes, codes_t, None,
                     scale_inv, None, None, 0.0, 0, 0, 0, 0, 0, 0, 0)  # fmt: skip
    want = oracle.quantize(last, "square", E4M3)
    np.testing.assert_array_equal(codes[-last.shape[0] :, -last.shape[1] :], want.codes)
    np.testing.assert_array_equal(codes_t[-last.shape[1] :, -last.shape[0] :], want.codes.T)
    assert scale_inv[-1, -1] == want.scale_inv[0, 0]


def test_wrong_arguments_are_refused(kernels: build.Kernels) -> None:
    x = build.placed(np.zeros((4, 4), np.float32))
    for dtype, stride, scaling in ((3, 4, 1), (0, 3, 1), (0, 4, 4)):
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call("launch_fp8_quantize", x, dtype, 4, 4, stride, scaling, 0, None, None,
                         None, None, None, None, 0.0, 0, 0, 0, 0, 0, 0, 0)  # fmt: skip


@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_sanitizers_find_nothing(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    code, output = build.run_python(mode, ["-m", "tests.kernels.fp8_program"])
    assert code == 0 and "done" in output, output[-4000:]
