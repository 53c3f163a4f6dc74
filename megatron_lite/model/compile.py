"""`--compile`: one compiled layer serves all layers.

Traced is what lies between the operations that own parameters or communicate: those write
main gradients and talk to other ranks, which a traced graph must neither reorder nor repeat.
Our operations are known to the compiler by their schemas and fake rules, so they stay whole
inside its graphs. Source: torch.compile's regional compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_lite.model.block import transformer_layer
from megatron_lite.model.parts import LayerParts

_OPAQUE = (
    *("norm", "column_linear", "row_linear", "replicated_linear", "enter"),
    *("add", "attend", "mix_experts"),
)


def compile_layer(layers: Sequence[LayerParts]) -> Callable[..., Tensor]:
    """`transformer_layer`, compiled; `layers` are told to stay out of the traced graphs."""
    for layer in layers:
        for name in _OPAQUE:
            setattr(layer, name, torch.compiler.disable(getattr(layer, name)))
    return torch.compile(transformer_layer)
