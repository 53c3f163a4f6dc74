"""Products of many experts: each multiplies its own rows by its own weight.

Rows lie expert after expert. Where torch has a grouped product it is one call, on CUDA for
weight gradients and biases too: no loop there. On the CPU, where a launch costs nothing, one GEMM
per expert that has rows is faster wherever it can add to what is there. Weight gradients go
into the main gradient [n, out, in] through the microbatch's store, so a W action may run them
later. An expert without rows adds nothing: its gradient is exactly what it was, and its
parameter counts as written like every other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_lite.microbatch import MicrobatchContext
from megatron_lite.ops.matrix import accumulate_product
from megatron_lite.ops.moe import gather

# The public name is newer than the private one; torch 2.11 to 2.15 have one or both.
_grouped_mm: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)
_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
# Weights on the same rows. On the CPU it is a loop of its own, and several weights gain more
# from GEMMs that write side by side, or add to what is there.
_MOST_GROUPED = {"cpu": 1, "cuda": 8}
# Whether biases and weight gradients are grouped as well. The product of a gradient needs room
# of its own before it is added: on the CPU 1.2 to 2.5 times as long as GEMMs that add (8 and 32
# experts, 2,000 rows).
_GROUPED_THROUGHOUT = {"cpu": False, "cuda": True}
_GROUPED_ALIGNMENT_BYTES = 16  # of every row


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """How packed rows come out of the tokens once more, instead of being kept for a backward.

    Attributes:
        tokens: [t, h], which others keep anyway.
        source, row_of: of `ops.moe.route`.
        rows: the packed rows; the recipe holds for this tensor and no other.
    """

    tokens: Tensor
    source: Tensor
    row_of: Tensor
    rows: weakref.ref[Tensor]


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Which rows belong to which expert of this rank.

    Attributes:
        offsets: [n + 1] on the host; expert e has the rows [offsets[e], offsets[e + 1]).
        ends: [n] int32 on the device, offsets[1:].
        packed: where the rows can be packed once more, how.
    """

    offsets: tuple[int, ...]
    ends: Tensor
    packed: PackedTokens | None = None

    @property
    def counts(self) -> Tensor:
        """[n] int64 on the device, rows of each expert."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).long()

    def segments(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end) of the experts that have rows."""
        bounds = enumerate(pairwise(self.offsets))
        return [(expert, first, end) for expert, (first, end) in bounds if end > first]


class _Inputs:
    """The input for several weight gradients: x, or rows packed again at the first of them.

    Args:
        saved: x alone, or tokens, source and row_of.
        uses: calls to come; packed rows are dropped at the last.
        native: by the operation, not its reference.
    """

    def __init__(self, saved: tuple[Tensor, ...], uses: int, native: bool) -> None:
        self._saved, self._uses, self._native = saved, uses, native
        self._rows = saved[0] if len(saved) == 1 else None

    def __call__(self) -> Tensor:
        rows = self._rows
        if rows is None:
            tokens, source, row_of = self._saved
            rows, _ = gather(tokens, None, source, row_of, self._native)
        self._uses -= 1
        self._rows = rows if self._uses else None
        return rows


def _aligned(x: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes, last dim contiguous."""
    step = x.element_size()
    strides = [stride * step for stride in x.stride()[:-1]]
    places = [x.data_ptr(), *strides, x.shape[-1] * step]
    return x.stride(-1) == 1 and not any(place % _GROUPED_ALIGNMENT_BYTES for place in places)


def _can_group(operands: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether torch's grouped product takes these operands, and is the faster way."""
    x = operands[0]
    return (
        _grouped_mm is not None
        and x.dtype in _GROUPED_DTYPES.get(x.device.type, ())
        and x.shape[0] > 0
        and len(weights) <= _MOST_GROUPED[x.device.type]
        and all(_aligned(operand) for operand in (*operands, *weights))
    )


def _is_grouped_throughout(x: Tensor) -> bool:
    return _GROUPED_THROUGHOUT[x.device.type]


def _multiply(
    x: Tensor,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter | None],
    rows: ExpertRows,
) -> Tensor:
    """Rows of each expert times its matrices (x W^T + bias): [rows, in] -> [rows, sum of out].

    Costs 2 * rows * in * out FLOPs.
    """
    grouped = _is_grouped_throughout(x) or all(bias is None for bias in biases)
    if grouped and _can_group([x], weights):
        assert _grouped_mm is not None
        outs = [_grouped_mm(x, weight.transpose(1, 2), offs=rows.ends) for weight in weights]
        for out, bias in zip(outs, biases, strict=True):
            if bias is not None:
                out += bias.repeat_interleave(rows.counts, dim=0, output_size=x.shape[0])
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    widths = [weight.shape[1] for weight in weights]
    out = x.new_empty(x.shape[0], sum(widths))
    columns = out.split(widths, dim=1)
    for expert, first, end in rows.segments():
        part = x[first:end]
        for column, weight, bias in zip(columns, weights, biases, strict=True):
            if bias is None:
                torch.mm(part, weight[expert].t(), out=column[first:end])
            else:
                torch.addmm(bias[expert], part, weight[expert].t(), out=column[first:end])
    return out


def _multiply_back(
    grads: Sequence[Tensor], weights: Sequence[nn.Parameter], rows: ExpertRows
) -> Tensor:
    """Input gradient, the sum of grad W over the weights: [rows, out] -> [rows, in]."""
    if _can_group(grads, weights):
        assert _grouped_mm is not None
        parts = [_grouped_mm(g, w, offs=rows.ends) for g, w in zip(grads, weights, strict=True)]
        for part in parts[1:]:
            parts[0] += part
        return parts[0]
    out = grads[0].new_empty(grads[0].shape[0], weights[0].shape[2])
    for expert, first, end in rows.segments():
        place = out[first:end]
        torch.mm(grads[0][first:end], weights[0][expert], out=place)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            place.addmm_(grad[first:end], weight[expert])
    return out


def _weight_gradient(
    grad: Tensor, x: Callable[[], Tensor], rows: ExpertRows, native: bool
) -> Callable[[Tensor], None]:
    """W of one weight: main[e] += grad_e^T x_e."""

    def accumulate(main: Tensor) -> None:
        inputs = x()
        if _is_grouped_throughout(grad) and _can_group([grad, inputs], ()):
            assert _grouped_mm is not None
            main.add_(_grouped_mm(grad.t(), inputs, offs=rows.ends))
            return
        for expert, first, end in rows.segments():
            accumulate_product(main[expert], grad[first:end], inputs[first:end], native)

    return accumulate


def _bias_gradient(grad: Tensor, rows: ExpertRows) -> Callable[[Tensor], None]:
    def accumulate(main: Tensor) -> None:
        if _is_grouped_throughout(grad):
            wide = grad.to(main.dtype)
            main.add_(torch.segment_reduce(wide, "sum", lengths=rows.counts, unsafe=True))
            return
        for expert, first, end in rows.segments():
            main[expert] += grad[first:end].sum(0, dtype=main.dtype)

    return accumulate


class _GroupedLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: ExpertRows,
        packed: PackedTokens | None,
        mb: MicrobatchContext,
        num_weights: int,
        *params: nn.Parameter | None,
    ) -> Tensor:
        weights = [param for param in params[:num_weights] if param is not None]
        biases = params[num_weights:]
        if packed is None:
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(packed.tokens, packed.source, packed.row_of)
        # Without the recipe: tensors are kept as saved ones only, which recomputation drops.
        ctx.rows, ctx.mb = ExpertRows(rows.offsets, rows.ends), mb
        ctx.weights, ctx.biases = weights, biases
        return _multiply(x, weights, biases, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, mb = ctx.rows, ctx.mb
        # A sum's gradient is expanded; a cut along dim 1 is as good as contiguous.
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        parts = grad.split([weight.shape[1] for weight in ctx.weights], dim=1)
        grad_x = _multiply_back(parts, ctx.weights, rows) if ctx.needs_input_grad[0] else None
        trained = sum(weight.requires_grad for weight in ctx.weights)
        inputs = _Inputs(ctx.saved_tensors, trained, mb.native)
        # The last first, as buckets are ordered: they leave in that order.
        for weight, bias, part in reversed([*zip(ctx.weights, ctx.biases, parts, strict=True)]):
            wgrad = _weight_gradient(part, inputs, rows, mb.native)
            mb.wgrads.put(weight, wgrad, deferrable=True)
            if bias is not None:
                mb.wgrads.put(bias, _bias_gradient(part, rows))
        return grad_x, None, None, None, None, *[None] * (2 * len(parts))


def grouped_linears(
    x: Tensor,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter | None],
    rows: ExpertRows,
    mb: MicrobatchContext,
) -> Tensor:
    """Several linears of the experts on the same rows, side by side: a gate and its like.

    Args:
        x: [rows, in], the rows of expert 0, of expert 1, ...
        weights: of [n, out, in] each.
        biases: of [n, out] each, or None.
        rows: whose rows they are.
        mb: receives weight (deferrable) and bias gradients.

    Returns:
        [rows, sum of out].

    Memory: keeps x for the backward pass; nothing where the rows are packed tokens (as the
        dispatcher handed them over, all on this rank), which are gathered once more instead.
    """
    packed = rows.packed if rows.packed is not None and rows.packed.rows() is x else None
    return _GroupedLinears.apply(  # type: ignore[no-any-return]
        x, rows, packed, mb, len(weights), *weights, *biases
    )


def grouped_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    rows: ExpertRows,
    mb: MicrobatchContext,
) -> Tensor:
    """One linear of the experts, [rows, in] -> [rows, out]; see `grouped_linears`."""
    return grouped_linears(x, (weight,), (bias,), rows, mb)
