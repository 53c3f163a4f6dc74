"""Recomputation: keep a region's inputs, run it again in the backward pass.

The stateless randomness makes the second run identical without saving or restoring any
generator. Weight gradients arise in the second run and go to the microbatch's store as
usual. Costs one more forward pass of the region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        torch.autograd.backward(out, grads[0])
        return None, *[x.grad for x in inputs]


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run `run(*inputs)` keeping only `inputs` for the backward pass.

    Args:
        run: pure function of its inputs and of immutable context; one tensor out.
        inputs: at least one must require a gradient.
    """
    return _Recompute.apply(run, *inputs)  # type: ignore[no-any-return]
