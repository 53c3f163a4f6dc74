"""FP8: quantization with given, 1x128, 128x128 and MX (1x32) scales, amax, delayed scaling.

`quantize` multiplies by a factor, saturates and rounds to nearest even, or up where a word of
the stateless generator is below 2^32 times the discarded fraction; NaN stays NaN, in every
block. Scales are stored inverted: value = code * scale_inv. Factors are always finite and not
zero: blocks of zeros, subnormals or infinities do no harm. The transposed output with its
scales equals the rowwise output of the transposed matrix.
Bits are defined (OCP 8-bit floating point 1.0, OCP microscaling 1.0) and the same in plain
torch, on the CPU and on CUDA. Bound by memory: reads x once, writes a byte per output.

| scaling | scale_inv of codes [rows, cols] | dtype |
|---|---|---|
| TENSOR | [1], made by `fp8_scales` or `fp8_delayed_update` | fp32 |
| ROWS | [ceil(cols / 128), rows] | fp32 |
| SQUARE | [ceil(rows / 128), ceil(cols / 128)], of x also for the transposed codes | fp32 |
| MX | [rows, ceil(cols / 32)] | float8_e8m0fnu |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.ops.random import flat_words
from megatron_lite.ops.registration import define_operation

_LARGEST_FLOAT = torch.finfo(torch.float32).max
_INFINITY_BITS = 0x7F800000


class Scaling(enum.IntEnum):
    """Which elements share a scale."""

    TENSOR = 0
    ROWS = 1
    SQUARE = 2
    MX = 3


_BLOCKS = {Scaling.ROWS: (1, 128), Scaling.SQUARE: (128, 128), Scaling.MX: (1, 32)}


@dataclass(frozen=True)
class Stochastic:
    """Key of stochastic rounding: element (i, j) has the logical position start + i*stride + j."""

    seed: int
    c2: int
    c3: int
    start: int
    row_stride: int


@dataclass(frozen=True)
class Quantized:
    """Codes and what they are multiplied with; None where it was not asked for."""

    codes: Tensor | None
    codes_t: Tensor | None
    scale_inv: Tensor | None
    scale_inv_t: Tensor | None
    amax: Tensor | None


def _largest(e5m2: bool) -> float:
    return 57344.0 if e5m2 else 448.0


def _code_dtype(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


# ---- scales ----------------------------------------------------------------------------
def _amax_reference(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    amax = x.float().abs().amax().view(1)
    return torch.where(amax.isnan(), torch.nan, amax)


def _scale_of(amax: Tensor, e5m2: bool, epsilon: float, power_of_two: bool) -> Tensor:
    """The factor of x: largest / amax, finite and above 0; 1 for amax 0, inf and NaN."""
    floored = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    usable = floored.isfinite() & (floored > 0)
    # A number divided by a tensor would be multiplied by its rounded reciprocal.
    largest = torch.full_like(floored, _largest(e5m2))
    scale = (largest / torch.where(usable, floored, 1.0)).clamp(max=_LARGEST_FLOAT)
    if power_of_two:
        scale = (scale.view(torch.int32) & _INFINITY_BITS).view(torch.float32)
    return torch.where(usable, scale, 1.0)


def _scales_reference(
    amax: Tensor, e5m2: bool, epsilon: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    scale = _scale_of(amax, e5m2, epsilon, power_of_two)
    return scale, scale.reciprocal()


def _delayed_reference(
    history: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    e5m2: bool,
    most_recent: bool,
    margin: int,
    epsilon: float,
    power_of_two: bool,
) -> None:
    seen = history[:1] if most_recent else history
    most = torch.where(seen.isfinite(), seen.abs(), 0.0).amax(0)
    factor = 2.0**-margin
    fresh = (_scale_of(most, e5m2, epsilon, power_of_two) * factor).clamp(
        torch.finfo(torch.float32).tiny, _LARGEST_FLOAT
    )
    scale.copy_(torch.where(most > 0, fresh, scale))
    scale_inv.copy_(scale.reciprocal())
    history.copy_(history.roll(-1, 0))
    history[0] = 0.0


def _exponent_of(amax: Tensor, e5m2: bool) -> Tensor:
    """E8M0 byte: the least power of two s with amax <= largest * s."""
    mantissa, exponent = torch.frexp(torch.where(amax.isfinite(), amax, 1.0).double())
    top_mantissa, top_exponent = (0.875, 16) if e5m2 else (0.875, 9)
    power = exponent - top_exponent + (mantissa > top_mantissa).int()
    byte = torch.where(amax == 0, 0, (power + 127).clamp(0, 254))
    byte = torch.where(amax.isinf(), 0xFE, byte)
    return torch.where(amax.isnan(), 0xFF, byte).to(torch.uint8)


def _power_of(byte: Tensor) -> Tensor:
    """2^(b - 127) in fp64, NaN for 0xFF."""
    power = torch.ldexp(torch.ones_like(byte, dtype=torch.float64), byte.int() - 127)
    return torch.where(byte == 0xFF, torch.nan, power)


def _spread(values: Tensor, block: tuple[int, int], rows: int, cols: int) -> Tensor:
    wide = values.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[:rows, :cols]


# ---- codes -----------------------------------------------------------------------------
def _encode(y: Tensor, e5m2: bool, words: Tensor | None) -> Tensor:
    clipped = torch.where(y.isnan(), torch.nan, y.clamp(-_largest(e5m2), _largest(e5m2)))
    if words is None:
        return clipped.to(_code_dtype(e5m2))
    mantissa_bits, least_exponent = (2, -14) if e5m2 else (3, -6)
    magnitude = clipped.abs().double()
    exponent = torch.frexp(magnitude)[1].clamp(min=least_exponent + 1) - 1 - mantissa_bits
    unit = torch.ldexp(torch.ones_like(magnitude), exponent)
    below = (magnitude / unit).floor()
    threshold = ((magnitude / unit - below) * 2.0**32).floor()
    rounded = torch.copysign((below + (words < threshold)) * unit, clipped)
    return torch.where(y.isnan(), torch.nan, rounded).float().to(_code_dtype(e5m2))


def _blockwise(
    x: Tensor, scaling: Scaling, e5m2: bool, epsilon: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Factor of each element and the inverse scales as stored."""
    rows, cols = x.shape
    height, width = _BLOCKS[scaling]
    padded = functional.pad(x.float().abs(), (0, -cols % width, 0, -rows % height))
    down, across = padded.shape[0] // height, padded.shape[1] // width
    if padded.numel() == 0:
        amax = padded.new_zeros(down, across)
    else:
        amax = padded.view(down, height, across, width).amax((1, 3))
    if scaling == Scaling.MX:
        byte = _exponent_of(amax, e5m2)
        factor = (1.0 / _power_of(byte)).float()
        return _spread(factor, (1, 32), rows, cols), byte.view(torch.float8_e8m0fnu)
    scale = _scale_of(amax, e5m2, epsilon, power_of_two)
    stored = (
        (scale.reciprocal()).t().contiguous() if scaling == Scaling.ROWS else scale.reciprocal()
    )
    return _spread(scale, (height, width), rows, cols), stored


def _quantize_reference(
    x: Tensor,
    scale: Tensor | None,
    scaling: int,
    e5m2: bool,
    rowwise: bool,
    transposed: bool,
    with_amax: bool,
    epsilon: float,
    power_of_two: bool,
    stochastic: bool,
    seed: int,
    c2: int,
    c3: int,
    start: int,
    row_stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kind, rows, cols = Scaling(scaling), x.shape[0], x.shape[1]
    words = None
    if stochastic:
        positions = torch.arange(rows, device=x.device) * row_stride + start
        words = flat_words(positions, 1, 0, cols, c2, c3, seed & (2**64 - 1))
    no_codes = x.new_empty(0, dtype=_code_dtype(e5m2))
    no_scales = x.new_empty(0, dtype=torch.float8_e8m0fnu if kind == Scaling.MX else torch.float32)
    no_amax = x.new_empty(0, dtype=torch.float32)
    if kind == Scaling.TENSOR:
        assert scale is not None
        codes = _encode(x.float() * scale, e5m2, words)
        amax = _amax_reference(x) if with_amax else no_amax
        turned = _turned(codes) if transposed else no_codes
        return codes if rowwise else no_codes, turned, no_scales, no_scales.clone(), amax

    def side(values: Tensor, side_words: Tensor | None) -> tuple[Tensor, Tensor]:
        factor, stored = _blockwise(values, kind, e5m2, epsilon, power_of_two)
        return _encode(values.float() * factor, e5m2, side_words), stored

    codes, scale_inv = no_codes, no_scales
    codes_t, scale_inv_t = no_codes.clone(), no_scales.clone()
    if rowwise or kind == Scaling.SQUARE:
        codes, scale_inv = side(x, words)
    if transposed and kind == Scaling.SQUARE:
        codes_t = _turned(codes)
    elif transposed:
        codes_t, scale_inv_t = side(x.t(), None if words is None else words.t())
    return codes if rowwise else no_codes, codes_t, scale_inv, scale_inv_t, no_amax


def _turned(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def _dequantize_reference(
    codes: Tensor, scale_inv: Tensor, scaling: int, dtype: torch.dtype
) -> Tensor:
    kind, rows, cols = Scaling(scaling), codes.shape[0], codes.shape[1]
    if kind == Scaling.TENSOR:
        scale = scale_inv.reshape(1)
    elif kind == Scaling.MX:
        power = _power_of(scale_inv.view(torch.uint8)).float()
        scale = _spread(power, _BLOCKS[kind], rows, cols)
    else:
        blocks = scale_inv.t() if kind == Scaling.ROWS else scale_inv
        scale = _spread(blocks, _BLOCKS[kind], rows, cols)
    values = codes.float() * scale
    return values.to(dtype).masked_fill(values.isnan(), torch.nan)


# ---- shapes ----------------------------------------------------------------------------
def _scale_like(x: Tensor, kind: Scaling, rows: int, cols: int) -> Tensor:
    if kind == Scaling.MX:
        return x.new_empty(rows, -(-cols // 32), dtype=torch.float8_e8m0fnu)
    if kind == Scaling.ROWS:
        return x.new_empty(-(-cols // 128), rows, dtype=torch.float32)
    return x.new_empty(-(-rows // 128), -(-cols // 128), dtype=torch.float32)


def _quantize_fake(
    x: Tensor,
    scale: Tensor | None,
    scaling: int,
    e5m2: bool,
    rowwise: bool,
    transposed: bool,
    with_amax: bool,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kind, rows, cols = Scaling(scaling), x.shape[0], x.shape[1]
    square, given = kind == Scaling.SQUARE, kind == Scaling.TENSOR
    scale_dtype = torch.float8_e8m0fnu if kind == Scaling.MX else torch.float32
    codes = x.new_empty((rows, cols) if rowwise else (0,), dtype=_code_dtype(e5m2))
    codes_t = x.new_empty((cols, rows) if transposed else (0,), dtype=_code_dtype(e5m2))
    scales, scales_t = (x.new_empty(0, dtype=scale_dtype) for _ in range(2))
    if not given and (rowwise or square):
        scales = _scale_like(x, kind, rows, cols)
    if not given and not square and transposed:
        scales_t = _scale_like(x, kind, cols, rows)
    return codes, codes_t, scales, scales_t, x.new_empty(int(with_amax), dtype=torch.float32)


def _dequantize_fake(codes: Tensor, scale_inv: Tensor, scaling: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


fp8_amax = define_operation(
    "fp8_amax(Tensor x) -> Tensor",
    _amax_reference,
    fake=lambda x: x.new_empty(1, dtype=torch.float32),
)
fp8_scales = define_operation(
    "fp8_scales(Tensor amax, bool e5m2, float epsilon, bool power_of_two) -> (Tensor, Tensor)",
    _scales_reference,
)
fp8_delayed_update = define_operation(
    "fp8_delayed_update(Tensor(a!) history, Tensor(b!) scale, Tensor(c!) scale_inv, bool e5m2,"
    " bool most_recent, int margin, float epsilon, bool power_of_two) -> ()",
    _delayed_reference,
    fake=lambda *_: None,
)
fp8_quantize = define_operation(
    "fp8_quantize(Tensor x, Tensor? scale, int scaling, bool e5m2, bool rowwise, bool transposed,"
    " bool with_amax, float epsilon, bool power_of_two, bool stochastic, int seed, int c2, int c3,"
    " int start, int row_stride) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_reference,
    fake=_quantize_fake,
)
fp8_dequantize = define_operation(
    "fp8_dequantize(Tensor codes, Tensor scale_inv, int scaling, ScalarType dtype) -> Tensor",
    _dequantize_reference,
    fake=_dequantize_fake,
)


def quantize(
    x: Tensor,
    scaling: Scaling,
    *,
    e5m2: bool = False,
    scale: Tensor | None = None,
    rowwise: bool = True,
    transposed: bool = False,
    with_amax: bool = False,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    stochastic: Stochastic | None = None,
    native: bool = True,
) -> Quantized:
    """Codes of a matrix and their inverse scales.

    Args:
        x: [rows, cols] fp32, bf16 or fp16; rows at any stride.
        scaling: which elements share a scale.
        e5m2: E5M2 (gradients) instead of E4M3.
        scale: [1] fp32, the factor of TENSOR scaling.
        rowwise: wants codes [rows, cols].
        transposed: wants codes_t [cols, rows].
        with_amax: wants the amax of x, [1] fp32 (TENSOR: for the next step's scale).
        epsilon: amax of a block below it counts as it.
        power_of_two: scales of ROWS and SQUARE are rounded down to powers of two.
        stochastic: key of stochastic rounding; None: to nearest even.
        native: by the operation, not its reference.
    """
    key = stochastic or Stochastic(0, 0, 0, 0, 0)
    seed = key.seed - 2**64 if key.seed >= 2**63 else key.seed
    run = fp8_quantize if native else _quantize_reference
    codes, codes_t, scale_inv, scale_inv_t, amax = run(
        x,
        scale,
        int(scaling),
        e5m2,
        rowwise,
        transposed,
        with_amax,
        epsilon,
        power_of_two,
        stochastic is not None,
        seed,
        key.c2,
        key.c3,
        key.start,
        key.row_stride,
    )
    given, square = scaling == Scaling.TENSOR, scaling == Scaling.SQUARE
    return Quantized(
        codes if rowwise else None,
        codes_t if transposed else None,
        scale_inv if not given and (rowwise or square) else None,
        scale_inv_t if not given and not square and transposed else None,
        amax if with_amax else None,
    )


def dequantize(
    codes: Tensor,
    scale_inv: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    native: bool = True,
) -> Tensor:
    """Values [rows, cols] of codes: code * scale_inv in fp32, rounded once more to `dtype`.

    Args:
        codes: [rows, cols] float8; transposed codes with transposed (SQUARE) scales as well.
        scale_inv: as `quantize` stored it; [1] with TENSOR scaling.
        scaling: of the codes.
        dtype: fp32, bf16 or fp16.
        native: by the operation, not its reference.
    """
    run = fp8_dequantize if native else _dequantize_reference
    return run(codes, scale_inv, int(scaling), dtype)  # type: ignore[no-any-return]
