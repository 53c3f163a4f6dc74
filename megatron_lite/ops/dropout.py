"""Dropout whose mask is a function of the logical position, and its fused tail of a block.

The decision of a hidden element is numbered position * h + channel inside its sample; the
sample and the purpose are in the counter. So the mask does not depend on the layout, the
micro-batch size or recomputation. The mask is kept as one byte per element for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.random import decision_counter, flat_words, keep_mask


def hidden_mask(
    positions: Tensor, h: int, probability: float, purpose: str, layer: int, mb: MicrobatchContext
) -> Tensor:
    """[s, b, h] bool: the kept elements of hidden states at `positions`."""
    c2 = (mb.sample_ids & 0xFFFFFFFF).unsqueeze(0)
    rows = positions.unsqueeze(1).expand(-1, mb.sample_ids.numel())
    words = flat_words(
        rows, h, 0, h, c2.expand_as(rows), decision_counter(purpose, layer, mb.step), mb.seed
    )
    return keep_mask(words, probability)


class _BiasDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: nn.Parameter | None,
        residual: Tensor | None,
        mask: Tensor | None,
        scale: float,
        mb: MicrobatchContext,
    ) -> Tensor:
        ctx.mask, ctx.scale, ctx.bias, ctx.mb = mask, scale, bias, mb
        ctx.has_residual = residual is not None
        out = x if bias is None else x + bias
        if mask is not None:
            out = out * mask * scale
        if residual is not None:
            out = out + residual
        return out.clone() if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        grad_x = grad if ctx.mask is None else grad * ctx.mask * ctx.scale
        if ctx.bias is not None:
            bias_grad = grad_x.flatten(0, -2)

            def accumulate(main: Tensor) -> None:
                main.add_(bias_grad.sum(0, dtype=main.dtype))

            ctx.mb.wgrads.put(ctx.bias, accumulate)
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
        mb: positions, sample ids, step.

    Returns:
        [s_local, b, h], same dtype.
    """
    mask = None
    if probability > 0.0 and mb.training:
        mask = hidden_mask(mb.positions, x.size(-1), probability, purpose, layer, mb)
    elif bias is None and residual is None:
        return x
    scale = 1.0 / (1.0 - probability)
    return _BiasDropoutResidual.apply(x, bias, residual, mask, scale, mb)  # type: ignore[no-any-return]
