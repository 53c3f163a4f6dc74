"""RMSNorm and LayerNorm over the last dim, statistics in fp32 (fp64 for fp64 inputs).

The weight (and bias) gradient goes to the microbatch's store, summed in the statistics'
dtype. Bound by memory: forward reads and writes t*h elements, backward reads 2 t*h and
writes t*h. Saves the input and one (RMS) or two (Layer) statistics per row.

`norm_forward(x, residual, weight, bias, eps, one_plus) -> (out, sum, mean, inverse)` adds a
residual first where there is one; `sum` is x + residual rounded to x's dtype (else empty),
`mean` is empty without bias (RMSNorm). `norm_backward` returns the gradient of x and those of
weight and bias in the statistics' dtype; `grad_sum` is a gradient that reaches `sum` beside
the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.registration import define_operation


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: the dtype of statistics, softmax and losses."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _effective(weight: Tensor, one_plus: bool, dtype: torch.dtype) -> Tensor:
    weight = weight.to(dtype)
    return weight + 1 if one_plus else weight


def _forward_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = x.new_empty(0) if residual is None else x + residual
    wide = (x if residual is None else summed).to(accumulation_dtype(x.dtype))
    scale = _effective(weight, one_plus, wide.dtype)
    if bias is not None:
        out, mean, inverse = torch.native_layer_norm(
            wide, list(weight.shape), scale, bias.to(wide.dtype), eps
        )
        return out.to(x.dtype), summed, mean.squeeze(-1), inverse.squeeze(-1)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = (wide * inverse * scale).to(x.dtype)
    return out, summed, wide.new_empty(0), inverse.squeeze(-1)


def _summed(rows: Tensor, dims: list[int]) -> Tensor:
    return rows.sum(dims) if dims else rows.clone()  # no dims would mean all


def _backward_reference(
    grad: Tensor,
    x: Tensor,
    grad_sum: Tensor | None,
    weight: Tensor,
    mean: Tensor | None,
    inverse: Tensor,
    one_plus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, inverse = x.to(inverse.dtype), inverse.unsqueeze(-1)
    grad = grad.to(inverse.dtype)
    normed = (wide if mean is None else wide - mean.unsqueeze(-1)) * inverse
    weighted = grad * _effective(weight, one_plus, inverse.dtype)
    level = 0.0 if mean is None else weighted.mean(-1, keepdim=True)
    grad_x = (weighted - level - normed * (weighted * normed).mean(-1, keepdim=True)) * inverse
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    rows = list(range(x.dim() - 1))
    weight_grad = _summed(grad * normed, rows)
    bias_grad = inverse.new_empty(0) if mean is None else _summed(grad, rows)
    return grad_x.to(x.dtype), weight_grad, bias_grad


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, one_plus = inputs
    _, summed, mean, inverse = output
    ctx.mark_non_differentiable(mean, inverse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else summed, weight, mean, inverse)
    ctx.one_plus, ctx.residual, ctx.layer = one_plus, residual is not None, bias is not None


def _backward_rule(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, mean, inverse = ctx.saved_tensors
    grad = torch.zeros_like(x) if grads[0] is None else grads[0]
    grad_x, weight_grad, bias_grad = norm_backward(
        grad,
        x,
        grads[1] if ctx.residual else None,
        weight,
        mean if ctx.layer else None,
        inverse,
        ctx.one_plus,
    )
    return (
        grad_x,
        grad_x.clone() if ctx.residual else None,
        weight_grad.to(weight.dtype),
        bias_grad.to(weight.dtype) if ctx.layer else None,
        None,
        None,
    )


norm_backward = define_operation(
    "norm_backward(Tensor grad, Tensor x, Tensor? grad_sum, Tensor weight, Tensor? mean,"
    " Tensor inverse, bool one_plus) -> (Tensor, Tensor, Tensor)",
    _backward_reference,
)
norm_forward = define_operation(
    "norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps,"
    " bool one_plus) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_reference,
    backward=_backward_rule,
    setup_context=_keep_for_backward,
)


class _Norm(torch.autograd.Function):
    """Either norm; LayerNorm where there is a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        eps: float,
        one_plus: bool,
        mb: MicrobatchContext,
    ) -> Tensor:
        run = norm_forward if mb.native else _forward_reference
        out, _, mean, inverse = run(x, None, weight, bias, eps, one_plus)
        ctx.save_for_backward(x, mean, inverse)
        ctx.weight, ctx.bias, ctx.one_plus, ctx.mb = weight, bias, one_plus, mb
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse = ctx.saved_tensors
        run = norm_backward if ctx.mb.native else _backward_reference
        grad_x, weight_grad, bias_grad = run(
            grads[0],
            x,
            None,
            ctx.weight,
            None if ctx.bias is None else mean,
            inverse,
            ctx.one_plus,
        )
        ctx.mb.wgrads.put(ctx.weight, lambda main: main.add_(weight_grad))
        if ctx.bias is not None:
            ctx.mb.wgrads.put(ctx.bias, lambda main: main.add_(bias_grad))
        return grad_x, None, None, None, None, None


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
    return _Norm.apply(x, weight, None, eps, one_plus, mb)  # type: ignore[no-any-return]


def layer_norm(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter,
    eps: float,
    one_plus: bool,
    mb: MicrobatchContext,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim; arguments as rms_norm."""
    return _Norm.apply(x, weight, bias, eps, one_plus, mb)  # type: ignore[no-any-return]
