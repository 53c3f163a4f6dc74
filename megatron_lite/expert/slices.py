"""Tokens of a MoE layer: every tensor rank works on a slice of the sequence.

Under sequence parallelism that is how activations lie already. Without it each rank takes its
slice of what all hold, and the outputs are gathered again; backward each is the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.mesh.groups import Group
from megatron_lite.tensor.linear import gather_sequence


def _own(x: Tensor, tp: Group) -> Tensor:
    return x.chunk(tp.size)[tp.rank].contiguous()


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return _own(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_sequence(grads[0], ctx.tp), None


class _Unslice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return gather_sequence(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _own(grads[0], ctx.tp), None


def slice_tokens(x: Tensor, tp: Group) -> Tensor:
    """This rank's slice: [s, b, h] replicated -> [s/tp, b, h].

    Comm: backward all-gather of s*b*h elements.
    """
    return x if tp.size == 1 else _Slice.apply(x, tp)  # type: ignore[no-any-return]


def unslice_tokens(x: Tensor, tp: Group) -> Tensor:
    """All slices: [s/tp, b, h] -> [s, b, h] replicated; its gradient is replicated, too.

    Comm: forward all-gather of s*b*h elements.
    """
    return x if tp.size == 1 else _Unslice.apply(x, tp)  # type: ignore[no-any-return]
