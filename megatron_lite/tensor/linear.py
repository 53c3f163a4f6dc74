"""Column- and row-parallel linears, input and weight gradients apart.

A tensor region opens with a column-parallel linear (weight cut over its output rows) and
closes with a row-parallel one (cut over its input columns). Without sequence parallelism
activations outside the region are replicated over tp; with it every rank holds a slice of
the sequence, gathers at the entry and reduce-scatters at the exit. Only the slice is saved;
the backward gathers once more. Source: Shoeybi et al. 2019, Korthikanti et al. 2022.

The weight gradient is one GEMM straight into the main gradient, handed to the microbatch's
store, so that it can hide the input gradient's reduction or wait for a W action.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group, local_group
from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.matrix import accumulate_product

_ALONE = local_group("alone")


def gather_sequence(x: Tensor, tp_group: Group) -> Tensor:
    """All-gather slices of the sequence: [s/tp, b, h] -> [s, b, h]. Not differentiable.

    Comm: all-gather of s*b*h elements, (tp-1)/tp of it received per rank.
    """
    out = x.new_empty(x.shape[0] * tp_group.size, *x.shape[1:])
    collectives.all_gather_into(out, x.contiguous(), tp_group)
    return out


def reduce_scatter_sequence(partial: Tensor, tp_group: Group) -> Tensor:
    """Sum partials over tp and keep this rank's slice: [s, b, h] -> [s/tp, b, h].

    Comm: reduce-scatter of s*b*h elements, half of the all-reduce it replaces.
    """
    out = partial.new_empty(partial.shape[0] // tp_group.size, *partial.shape[1:])
    collectives.reduce_scatter_into(out, partial.contiguous(), tp_group)
    return out


def weight_gradient(grad: Tensor, x: Tensor, native: bool) -> Callable[[Tensor], None]:
    """Deferred W of a linear: main += grad^T x, 2*t*out*in FLOPs.

    Args:
        grad: [..., out] gradient of the output.
        x: [..., in] input.
        native: bf16 products may be summed in fp32 without a bf16 result in between.
    """
    grad_2d, x_2d = grad.flatten(0, -2), x.flatten(0, -2)
    return lambda main: accumulate_product(main, grad_2d, x_2d, native)


def _put_bias(bias: nn.Parameter | None, grad: Tensor, mb: MicrobatchContext) -> None:
    if bias is not None:
        assert mb.wgrads is not None
        rows = grad.flatten(0, -2)
        mb.wgrads.put(bias, lambda main: main.add_(rows.sum(0, dtype=main.dtype)))


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        tp_group: Group,
        sequence_parallel: bool,
        mb: MicrobatchContext,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tp_group, ctx.mb = weight, bias, tp_group, mb
        ctx.sequence_parallel = sequence_parallel
        full = gather_sequence(x, tp_group) if sequence_parallel else x
        return functional.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad, group, weight = grads[0].contiguous(), ctx.tp_group, ctx.weight
        regather = None
        full = x
        if ctx.sequence_parallel:
            # Only the slice was saved. The gather hides behind the input gradient's GEMM.
            full = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
            regather = collectives.all_gather_into(full, x.contiguous(), group, async_op=True)
        grad_x = grad @ weight
        if ctx.sequence_parallel:
            partial = grad_x
            grad_x = partial.new_empty(x.shape)
            work = collectives.reduce_scatter_into(grad_x, partial, group, async_op=True)
        else:
            work = collectives.all_reduce(grad_x, group, async_op=True)
        if regather is not None:
            regather.wait()
        # The reduction hides behind the weight gradient's GEMM.
        ctx.mb.wgrads.put(weight, weight_gradient(grad, full, ctx.mb.native), deferrable=True)
        _put_bias(ctx.bias, grad, ctx.mb)
        if work is not None:
            work.wait()
        return grad_x, None, None, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        tp_group: Group,
        sequence_parallel: bool,
        mb: MicrobatchContext,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp_group, ctx.mb = weight, tp_group, mb
        ctx.sequence_parallel = sequence_parallel
        partial = functional.linear(x, weight)
        if sequence_parallel:
            return reduce_scatter_sequence(partial, tp_group)
        collectives.all_reduce(partial, tp_group)
        return partial

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        if ctx.sequence_parallel:
            grad = gather_sequence(grad, ctx.tp_group)
        wgrad = weight_gradient(grad, x, ctx.mb.native)
        ctx.mb.wgrads.put(ctx.weight, wgrad, deferrable=True)
        return grad @ ctx.weight, None, None, None, None


def column_parallel_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    tp_group: Group,
    sequence_parallel: bool,
    mb: MicrobatchContext,
) -> Tensor:
    """Open a tensor region: x W^T + bias for this rank's output rows.

    Args:
        x: [s, b, in] replicated over tp, or [s/tp, b, in] shard(0) under sequence parallelism.
        weight: [out/tp, in], shard(0).
        bias: [out/tp] or None.
        tp_group: the tensor-parallel group; its rank order is the slice order.
        sequence_parallel: x is a slice of the sequence.
        mb: receives the weight and bias gradients.

    Returns:
        [s, b, out/tp].

    Comm: backward all-reduce of s*b*in; under sequence parallelism all-gather forward, and
        all-gather plus reduce-scatter backward.
    """
    sliced = sequence_parallel and tp_group.size > 1
    return _ColumnParallel.apply(x, weight, bias, tp_group, sliced, mb)  # type: ignore[no-any-return]


def row_parallel_linear(
    x: Tensor, weight: nn.Parameter, tp_group: Group, sequence_parallel: bool, mb: MicrobatchContext
) -> Tensor:
    """Close a tensor region: sum over tp of x W^T; the bias is added by the caller.

    Args:
        x: [s, b, in/tp].
        weight: [out, in/tp], shard(1).
        tp_group: the tensor-parallel group.
        sequence_parallel: leave each rank one slice of the sequence.
        mb: receives the weight gradient.

    Returns:
        [s, b, out] replicated, or [s/tp, b, out] shard(0).

    Comm: forward all-reduce (reduce-scatter under sequence parallelism) of s*b*out; backward
        nothing (all-gather).
    """
    sliced = sequence_parallel and tp_group.size > 1
    return _RowParallel.apply(x, weight, tp_group, sliced, mb)  # type: ignore[no-any-return]


def replicated_linear(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, mb: MicrobatchContext
) -> Tensor:
    """x W^T + bias by a weight that every tensor rank holds whole; no communication.

    Under sequence parallelism, where x is a slice, the weight's gradient is partial over tp.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.
        mb: receives the weight and bias gradients.

    Returns:
        [..., out].
    """
    return _ColumnParallel.apply(x, weight, bias, _ALONE, False, mb)  # type: ignore[no-any-return]
