"""MLP activations, gated and plain; each saves its input only.

Bound by memory: gated forward reads 2 t*f and writes t*f elements; backward reads 3 t*f and
writes 2 t*f (half of that for plain ones).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def _value(kind: str, x: Tensor) -> Tensor:
    if kind == "gelu":
        return functional.gelu(x)
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if kind == "silu":
        return functional.silu(x)
    if kind == "squared_relu":
        return functional.relu(x).square()
    raise ValueError(f"activation {kind!r}: legal are gelu, gelu_tanh, silu, squared_relu")


def _gradient(kind: str, grad: Tensor, x: Tensor) -> Tensor:
    if kind == "gelu":
        return aten.gelu_backward(grad, x)  # type: ignore[no-any-return]
    if kind == "gelu_tanh":
        return aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]
    if kind == "silu":
        return aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    return grad * 2 * functional.relu(x)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return _value(kind, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _gradient(ctx.kind, grads[0], x), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        gate, up = x.chunk(2, dim=-1)
        return _value(kind, gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        grad_gate.copy_(_gradient(ctx.kind, grads[0] * up, gate))
        torch.mul(grads[0], _value(ctx.kind, gate), out=grad_up)
        return out, None


def activate(x: Tensor, kind: str, gated: bool) -> Tensor:
    """Apply the MLP's activation.

    Args:
        x: [..., 2f] with gate before up when `gated`, else [..., f].
        kind: "gelu", "gelu_tanh", "silu" or "squared_relu".
        gated: activation(gate) * up.

    Returns:
        [..., f], same dtype.
    """
    return (_Gated if gated else _Plain).apply(x, kind)  # type: ignore[no-any-return]
