"""Dropout whose mask is a function of the logical position, and its fused tail of a block.

The decision of a hidden element is numbered position * h + channel inside its sample; the
sample and the purpose are in the counter. So the mask does not depend on the layout, the
micro-batch size or recomputation. The native operation makes it again in the backward pass
and keeps nothing; the reference keeps one byte per element. Bound by memory: forward moves 2
or 3 t*h elements, backward 2 t*h; without dropout the input's gradient is the output's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.random import decision_counter, flat_words, keep_mask
from megatron_lite.ops.registration import define_operation


def _mask(positions: Tensor, sample_ids: Tensor, h: int, p: float, c3: int, seed: int) -> Tensor:
    c2 = (sample_ids & 0xFFFFFFFF).unsqueeze(0)
    rows = positions.unsqueeze(1).expand(-1, sample_ids.numel())
    words = flat_words(rows, h, 0, h, c2.expand_as(rows), c3, seed % 2**64)
    return keep_mask(words, p)


def hidden_mask(
    positions: Tensor, h: int, probability: float, purpose: str, layer: int, mb: MicrobatchContext
) -> Tensor:
    """[s, b, h] bool: the kept elements of hidden states at `positions`."""
    counter = decision_counter(purpose, layer, mb.step)
    return _mask(positions, mb.sample_ids, h, probability, counter, mb.seed)


def _apply(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None, p: float
) -> Tensor:
    out = x if bias is None else x + bias
    if mask is not None:
        out = out * mask * (1.0 / (1.0 - p))
    if residual is not None:
        out = out + residual
    return out.clone() if out is x else out


def _forward_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    positions: Tensor,
    sample_ids: Tensor,
    p: float,
    c3: int,
    seed: int,
) -> Tensor:
    mask = _mask(positions, sample_ids, x.size(-1), p, c3, seed) if p > 0.0 else None
    return _apply(x, bias, residual, mask, p)


def _forward_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward_reference(
    grad: Tensor,
    positions: Tensor,
    sample_ids: Tensor,
    p: float,
    c3: int,
    seed: int,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(grad.dtype)
    grad_x = grad
    if p > 0.0:
        mask = _mask(positions, sample_ids, grad.size(-1), p, c3, seed)
        grad_x = grad * mask * (1.0 / (1.0 - p))
    sums = grad_x.flatten(0, -2).sum(0, dtype=wide) if biased else grad.new_empty(0, dtype=wide)
    return (grad_x if p > 0.0 else grad.new_empty(0)), sums


def _backward_fake(
    grad: Tensor,
    positions: Tensor,
    sample_ids: Tensor,
    p: float,
    c3: int,
    seed: int,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    sums = grad.new_empty(grad.size(-1) if biased else 0, dtype=accumulation_dtype(grad.dtype))
    return grad.new_empty(grad.shape if p > 0.0 else 0), sums


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, residual, positions, sample_ids, *ctx.key = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual = residual is not None
    ctx.save_for_backward(positions, sample_ids)


def _backward_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    biased = ctx.bias_dtype is not None
    grad_x, bias_grad = dropout_backward(grad, *ctx.saved_tensors, *ctx.key, biased)
    return (
        grad_x if ctx.key[0] > 0.0 else grad,
        bias_grad.to(ctx.bias_dtype) if biased else None,
        grad if ctx.residual else None,
        *[None] * 5,
    )


dropout_backward = define_operation(
    "bias_dropout_residual_backward(Tensor grad, Tensor positions, Tensor sample_ids, float p,"
    " int c3, int seed, bool biased) -> (Tensor, Tensor)",
    _backward_reference,
    fake=_backward_fake,
)
dropout_forward = define_operation(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, Tensor positions,"
    " Tensor sample_ids, float p, int c3, int seed) -> Tensor",
    _forward_reference,
    fake=_forward_fake,
    backward=_backward_rule,
    setup_context=_keep_for_backward,
)


def signed_seed(seed: int) -> int:
    """The operations' int64 with the bits of a seed (0 <= seed < 2^64)."""
    return seed - 2**64 if seed >= 2**63 else seed


class _BiasDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: nn.Parameter | None,
        residual: Tensor | None,
        p: float,
        c3: int,
        mb: MicrobatchContext,
    ) -> Tensor:
        ctx.p, ctx.c3, ctx.bias, ctx.mb = p, c3, bias, mb
        ctx.has_residual = residual is not None
        if mb.native:
            return dropout_forward(  # type: ignore[no-any-return]
                x, bias, residual, mb.positions, mb.sample_ids, p, c3, signed_seed(mb.seed)
            )
        h = x.size(-1)
        ctx.mask = _mask(mb.positions, mb.sample_ids, h, p, c3, mb.seed) if p > 0.0 else None
        return _apply(x, bias, residual, ctx.mask, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, grad_x, mb, bias = grads[0], grads[0], ctx.mb, ctx.bias
        biased = bias is not None and bias.requires_grad
        if mb.native:
            if ctx.p > 0.0 or biased:
                key = (ctx.p, ctx.c3, signed_seed(mb.seed))
                out = dropout_backward(grad, mb.positions, mb.sample_ids, *key, biased)
                grad_x = out[0] if ctx.p > 0.0 else grad
                if biased:
                    mb.wgrads.put(bias, lambda main: main.add_(out[1]))
        else:
            if ctx.mask is not None:
                grad_x = grad * ctx.mask * (1.0 / (1.0 - ctx.p))
            if biased:
                rows = grad_x.flatten(0, -2)
                mb.wgrads.put(bias, lambda main: main.add_(rows.sum(0, dtype=main.dtype)))
        return grad_x, None, grad if ctx.has_residual else None, None, None, None


def bias_dropout_residual(
    x: Tensor,
    bias: nn.Parameter | None,
    residual: Tensor | None,
    probability: float,
    purpose: str,
    layer: int,
    mb: MicrobatchContext,
) -> Tensor:
    """dropout(x + bias) + residual.

    Args:
        x: [s_local, b, h], this rank's slice of the sequence at `mb.positions`.
        bias: [h] or None; its gradient goes to the store.
        residual: like x, or None.
        probability: of dropping; off outside training.
        purpose: entry of `ops.random.PURPOSES`.
        layer: global layer index.
        mb: positions, sample ids, step; whether native operations run.

    Returns:
        [s_local, b, h], same dtype.
    """
    p = probability if mb.training else 0.0
    if p == 0.0 and bias is None and residual is None:
        return x
    c3 = decision_counter(purpose, layer, mb.step) if p > 0.0 else 0
    return _BiasDropoutResidual.apply(x, bias, residual, p, c3, mb)  # type: ignore[no-any-return]
