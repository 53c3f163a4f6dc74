"""FP8 operations give the oracle's bits: native at every level, and the reference.

The oracle (tests/kernels/fp8_oracle.py: NumPy and ml_dtypes) is the one that the simulated CUDA
kernels are held to. There are no tolerances: codes, scales, amax and values are equal bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops import fp8
from megatron_lite.ops.fp8 import Quantized, Scaling, Stochastic, dequantize, quantize
from tests.kernels import fp8_oracle as oracle
from tests.kernels.fp8_oracle import BFLOAT16, E4M3, E5M2, FORMATS, Array, Format

DTYPES = {torch.float32: np.dtype(np.float32), torch.bfloat16: BFLOAT16, torch.float16: np.float16}
SCALINGS = list(Scaling)
form_names = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
scaling_names = pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.name)


def as_tensor(x: Array) -> Tensor:
    """The same bits."""
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def bits(x: Tensor | None) -> Array:
    assert x is not None
    size = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.element_size()]
    result: Array = x.contiguous().view(size).numpy()
    return result


def equal(got: Tensor | None, want: Array) -> None:
    np.testing.assert_array_equal(bits(got), want.view(bits(got).dtype))


def check(got: Quantized, x: Array, scaling: Scaling, form: Format, **more: Any) -> None:
    """Both outputs equal the oracle's, byte by byte."""
    words = more.pop("words", None)
    sides = [(got.codes, got.scale_inv, x, words)]
    sides.append((got.codes_t, got.scale_inv_t, x.T, None if words is None else words.T))
    for codes, scale_inv, values, side_words in sides:
        want = oracle.quantize(values, scaling.name.lower(), form, words=side_words, **more)
        equal(codes, want.codes)
        if scale_inv is not None:
            equal(scale_inv, want.scale_inv)


def both(x: Tensor, scaling: Scaling, form: Format, **more: Any) -> list[Quantized]:
    """By the operation and by the reference."""
    if scaling == Scaling.TENSOR:
        more["scale"] = torch.tensor([more.get("scale", 1.0)])
    return [
        quantize(x, scaling, e5m2=form is E5M2, transposed=True, native=native, **more)
        for native in (True, False)
    ]


def drawn(rows: int, cols: int, dtype: Any, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    spread = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-8, 8, (rows, 1)))
    return spread.astype(dtype)


def any_floats(rows: int, cols: int, seed: int) -> Array:
    """Any bits of fp32, most of them of moderate size: NaN, infinities, subnormals among them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (rows, cols), dtype=np.uint32)
    moderate = words & np.uint32(0x9FFFFFFF) | np.uint32(0x20000000)
    return np.where(rng.random((rows, cols)) < 0.02, words, moderate).view(np.float32)


# ---- codes -----------------------------------------------------------------------------
@form_names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(level: str, dtype: torch.dtype, form: Format) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).reshape(256, 256)
    for got in both(as_tensor(x), Scaling.TENSOR, form):
        check(got, x, Scaling.TENSOR, form)


@form_names
def test_ties_and_their_neighbours_round_to_even(level: str, form: Format) -> None:
    values = np.sort(oracle.decode(np.arange(256, dtype=np.uint8), form))
    values = values[np.isfinite(values)].astype(np.float32)
    ties = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    beyond = (form.largest * np.array([1.03, 1.07, 2, -1.03, -3])).astype(np.float32)
    special = np.array([0, -0.0, 1e-45, -1e-45, 1e-38, np.inf, -np.inf, np.nan], np.float32)
    points = np.concatenate([values, ties, beyond, special])
    x = np.concatenate([points, np.nextafter(points, -np.inf), np.nextafter(points, np.inf)])
    x = x.astype(np.float32)[None, :]
    for got in both(as_tensor(x), Scaling.TENSOR, form):
        check(got, x, Scaling.TENSOR, form)


@scaling_names
@form_names
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales_equal_the_oracle(
    level: str, dtype: torch.dtype, form: Format, scaling: Scaling
) -> None:
    for rows, cols in ((1, 1), (1, 128), (3, 37), (128, 128), (130, 144), (33, 392)):
        x = drawn(rows, cols, DTYPES[dtype], rows)
        given = {"scale": 3.7} if scaling == Scaling.TENSOR else {"power_of_two": rows % 2 == 1}
        for got in both(as_tensor(x), scaling, form, **given):
            check(got, x, scaling, form, **given)


@scaling_names
@form_names
def test_any_bits_of_fp32(level: str, scaling: Scaling, form: Format) -> None:
    for seed, (rows, cols) in enumerate(((150, 131), (31, 300))):
        x = any_floats(rows, cols, seed)
        for got in both(as_tensor(x), scaling, form):
            check(got, x, scaling, form)


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
@form_names
def test_blocks_without_a_usable_amax(level: str, name: str, form: Format) -> None:
    x = SPECIAL[name].astype(np.float32)[None, :]
    for scaling in (Scaling.ROWS, Scaling.SQUARE, Scaling.MX):
        for got in both(as_tensor(x), scaling, form):
            check(got, x, scaling, form)
        if scaling != Scaling.MX:
            given = {"power_of_two": True, "epsilon": 1e-4}
            for got in both(as_tensor(x), scaling, form, **given):
                check(got, x, scaling, form, **given)
                assert got.scale_inv is not None and got.scale_inv.isfinite().all()


@scaling_names
@form_names
@pytest.mark.parametrize("start, more_stride", [(0, 0), (2**35 + 4, 4), (1, 0), (2, 3), (3, 5)])
def test_stochastic_codes_equal_the_oracle(
    level: str, scaling: Scaling, form: Format, start: int, more_stride: int
) -> None:
    seed, c2, c3, rows, cols = 2**64 - 17, 5, 0xDEADBEEF, 40, 140
    x = drawn(rows, cols, np.float32)
    x[0, :8] = [0, -0.0, np.nan, 1e-30, 3e-6, -1e-3, 1e30, -np.inf]
    stride = cols + more_stride
    elements = start + np.arange(rows)[:, None] * stride + np.arange(cols)
    words = oracle.words_of(elements, c2, c3, seed)
    key = Stochastic(seed, c2, c3, start, stride)
    for got in both(as_tensor(x), scaling, form, stochastic=key):
        check(got, x, scaling, form, words=words)


# ---- scales ----------------------------------------------------------------------------
AMAX = [0, 1e-45, 1e-40, 1e-38, 1e-30, 0.1, 1, 448, 449, 3.4e38, np.inf, np.nan]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [None, np.inf, -np.inf, np.nan])
def test_amax(level: str, dtype: torch.dtype, special: float | None) -> None:
    for shape in ((0, 3), (1, 1), (3, 37), (7, 520), (2, 70_001)):
        x = drawn(*shape, DTYPES[dtype])
        if x.size and special is not None:
            x.flat[x.size // 2] = special
        tensor = as_tensor(x)
        views = [(tensor, x), (tensor[:, 1:-1], x[:, 1:-1]), (tensor.t(), x)]
        for view, values in views:
            amax = float(oracle.amax_of(values, (0, 1)))
            want = np.array([np.nan if np.isnan(amax) else amax], np.float32)
            equal(fp8.fp8_amax(view), want)
            equal(fp8._amax_reference(view), want)


@form_names
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_from_amax(level: str, form: Format, power_of_two: bool) -> None:
    amax: Array = np.array(AMAX, np.float32)
    for epsilon in (0.0, 1e-3):
        want = oracle.scale_of(amax, form, epsilon, power_of_two)
        for run in (fp8.fp8_scales, fp8._scales_reference):
            scale, inverse = run(as_tensor(amax), form is E5M2, epsilon, power_of_two)
            equal(scale, want)
            equal(inverse, np.float32(1) / want)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("most_recent", [False, True])
def test_delayed_scaling_follows_the_history(level: str, length: int, most_recent: bool) -> None:
    rng = np.random.default_rng(length)
    before = np.abs(rng.standard_normal((length, 6))).astype(np.float32)
    before[0, :4] = [0, np.nan, np.inf, 1e-40]
    before[1:, 0] = 0  # nothing to go by: the old scale stays
    old = np.arange(1, 7, dtype=np.float32)
    want = old.copy()
    for i in range(6):
        seen = before[:1, i] if most_recent else before[:, i]
        seen = seen[np.isfinite(seen) & (seen > 0)]
        if seen.size:
            want[i] = oracle.scale_of(np.array(np.max(seen)), E4M3) * np.float32(0.5)
    rolled = np.roll(before, -1, axis=0)
    rolled[0] = 0
    for run in (fp8.fp8_delayed_update, fp8._delayed_reference):
        history, scale, inverse = as_tensor(before), as_tensor(old), torch.zeros(6)
        run(history, scale, inverse, False, most_recent, 1, 0.0, False)
        equal(scale, want)
        equal(inverse, np.float32(1) / want)
        equal(history, rolled)


def test_a_quantization_leaves_the_amax_for_the_next_step(native: Native) -> None:
    x = drawn(140, 300, BFLOAT16)
    for got in both(as_tensor(x), Scaling.TENSOR, E4M3, with_amax=True, scale=2.0):
        assert got.amax is not None
        assert got.amax.item() == oracle.amax_of(x, (0, 1))


# ---- values ----------------------------------------------------------------------------
@form_names
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_at_any_scale(level: str, form: Format, dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    tensor = as_tensor(codes).view(fp8._code_dtype(form is E5M2))
    for scale in (1.0, -0.3, 2.0**-140, 3e38, 0.0, np.inf, np.nan):
        scale_inv = np.array([scale], np.float32)
        want = oracle.dequantize(codes, scale_inv, "tensor", form, DTYPES[dtype])
        for native in (True, False):
            equal(dequantize(tensor, as_tensor(scale_inv), Scaling.TENSOR, dtype, native), want)


def test_every_exponent_byte(level: str) -> None:
    codes = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (256, 1))
    scale_inv = np.arange(256, dtype=np.uint8)[:, None]
    want = oracle.dequantize(codes, scale_inv, "mx", E4M3, np.float32)
    tensors = (
        as_tensor(codes).view(torch.float8_e4m3fn),
        as_tensor(scale_inv).view(torch.float8_e8m0fnu),
    )
    for native in (True, False):
        equal(dequantize(*tensors, Scaling.MX, torch.float32, native), want)


@scaling_names
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_both_outputs(level: str, scaling: Scaling, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 37), (130, 144), (33, 392)):
        got = both(as_tensor(drawn(*shape, np.float32)), scaling, E4M3)[0]
        scale_inv, scale_inv_t = got.scale_inv, got.scale_inv_t
        if scaling == Scaling.TENSOR:
            scale_inv = scale_inv_t = torch.tensor([0.25])
        elif scaling == Scaling.SQUARE:
            assert scale_inv is not None
            scale_inv_t = scale_inv.t()
        for codes, scales in ((got.codes, scale_inv), (got.codes_t, scale_inv_t)):
            assert codes is not None and scales is not None
            name, numbers = scaling.name.lower(), scales.contiguous()
            stored = bits(numbers) if scaling == Scaling.MX else numbers.numpy()
            want = oracle.dequantize(bits(codes), stored, name, E4M3, DTYPES[dtype])
            for native in (True, False):
                equal(dequantize(codes, scales, scaling, dtype, native), want)


# ---- layouts, threads, rules -----------------------------------------------------------
@scaling_names
def test_each_output_can_be_left_out(native: Native, scaling: Scaling) -> None:
    x = as_tensor(drawn(140, 160, BFLOAT16))
    scale = torch.ones(1) if scaling == Scaling.TENSOR else None
    whole = quantize(x, scaling, scale=scale, transposed=True)
    for rowwise, transposed in ((True, False), (False, True)):
        got = quantize(x, scaling, scale=scale, rowwise=rowwise, transposed=transposed)
        assert (got.codes is not None, got.codes_t is not None) == (rowwise, transposed)
        for name in ("codes", "codes_t", "scale_inv", "scale_inv_t"):
            if getattr(got, name) is not None:
                np.testing.assert_array_equal(bits(getattr(got, name)), bits(getattr(whole, name)))


def test_strided_empty_and_misaligned_matrices(native: Native) -> None:
    wide = drawn(41, 400, BFLOAT16)
    for cut in (
        np.s_[:, 3:180],
        np.s_[::2, 1:177],
        np.s_[5:6, :],
        np.s_[:0, :],
        np.s_[:, :0],
    ):
        x = np.ascontiguousarray(wide[cut])
        for scaling in SCALINGS:
            for got in both(as_tensor(wide)[cut], scaling, E4M3):
                check(got, x, scaling, E4M3)
    turned = as_tensor(wide).t()
    for got in both(turned, Scaling.ROWS, E4M3):
        check(got, wide.T, Scaling.ROWS, E4M3)


def test_results_do_not_depend_on_threads(native: Native) -> None:
    x = as_tensor(drawn(700, 400, np.float32))
    key = Stochastic(3, 1, 2, 0, 400)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            got = quantize(x, Scaling.MX, transposed=True, stochastic=key)
            parts = [
                bits(part) for part in (got.codes, got.codes_t, got.scale_inv, got.scale_inv_t)
            ]
            results.append([*parts, bits(fp8.fp8_amax(x))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_rules_for_tracing(native: Native) -> None:
    x, one = as_tensor(drawn(40, 130, BFLOAT16)), torch.ones(1)
    # torch's check of schemas computes with the outputs, which float8 cannot.
    tests = ("test_faketensor", "test_autograd_registration")

    def checked(op: Any, *arguments: Any) -> None:
        torch.library.opcheck(op, arguments, test_utils=tests)

    for scaling in SCALINGS:
        given = scaling == Scaling.TENSOR
        scale = one if given else None
        more = (0.0, False, True, 7, 1, 2, 3, 130)
        for rowwise, transposed in ((True, True), (False, True), (True, False)):
            flags = (int(scaling), False, rowwise, transposed, given)
            checked(fp8.fp8_quantize, x, scale, *flags, *more)
        codes = quantize(x, scaling, scale=scale)
        scale_inv = one if given else codes.scale_inv
        checked(fp8.fp8_dequantize, codes.codes, scale_inv, int(scaling), torch.bfloat16)
    torch.library.opcheck(fp8.fp8_amax, (x,))
    torch.library.opcheck(fp8.fp8_scales, (one, True, 0.0, False))
    delayed = (torch.rand(3, 4), torch.ones(4), torch.ones(4), False, False, 0, 0.0, False)
    torch.library.opcheck(fp8.fp8_delayed_update, delayed)


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x, one = torch.zeros(4, 4), torch.ones(1)
    with pytest.raises(RuntimeError, match="x: dtype must be float32, bfloat16 or float16"):
        quantize(x.double(), Scaling.ROWS)
    with pytest.raises(RuntimeError, match="x: must have 2 dims, not 1"):
        quantize(x[0], Scaling.ROWS)
    with pytest.raises(RuntimeError, match="scale: is given with tensor scaling, and only then"):
        quantize(x, Scaling.TENSOR)
    with pytest.raises(RuntimeError, match="scale: is given with tensor scaling, and only then"):
        quantize(x, Scaling.MX, scale=one)
    with pytest.raises(RuntimeError, match="with_amax: is for tensor scaling"):
        quantize(x, Scaling.MX, with_amax=True)
    with pytest.raises(RuntimeError, match="scale: must be one element"):
        quantize(x, Scaling.TENSOR, scale=torch.ones(2))
    with pytest.raises(RuntimeError, match="epsilon: must be finite"):
        quantize(x, Scaling.ROWS, epsilon=-1.0)
    with pytest.raises(RuntimeError, match="history: must be"):
        fp8.fp8_delayed_update(torch.zeros(0, 1), one, one.clone(), False, False, 0, 0.0, False)
    codes = quantize(x, Scaling.ROWS).codes
    assert codes is not None
    with pytest.raises(RuntimeError, match="codes: dtype must be float8_e4m3fn or float8_e5m2"):
        dequantize(x, one, Scaling.TENSOR, torch.float32)
    with pytest.raises(RuntimeError, match="scale_inv: wrong shape"):
        dequantize(codes, one, Scaling.ROWS, torch.float32)
    with pytest.raises(RuntimeError, match="scale_inv: dtype must be float8_e8m0fnu"):
        dequantize(codes, one, Scaling.MX, torch.float32)
    with pytest.raises(RuntimeError, match="dtype: must be float32, bfloat16 or float16"):
        dequantize(codes, one, Scaling.TENSOR, torch.float64)
