"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), as Megatron's `--optimizer adam`.

Decoupled decay w -= lr wd w, then Adam's update with bias correction and eps outside the
root. torch's fused kernel makes one pass over memory: per element it reads weight,
gradient and both moments and writes three of them, 28 bytes in fp32, which bounds it. The
native operation scales the gradient and rounds the weight in that same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.ops.optimizer import adamw_update
from megatron_lite.optim.rules import Segments


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of AdamW."""

    beta1: float
    beta2: float
    eps: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, parts: Segments, step: Tensor, *, lr: float, weight_decay: float) -> None:
        """Update weights and moments in place; see `UpdateRule.update`."""
        torch._fused_adamw_(
            parts.weights,
            parts.gradients,
            list(parts.state["exp_avg"]),
            list(parts.state["exp_avg_sq"]),
            [],
            [step] * len(parts.weights),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def update_native(
        self, parts: Segments, step: int, *, clip: Tensor | None, lr: float, weight_decay: float
    ) -> None:
        """Update weights, moments and copies in place; see `UpdateRule.update_native`."""
        first_moments, second_moments = (parts.state[kind] for kind in self.kinds)
        segments = zip(
            parts.weights, parts.gradients, first_moments, second_moments, parts.copies, strict=True
        )
        for weight, gradient, first, second, copy in segments:
            adamw_update(
                weight,
                gradient,
                first,
                second,
                copy,
                clip,
                None,
                step,
                lr,
                self.beta1,
                self.beta2,
                self.eps,
                weight_decay,
            )
