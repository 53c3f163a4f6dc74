"""What the fp8 kernels compute, in NumPy: codes by ml_dtypes, scales and random words by hand.

Everything is exact: float64 where a formula is meant, float32 where the kernel's own rounding
is part of the definition (scale, x * scale). Layouts are those of csrc/fp8/quantize.cu.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST_FLOAT = np.finfo(np.float32).max


@dataclass(frozen=True)
class Format:
    """One element type."""

    name: str
    dtype: Any
    largest: float
    mantissa_bits: int
    least_exponent: int  # of the normal values

    @property
    def code(self) -> int:
        """The launchers' argument `e5m2`."""
        return int(self.name == "e5m2")


E4M3 = Format("e4m3", ml_dtypes.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Format("e5m2", ml_dtypes.float8_e5m2, 57344.0, 2, -14)
FORMATS = (E4M3, E5M2)


# ---- codes ---------------------------------------------------------------------------------
def decode(codes: Array, form: Format) -> Array:
    """Values of codes, float64."""
    return codes.view(form.dtype).astype(np.float64)


def _codes_of(values: Array, form: Format) -> Array:
    codes = values.astype(form.dtype).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def encode(y: Array, form: Format, words: Array | None = None) -> Array:
    """Codes of float32 values; with words, up where the word is below 2^32 times the fraction."""
    clipped = np.clip(y.astype(np.float32), -form.largest, form.largest)
    if words is None:
        return _codes_of(clipped, form)
    magnitude = np.abs(clipped).astype(np.float64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, form.least_exponent)
    unit = np.ldexp(1.0, exponent - form.mantissa_bits)
    below = np.floor(magnitude / unit)
    threshold = np.floor((magnitude / unit - below) * 2.0**32)
    rounded = (below + (words < threshold)) * unit
    return _codes_of(np.copysign(rounded, clipped).astype(np.float32), form)


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Ten rounds of Philox4x32: uint64 [..., 4] words of counters to words."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for number in range(10):
        k0 = np.uint64((key[0] + number * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((key[1] + number * 0xBB67AE85) & 0xFFFFFFFF)
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
    return np.stack([c0, c1, c2, c3], axis=-1)


def words_of(elements: Array, c2: int, c3: int, seed: int) -> Array:
    """The word of each logical element."""
    block = (elements // 4).astype(np.uint64)
    low, high = block & np.uint64(0xFFFFFFFF), block >> np.uint64(32)
    fixed = (np.full_like(low, word) for word in (c2, c3))
    words = philox(np.stack([low, high, *fixed], axis=-1), (seed & 0xFFFFFFFF, seed >> 32))
    return np.take_along_axis(words, (elements % 4)[..., None].astype(np.int64), -1)[..., 0]


# ---- scales --------------------------------------------------------------------------------
def amax_of(x: Array, axes: tuple[int, ...]) -> Array:
    """Largest magnitude; NaN if one is NaN."""
    return np.max(np.abs(x.astype(np.float32)), axis=axes, initial=0.0)


def scale_of(amax: Array, form: Format, epsilon: float = 0.0, power_of_two: bool = False) -> Array:
    """The factor that x is multiplied with: float32, finite and above 0."""
    floored = np.where(amax < np.float32(epsilon), np.float32(epsilon), amax)
    usable = np.isfinite(floored) & (floored > 0)
    with np.errstate(over="ignore"):
        scale = np.float32(form.largest) / np.where(usable, floored, np.float32(1))
    scale = np.minimum(scale, LARGEST_FLOAT).astype(np.float32)
    if power_of_two:
        scale = (scale.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    return np.where(usable, scale, np.float32(1)).astype(np.float32)


def exponent_of(amax: Array, form: Format) -> Array:
    """E8M0 byte: the least power of two s with amax <= largest * s."""
    mantissa, exponent = np.frexp(np.where(np.isfinite(amax), amax, 1).astype(np.float64))
    top_mantissa, top_exponent = np.frexp(form.largest)
    power = np.clip(exponent - top_exponent + (mantissa > top_mantissa), -127, 127)
    power = np.where(amax == 0, -127, power)
    byte = np.where(np.isinf(amax), 0xFE, power + 127)
    return np.where(np.isnan(amax), 0xFF, byte).astype(np.uint8)


def _blocks(x: Array, height: int, width: int) -> Array:
    rows, cols = -(-x.shape[0] // height), -(-x.shape[1] // width)
    padded = np.zeros((rows * height, cols * width), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded.reshape(rows, height, cols, width)


def _spread(values: Array, height: int, width: int, shape: tuple[int, ...]) -> Array:
    return np.repeat(np.repeat(values, height, 0), width, 1)[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Quantized:
    """Codes [rows, cols], inverse scales as stored, and both multiplied out in float64."""

    codes: Array
    scale_inv: Array
    values: Array


def quantize(
    x: Array,
    scaling: str,
    form: Format,
    *,
    scale: float = 1.0,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    words: Array | None = None,
) -> Quantized:
    """Rowwise codes; the transposed output is this of x.T (with words.T)."""
    x = x.astype(np.float32)
    height, width = {"tensor": (1, 1), "rows": (1, 128), "square": (128, 128), "mx": (1, 32)}[
        scaling
    ]
    stored: Array
    if scaling == "tensor":
        factor = inverse = np.full_like(x, np.float32(scale))
        stored, inverse = np.empty(0), 1 / inverse.astype(np.float64)
    elif scaling == "mx":
        stored = exponent_of(amax_of(_blocks(x, height, width), (1, 3)), form)
        power = stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        inverse = _spread(power, height, width, x.shape)
        factor = (1 / inverse).astype(np.float32)
    else:
        amax = amax_of(_blocks(x, height, width), (1, 3))
        small = scale_of(amax, form, epsilon, power_of_two)
        factor = _spread(small, height, width, x.shape)
        stored = np.float32(1) / small
        inverse = _spread(stored, height, width, x.shape).astype(np.float64)
        stored = np.ascontiguousarray(stored.T) if scaling == "rows" else stored
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        codes = encode(x * factor, form, words)
        return Quantized(codes, stored, decode(codes, form) * inverse)


def dequantize(codes: Array, scale_inv: Array, scaling: str, form: Format, dtype: Any) -> Array:
    """Values as bits of `dtype`: rounded to float32, then once more; one canonical NaN."""
    height, width = {"tensor": (1, 1), "rows": (1, 128), "square": (128, 128), "mx": (1, 32)}[
        scaling
    ]
    if scaling == "tensor":
        scale = np.full(codes.shape, scale_inv.flat[0], np.float32)
    elif scaling == "mx":
        power = scale_inv.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        scale = _spread(power, height, width, codes.shape)
    else:
        blocks = scale_inv.T if scaling == "rows" else scale_inv
        scale = _spread(blocks, height, width, codes.shape)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        values = decode(codes, form).astype(np.float32) * scale
        rounded = values.astype(dtype)
    bits = rounded.view(np.uint32 if rounded.itemsize == 4 else np.uint16)
    quiet = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[np.dtype(dtype).name]
    return np.where(np.isnan(values), bits.dtype.type(quiet), bits)
