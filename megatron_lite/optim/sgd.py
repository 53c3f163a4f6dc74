"""SGD with momentum, as Megatron's `--optimizer sgd` (torch's SGD: decay is coupled).

g += wd w; m = momentum m + g; w -= lr m. It is linear in the gradient, so a wrong factor
in a gradient shows in the weights, where Adam would hide it: parity tests use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.ops.optimizer import sgd_update
from megatron_lite.optim.rules import Segments


@dataclass(frozen=True)
class SGD:
    """Hyper-parameters of SGD."""

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """The momentum, where there is any."""
        return ("momentum",) if self.momentum else ()

    def update(self, parts: Segments, step: Tensor, *, lr: float, weight_decay: float) -> None:
        """Update weights and momentum in place; see `UpdateRule.update`."""
        # A zero momentum makes the first step m = g, so no step is special.
        torch._fused_sgd_(
            parts.weights,
            parts.gradients,
            list(parts.state["momentum"]) if self.momentum else [],
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def update_native(
        self, parts: Segments, step: int, *, clip: Tensor | None, lr: float, weight_decay: float
    ) -> None:
        """Update weights, momentum and copies in place; see `UpdateRule.update_native`."""
        momenta = parts.state["momentum"] if self.momentum else [None] * len(parts.weights)
        segments = zip(parts.weights, parts.gradients, momenta, parts.copies, strict=True)
        for weight, gradient, momentum, copy in segments:
            sgd_update(
                weight,
                gradient,
                momentum,
                copy,
                clip,
                None,
                lr,
                self.momentum,
                weight_decay,
                False,
            )
