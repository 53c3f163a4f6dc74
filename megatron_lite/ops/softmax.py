"""softmax(scale * x) over the last dim, with a causal or a given boolean mask.

Computed in fp32 (fp64 for fp64), rounded once; the output is all that the backward pass
needs. Rows without visible keys give 0, never NaN. Bound by memory: forward moves 2 elements
per score (and a byte of mask), backward 3; what is hidden causally is not read.

`masked_softmax(x, visible, scale, causal)`: `visible` is bool, True where a query sees a key,
broadcastable to x in all dims but the last; None: everything. With `causal` query q also sees
only the keys up to q + keys - queries (bottom-right).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_lite.ops.norm import accumulation_dtype
from megatron_lite.ops.registration import define_operation


def _forward_reference(x: Tensor, visible: Tensor | None, scale: float, causal: bool) -> Tensor:
    if x.size(-1) == 0:
        return x.new_empty(x.shape)
    scores = x.to(accumulation_dtype(x.dtype)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if causal:
        queries, keys = x.shape[-2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
        scores = scores.masked_fill(~seen, -math.inf)
    blind = scores.amax(-1, keepdim=True) == -math.inf
    return torch.softmax(scores, dim=-1).masked_fill(blind, 0.0).to(x.dtype).contiguous()


def _backward_reference(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    wide = accumulation_dtype(out.dtype)
    grad, y = grad.to(wide), out.to(wide)
    grad_x = scale * y * (grad - (grad * y).sum(-1, keepdim=True))
    return grad_x.to(out.dtype).contiguous()


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _backward_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return masked_softmax_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


masked_softmax_backward = define_operation(
    "masked_softmax_backward(Tensor grad, Tensor out, float scale) -> Tensor",
    _backward_reference,
)
masked_softmax = define_operation(
    "masked_softmax(Tensor x, Tensor? visible, float scale, bool causal) -> Tensor",
    _forward_reference,
    backward=_backward_rule,
    setup_context=_keep_for_backward,
)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, visible: Tensor | None, scale: float, causal: bool, native: bool
    ) -> Tensor:
        run = masked_softmax if native else _forward_reference
        out = run(x, visible, scale, causal)
        ctx.save_for_backward(out)
        ctx.scale, ctx.native = scale, native
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        run = masked_softmax_backward if ctx.native else _backward_reference
        return run(grads[0], out, ctx.scale), None, None, None, None


def scaled_masked_softmax(
    x: Tensor,
    visible: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    native: bool = False,
) -> Tensor:
    """Turn attention scores into probabilities.

    Args:
        x: [queries, keys], [b, queries, keys] or [b, n, queries, keys], any strides.
        visible: bool, True where a query sees a key; broadcastable to x, keys in full.
        scale: of the scores.
        causal: query q sees the keys up to q + keys - queries.
        native: use the native operation.

    Returns:
        like x, contiguous; 0 in rows that see nothing.
    """
    return _MaskedSoftmax.apply(x, visible, scale, causal, native)  # type: ignore[no-any-return]
