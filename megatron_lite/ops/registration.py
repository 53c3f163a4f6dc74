"""Registering operations with torch: schema, reference, fake rule, autograd rule.

An operation exists as soon as its file is imported: its reference in plain torch serves every
device, also as the rule for fake tensors. The native library adds implementations for CPU and
CUDA when it is loaded; torch's dispatcher then prefers them. So tracing, shape dry runs and
machines without a compiler need no native code.

An operation that writes to its arguments tells autograd so, as torch's own in-place operations
do: what a gradient needs and finds changed raises instead of giving wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

NAMESPACE = "megatron_lite"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # registrations last as long as it


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
    operation = getattr(torch.ops.megatron_lite, name).default
    if operation._schema.is_mutable:
        _announce_writes(name, operation)
    return operation


def _announce_writes(name: str, operation: Any) -> None:
    """Refuse to write where autograd would lose a gradient; count the versions of the rest."""
    places = [
        (place, argument.name)
        for place, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def announce(keys: Any, *args: Any) -> Any:
        for place, argument in places:
            written = args[place]
            if not isinstance(written, Tensor) or written.is_inference():
                continue
            if written.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{argument}: {name} writes to it without recording gradients, so it must"
                    " not require one (detach it, or call under torch.no_grad())"
                )
            increment_version(written)
        return operation.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    _LIBRARY.impl(name, announce, "ADInplaceOrView", with_keyset=True)
