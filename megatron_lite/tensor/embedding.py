"""Vocabulary-parallel word embedding and the position table.

Each rank holds a range of (padded) vocabulary rows, looks up the tokens in its range, and
the sum over tp completes the lookup. Padding rows are never read: data refuses ids outside
the true vocabulary before they get here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.tensor.linear import gather_sequence, reduce_scatter_sequence


class _VocabularyEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: nn.Parameter,
        tokens: Tensor,
        first_row: int,
        tp_group: Group,
        sequence_parallel: bool,
        mb: MicrobatchContext,
    ) -> Tensor:
        local = tokens - first_row
        foreign = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(foreign, 0)
        ctx.save_for_backward(local, foreign)
        ctx.weight, ctx.tp_group, ctx.mb = weight, tp_group, mb
        ctx.sequence_parallel = sequence_parallel
        out = weight.detach()[local]
        if tp_group.size > 1:
            out.masked_fill_(foreign.unsqueeze(-1), 0.0)
        if sequence_parallel:
            return reduce_scatter_sequence(out, tp_group)
        collectives.all_reduce(out, tp_group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, foreign = ctx.saved_tensors
        grad = grads[0]
        if ctx.sequence_parallel:
            grad = gather_sequence(grad, ctx.tp_group)

        def accumulate(main: Tensor) -> None:
            rows = grad.to(main.dtype).masked_fill(foreign.unsqueeze(-1), 0.0)
            main.index_add_(0, local.flatten(), rows.flatten(0, -2))

        ctx.mb.wgrads.put(ctx.weight, accumulate)
        return None, None, None, None, None, None


class _PositionEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, positions: Tensor, mb: MicrobatchContext
    ) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.weight, ctx.mb = weight, mb
        return x + weight.detach()[positions].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        grad = grads[0]

        def accumulate(main: Tensor) -> None:
            main.index_add_(0, positions, grad.sum(1, dtype=main.dtype))

        ctx.mb.wgrads.put(ctx.weight, accumulate)
        return grad, None, None, None


def vocabulary_embedding(
    weight: nn.Parameter,
    tokens: Tensor,
    first_row: int,
    tp_group: Group,
    sequence_parallel: bool,
    mb: MicrobatchContext,
) -> Tensor:
    """Look tokens up in a table that is cut over tp.

    Args:
        weight: [padded_v/tp, h], shard(0).
        tokens: [s, b] int64, replicated over tp.
        first_row: vocabulary id of the rank's first row.
        tp_group: the tensor-parallel group.
        sequence_parallel: leave each rank one slice of the sequence.
        mb: receives the weight gradient.

    Returns:
        [s, b, h] replicated or [s/tp, b, h] shard(0).

    Comm: forward all-reduce (reduce-scatter) of s*b*h; backward nothing (all-gather).
    """
    sliced = sequence_parallel and tp_group.size > 1
    return _VocabularyEmbedding.apply(weight, tokens, first_row, tp_group, sliced, mb)  # type: ignore[no-any-return]


def position_embedding(
    x: Tensor, weight: nn.Parameter, positions: Tensor, mb: MicrobatchContext
) -> Tensor:
    """x + the learned row of every position; [s_local, b, h], positions [s_local]."""
    return _PositionEmbedding.apply(x, weight, positions, mb)  # type: ignore[no-any-return]
