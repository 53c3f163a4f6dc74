"""Rotary position embedding: tables in fp32 (fp64 under --fp64), applied per head.

Channels pair up half against half (Llama) or as neighbours (`interleaved`, GPT-J); a share
of the channels may stay unrotated. The backward pass is the rotation by the opposite angle,
so nothing but the tables is kept. Source: Su et al., RoFormer (2021); Llama-3 frequency
scaling as published with Llama 3.1 (low factor 1, high factor 4, original context 8192).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.plan import RotaryShape

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
    return frequencies


def rotary_table(
    rotary: RotaryShape, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [s, dim/2] of `dtype`."""
    scaled = positions.to(dtype) / rotary.interpolation_factor
    angles = torch.outer(scaled, inverse_frequencies(rotary, dtype).to(positions.device))
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cosine.size(-1) channels of [s, b, n, d]."""
    half = cosine.size(-1)
    turned, rest = x[..., : 2 * half].to(cosine.dtype), x[..., 2 * half :]
    cosine, sine = cosine[:, None, None, :], sine[:, None, None, :]
    out = torch.empty_like(x)
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


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return _rotate(x, cosine, sine, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotate(grads[0], cosine, -sine, ctx.interleaved), None, None, None


def apply_rotary(x_sbnd: Tensor, table: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate queries or keys.

    Args:
        x_sbnd: [s, b, n, d], the heads of this rank.
        table: cosine and sine of the s positions.
        interleaved: neighbours pair up instead of halves.

    Returns:
        [s, b, n, d] in the dtype of x.
    """
    return _Rotary.apply(x_sbnd, table[0], table[1], interleaved)  # type: ignore[no-any-return]
