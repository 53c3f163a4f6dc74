"""Rotary position embedding: tables in fp32 (fp64 under --fp64), applied per head.

Channels pair up half against half (Llama) or as neighbours (`interleaved`, GPT-J); a share
of the channels may stay unrotated. The backward pass is the rotation by the opposite angle,
so nothing but the tables is kept. Source: Su et al., RoFormer (2021); Llama-3 frequency
scaling as published with Llama 3.1 (low factor 1, high factor 4, original context 8192); YaRN
(Peng et al. 2023), which also makes cosine and sine larger.
The native operation reads heads where they lie in the fused projection's output, at any
strides, and writes them densely: traffic 2 s*b*n*d elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.plan import RotaryShape
from megatron_lite.ops.registration import define_operation

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def inverse_frequencies(rotary: RotaryShape, dtype: torch.dtype) -> Tensor:
    """[dim/2] angular frequencies per position, with the scaling in force."""
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.int64).to(dtype) / rotary.dim
    frequencies = 1.0 / (float(rotary.base) ** exponents)
    if rotary.llama3_factor is not None:
        wavelength = 2 * math.pi / frequencies
        smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        slowed = frequencies / rotary.llama3_factor
        blended = (1 - smooth) * slowed + smooth * frequencies
        frequencies = torch.where(
            wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW,
            slowed,
            torch.where(wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH, frequencies, blended),
        )
    if rotary.yarn is not None:
        low, high = rotary.yarn.slowed_range(rotary.dim, rotary.base)
        pairs = torch.arange(rotary.dim // 2, dtype=torch.int64).to(dtype)
        slowed = ((pairs - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies / rotary.yarn.factor * slowed + frequencies * (1 - slowed)
    return frequencies


def rotary_table(
    rotary: RotaryShape, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [s, dim/2] of `dtype`."""
    scaled = positions.to(dtype) / rotary.interpolation_factor
    angles = torch.outer(scaled, inverse_frequencies(rotary, dtype).to(positions.device))
    magnitude = 1.0 if rotary.yarn is None else rotary.yarn.magnitude
    return angles.cos() * magnitude, angles.sin() * magnitude


def _reference(
    x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, backward: bool
) -> Tensor:
    """Rotate the first 2 * cosine.size(-1) channels of [s, b, n, d]."""
    half = cosine.size(-1)
    turned, rest = x[..., : 2 * half].to(cosine.dtype), x[..., 2 * half :]
    cosine, sine = cosine[:, None, None, :], sine[:, None, None, :]
    if backward:
        sine = -sine
    out = x.new_empty(x.shape)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        out[..., 0 : 2 * half : 2] = first * cosine - second * sine
        out[..., 1 : 2 * half : 2] = second * cosine + first * sine
    else:
        first, second = turned[..., :half], turned[..., half:]
        out[..., :half] = first * cosine - second * sine
        out[..., half : 2 * half] = second * cosine + first * sine
    if rest.size(-1):
        out[..., 2 * half :] = rest
    return out


def _pair_reference(
    q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    return tuple(_reference(x, cosine, sine, interleaved, backward) for x in (q, k))  # type: ignore[return-value]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, cosine, sine, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(cosine, sine)


def _backward_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cosine, sine = ctx.saved_tensors
    return rotary(grad, cosine, sine, ctx.interleaved, not ctx.backward), *[None] * 4


def _pair_backward_rule(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    cosine, sine = ctx.saved_tensors
    out = rotary_pair(*grads, cosine, sine, ctx.interleaved, not ctx.backward)
    return *out, *[None] * 4


rotary = define_operation(
    "rotary(Tensor x, Tensor cosine, Tensor sine, bool interleaved, bool backward) -> Tensor",
    _reference,
    backward=_backward_rule,
    setup_context=_keep_for_backward,
)
rotary_pair = define_operation(
    "rotary_pair(Tensor q, Tensor k, Tensor cosine, Tensor sine, bool interleaved,"
    " bool backward) -> (Tensor, Tensor)",
    _pair_reference,
    backward=_pair_backward_rule,
    setup_context=_keep_for_backward,
)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, native: bool
    ) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved, ctx.run = interleaved, rotary if native else _reference
        return ctx.run(x, cosine, sine, interleaved, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.run(grads[0], *ctx.saved_tensors, ctx.interleaved, True), *[None] * 4


class _RotaryPair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return rotary_pair(q, k, cosine, sine, interleaved, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *rotary_pair(*grads, *ctx.saved_tensors, ctx.interleaved, True), *[None] * 3


def apply_rotary(
    x_sbnd: Tensor, table: tuple[Tensor, Tensor], interleaved: bool, native: bool = False
) -> Tensor:
    """Rotate queries or keys.

    Args:
        x_sbnd: [s, b, n, d], the heads of this rank.
        table: cosine and sine of the s positions.
        interleaved: neighbours pair up instead of halves.
        native: use the native operation.

    Returns:
        [s, b, n, d] in the dtype of x.
    """
    return _Rotary.apply(x_sbnd, *table, interleaved, native)  # type: ignore[no-any-return]


def apply_rotary_pair(
    q_sbnd: Tensor,
    k_sbgd: Tensor,
    table: tuple[Tensor, Tensor],
    interleaved: bool,
    native: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; arguments as apply_rotary. One native call serves both."""
    if native:
        return _RotaryPair.apply(q_sbnd, k_sbgd, *table, interleaved)  # type: ignore[no-any-return]
    return apply_rotary(q_sbnd, table, interleaved), apply_rotary(k_sbgd, table, interleaved)
