"""Parameters that are there only around their use: where a pass says what it needs.

A use-site's parameters are held while its forward runs, and again while its backward does;
what marks the borders of the backward are two identity functions in the graph, one behind
the use-site's output and one in front of its input. Where all parameters are always there
nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lite.microbatch import MicrobatchContext


class _Begin(torch.autograd.Function):
    """Behind the output: its gradient arriving begins the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, uses: tuple[str, ...], mb: MicrobatchContext) -> Tensor:
        ctx.uses, ctx.mb = uses, mb
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.mb.weights.before_backward(ctx.uses, ctx.mb.pass_id)
        return *gradients, None, None


class _End(torch.autograd.Function):
    """In front of the input: its gradient leaving ends the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: tuple[str, ...], mb: MicrobatchContext) -> Tensor:
        ctx.uses, ctx.mb = uses, mb
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.mb.weights.after_backward(ctx.uses, ctx.mb.pass_id)
        return *gradients, None, None


def with_parameters(
    uses: tuple[str, ...], run: Callable[[Tensor], Tensor], x: Tensor, mb: MicrobatchContext
) -> Tensor:
    """Run `run(x)` while the parameters of `uses` are there, its backward pass likewise.

    Args:
        uses: use-sites of the spec, in forward order.
        run: reads no other parameters.
        x: input through which the gradient leaves.
        mb: the microbatch.
    """
    if mb.weights is None:
        return run(x)
    mb.weights.before_forward(uses, mb.pass_id)
    again = mb.wgrads is not None and mb.weights.has_backward and x.requires_grad
    if again:
        x = _End.apply(x, uses, mb)  # type: ignore[no-untyped-call]
    y = run(x)
    if again:
        y = _Begin.apply(y, uses, mb)  # type: ignore[no-untyped-call]
    mb.weights.after_forward(uses, mb.pass_id, again=again)
    return y


def forward_only(
    use: str, run: Callable[[Tensor], Tensor], x: Tensor, mb: MicrobatchContext
) -> Tensor:
    """Run `run(x)` likewise, when its backward pass reads no parameter.

    So it is at both ends of the model: an embedding's gradient is an addition of rows, and
    the head forms all its gradients in the forward pass.
    """
    if mb.weights is None:
        return run(x)
    mb.weights.before_forward((use,), mb.pass_id, backward_next=mb.wgrads is not None)
    y = run(x)
    mb.weights.after_forward((use,), mb.pass_id, again=False)
    return y
