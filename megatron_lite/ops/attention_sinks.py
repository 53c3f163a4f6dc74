"""Attention sinks: one more logit per head, without a value, in the softmax's denominator.

With log-sum-exp l of the scores a sink z leaves each query the share sigmoid(l - z) of what it
would get, so sinks are applied to the result of any attention kernel that returns l. Keeps
that result and l, which the kernel keeps anyway; the share is computed again. The gradient of
the sinks goes to the microbatch's store. Source: Xiao et al. 2023; GPT-OSS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.norm import accumulation_dtype


def _put(sinks: Tensor, grad: Tensor, mb: MicrobatchContext) -> None:
    if isinstance(sinks, nn.Parameter) and mb.wgrads is not None:
        mb.wgrads.put(sinks, lambda main: main.add_(grad))


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor, mb: MicrobatchContext) -> Tensor:
        ctx.save_for_backward(out, lse)
        ctx.sinks, ctx.mb = sinks, mb
        return (out.to(lse.dtype) * _share(lse, sinks)).to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, lse = ctx.saved_tensors
        share, grad = _share(lse, ctx.sinks), grads[0].to(lse.dtype)
        # d share / d lse = share (1 - share) = - d share / d sink
        slope = ((grad * out).sum(-1, keepdim=True) * share * (1 - share)).squeeze(-1)
        _put(ctx.sinks, -slope.sum((0, 1)), ctx.mb)
        return (grad * share).to(out.dtype), slope.permute(1, 2, 0), None, None


def _share(lse: Tensor, sinks: Tensor) -> Tensor:
    """[s, b, n, 1] of log-sum-exp [b, n, s]."""
    return torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1)).permute(2, 0, 1).unsqueeze(-1)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor, mb: MicrobatchContext) -> Tensor:
    """Let sinks join the denominator of an attention that was computed without.

    Args:
        out: [s_q, b, n, d_v].
        lse: [b, n, s_q], log-sum-exp of the scores, in the softmax's dtype.
        sinks: [n], this rank's; a parameter, or numbers that are not trained.
        mb: receives the gradient of a parameter.

    Returns:
        [s_q, b, n, d_v], dtype of out; gradients reach q and k through lse, too.
    """
    return _Sinks.apply(out, lse, sinks, mb)  # type: ignore[no-any-return]


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, sinks: Tensor, mb: MicrobatchContext) -> Tensor:
        ctx.sinks, ctx.mb = sinks, mb
        column = sinks.to(scores.dtype).view(1, -1, 1, 1)
        return torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _put(ctx.sinks, grads[0][..., -1].sum((0, 2)), ctx.mb)
        return grads[0][..., :-1], None, None


def softmax_with_sinks(scores: Tensor, sinks: Tensor, mb: MicrobatchContext) -> Tensor:
    """Probabilities of explicit scores beside sinks.

    Args:
        scores: [b, n, s_q, s_k], masked, in the softmax's dtype.
        sinks, mb: as for `add_sinks`.

    Returns:
        [b, n, s_q, s_k]; rows sum to less than 1.
    """
    widened: Tensor = _Column.apply(scores, sinks, mb)  # type: ignore[no-untyped-call]
    assert widened.dtype == accumulation_dtype(scores.dtype)
    return torch.softmax(widened, dim=-1)[..., :-1]
