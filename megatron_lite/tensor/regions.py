"""Entering a tensor region with activations that every rank's heads share, without a weight.

What all heads read (the rotary key of multi-latent attention) is made outside of the region;
inside each tensor rank's heads use it, so its gradient is a sum over tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.tensor.linear import gather_sequence, reduce_scatter_sequence


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_group: Group, sliced: bool) -> Tensor:
        ctx.tp_group, ctx.sliced = tp_group, sliced
        return gather_sequence(x, tp_group) if sliced else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sliced:
            return reduce_scatter_sequence(grads[0], ctx.tp_group), None, None
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(grad, ctx.tp_group)
        return grad, None, None


def enter_region(x: Tensor, tp_group: Group, sequence_parallel: bool) -> Tensor:
    """Hand activations to this rank's heads.

    Args:
        x: [s, b, c] replicated over tp, or [s/tp, b, c] shard(0) under sequence parallelism.
        tp_group: the tensor-parallel group; its rank order is the slice order.
        sequence_parallel: x is a slice of the sequence.

    Returns:
        [s, b, c] replicated; its gradient is partial over tp.

    Comm: backward all-reduce of s*b*c; under sequence parallelism all-gather forward and
        reduce-scatter backward.
    """
    if tp_group.size == 1:
        return x
    return _Enter.apply(x, tp_group, sequence_parallel)  # type: ignore[no-any-return]
