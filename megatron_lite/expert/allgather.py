"""All tokens of the expert block come to every rank, which computes what its experts say.

Messages have the same size whatever the routing. A rank's results are a partial sum for all
tokens, over its experts and over its slice of them (etp), formed in the accumulation dtype;
the reduce-scatter adds them up and leaves each rank its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lite.expert.grouped import ExpertRows
from megatron_lite.expert.parts import DISPATCH_TIMER, ExpertParts
from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.moe import combine, combine_backward, gather, route
from megatron_lite.ops.norm import accumulation_dtype


def _all_gather(x: Tensor, block: Group, mb: MicrobatchContext) -> Tensor:
    out = x.new_empty(x.shape[0] * block.size, *x.shape[1:])
    with mb.measure(DISPATCH_TIMER):
        collectives.all_gather_into(out, x.contiguous(), block)
    return out


def _reduce_scatter(partial: Tensor, block: Group, mb: MicrobatchContext) -> Tensor:
    out = partial.new_empty(partial.shape[0] // block.size, *partial.shape[1:])
    with mb.measure(DISPATCH_TIMER):
        collectives.reduce_scatter_into(out, partial.contiguous(), block)
    return out


class _GatherProbs(torch.autograd.Function):
    """Choices and weights of all tokens in one message: [t, k] each -> [T, k] each."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, probs: Tensor, block: Group, mb: MicrobatchContext
    ) -> tuple[Tensor, Tensor]:
        ctx.block, ctx.mb = block, mb
        as_bits = torch.int32 if probs.dtype == torch.float32 else torch.int64
        message = torch.cat([ids.to(as_bits), probs.contiguous().view(as_bits)], dim=1)
        all_ids, bits = _all_gather(message, block, mb).chunk(2, dim=1)
        ctx.mark_non_differentiable(all_ids)
        return all_ids, bits.contiguous().view(probs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, _reduce_scatter(grads[1], ctx.block, ctx.mb), None, None


class _GatherRows(torch.autograd.Function):
    """Tokens of the block and from them the rows of the experts here: [t, h] -> [rows, h]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Tensor, row_of: Tensor, block: Group, mb: MicrobatchContext
    ) -> Tensor:
        ctx.save_for_backward(source, row_of)
        ctx.block, ctx.mb = block, mb
        return gather(_all_gather(x, block, mb), None, source, row_of, mb.native)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        source, row_of = ctx.saved_tensors
        wide = grads[0].to(accumulation_dtype(grads[0].dtype))
        partial = combine(wide, None, row_of, source, ctx.mb.native)
        grad = _reduce_scatter(partial, ctx.block, ctx.mb).to(grads[0].dtype)
        return grad, None, None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sums of all tokens, added up over the block: [rows, h] -> [t, h]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        source: Tensor,
        row_of: Tensor,
        block: Group,
        mb: MicrobatchContext,
    ) -> Tensor:
        ctx.save_for_backward(rows, probs, source, row_of)
        ctx.block, ctx.mb = block, mb
        partial = combine(rows.to(probs.dtype), probs, row_of, source, mb.native)
        return _reduce_scatter(partial, block, mb).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, source, row_of = ctx.saved_tensors
        grad = _all_gather(grads[0], ctx.block, ctx.mb)
        d_rows, d_probs = combine_backward(grad, rows, probs, row_of, source, ctx.mb.native)
        return d_rows, d_probs, None, None, None, None


def run_gathered(
    parts: ExpertParts,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    experts: Callable[[Tensor, ExpertRows], Tensor],
    mb: MicrobatchContext,
) -> Tensor:
    """`run_experts` by an all-gather.

    Args:
        probs: [t, k] in the accumulation dtype.

    Memory: T*h elements of all T tokens of the block while rows are packed, T*h of the
        accumulation dtype while they are combined; kept is what `run_experts` says.

    Comm: over the block, forward an all-gather of T*h and one of 2*T*k elements, a
        reduce-scatter of T*h in the accumulation dtype; backward the same but the probabilities'
        alone: all-gather of T*h, reduce-scatters of T*h and T*k.
    """
    native, local = mb.native, parts.local_experts
    all_ids, probs = _GatherProbs.apply(ids, probs, parts.block, mb)
    mb.losses.dispatched[parts.layer] = (parts.block.size - 1) * x.numel() * x.element_size()
    mine = (all_ids - parts.ep.rank * local).int()  # those outside are dropped
    _, bounds, row_of, source = route(mine, local, 1, mine.numel(), native)
    # Waits for the device: room for any routing would be min(k, experts here) rows per token.
    offsets = tuple(bounds.tolist())
    source = source[: offsets[-1]]
    rows = _GatherRows.apply(x, source, row_of, parts.block, mb)
    result = experts(rows, ExpertRows(offsets, bounds[1:].int()))
    return _Combine.apply(result, probs, source, row_of, parts.block, mb)  # type: ignore[no-any-return]
