"""RMSNorm and LayerNorm over the last dim, statistics in fp32 (fp64 for fp64 inputs).

The weight (and bias) gradient goes to the microbatch's store, summed in the statistics'
dtype. Bound by memory: forward reads and writes t*h elements, backward reads 2 t*h and
writes t*h. Saves the input and one (RMS) or two (Layer) statistics per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: the dtype of statistics, softmax and losses."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _effective(weight: Tensor, one_plus: bool, dtype: torch.dtype) -> Tensor:
    weight = weight.to(dtype)
    return weight + 1 if one_plus else weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, eps: float, one_plus: bool, mb: MicrobatchContext
    ) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, inverse)
        ctx.weight, ctx.one_plus, ctx.mb = weight, one_plus, mb
        return (wide * inverse * _effective(weight, one_plus, wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        wide = x.to(inverse.dtype)
        grad = grads[0].to(inverse.dtype)
        normed = wide * inverse
        weighted = grad * _effective(ctx.weight, ctx.one_plus, inverse.dtype)
        grad_x = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * inverse
        weight_grad = (grad * normed).flatten(0, -2).sum(0)
        ctx.mb.wgrads.put(ctx.weight, lambda main: main.add_(weight_grad))
        return grad_x.to(x.dtype), None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter,
        eps: float,
        one_plus: bool,
        mb: MicrobatchContext,
    ) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        scale = _effective(weight, one_plus, wide.dtype)
        out, mean, inverse = torch.native_layer_norm(
            wide, list(weight.shape), scale, bias.to(wide.dtype), eps
        )
        ctx.save_for_backward(x, mean, inverse)
        ctx.weight, ctx.bias, ctx.one_plus, ctx.mb = weight, bias, one_plus, mb
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse = ctx.saved_tensors
        scale = _effective(ctx.weight, ctx.one_plus, inverse.dtype)
        grad_x, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            grads[0].to(inverse.dtype).contiguous(),
            x.to(inverse.dtype),
            list(ctx.weight.shape),
            mean,
            inverse,
            scale,
            torch.zeros_like(scale),
            [True, True, True],
        )
        ctx.mb.wgrads.put(ctx.weight, lambda main: main.add_(weight_grad))
        ctx.mb.wgrads.put(ctx.bias, lambda main: main.add_(bias_grad))
        return grad_x.to(x.dtype), None, None, None, None, None


def rms_norm(
    x: Tensor, weight: nn.Parameter, eps: float, one_plus: bool, mb: MicrobatchContext
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; [..., h] -> [..., h].

    Args:
        x: any layout that holds whole rows.
        weight: [h]; with `one_plus` the stored value is weight - 1.
        eps: added to the mean square.
        one_plus: see weight.
        mb: receives the weight gradient.
    """
    return _RMSNorm.apply(x, weight, eps, one_plus, mb)  # type: ignore[no-any-return]


def layer_norm(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter,
    eps: float,
    one_plus: bool,
    mb: MicrobatchContext,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim; arguments as rms_norm."""
    return _LayerNorm.apply(x, weight, bias, eps, one_plus, mb)  # type: ignore[no-any-return]
