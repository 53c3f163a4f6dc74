"""Registering operations with torch: schema, reference, fake rule, autograd rule.

An operation exists as soon as its file is imported: its reference in plain torch serves every
device, also as the rule for fake tensors. The native library adds implementations for CPU and
CUDA when it is loaded; torch's dispatcher then prefers them. So tracing, shape dry runs and
machines without a compiler need no native code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "megatron_lite"


def define_operation(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Define `megatron_lite::<schema>` and return its callable packet.

    Args:
        schema: torch's notation, e.g. "gelu(Tensor x) -> Tensor"; mutated arguments marked.
        reference: plain torch, the same signature; results never alias arguments.
        fake: shapes only; default: the reference, which then must not read values.
        backward: autograd rule `(ctx, *grads) -> gradients`; None: not differentiable.
        setup_context: `(ctx, inputs, output)` saving what `backward` needs.
    """
    name = schema[: schema.index("(")]
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, schema[len(name) :])
    torch.library.impl(qualified, "default", reference)
    torch.library.register_fake(qualified, fake or reference)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return getattr(torch.ops.megatron_lite, name).default
