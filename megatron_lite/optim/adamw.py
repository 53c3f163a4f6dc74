"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), as Megatron's `--optimizer adam`.

Decoupled decay w -= lr wd w, then Adam's update with bias correction and eps outside the
root. torch's fused kernel makes one pass over memory: per element it reads weight,
gradient and both moments and writes three of them, 28 bytes in fp32, which bounds it. The
native operation scales the gradient and rounds the weight in that same pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.ops.optimizer import adamw_update


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

    def update(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        step: Tensor,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update weights and moments in place; see `UpdateRule.update`."""
        torch._fused_adamw_(
            list(weights),
            list(gradients),
            list(state["exp_avg"]),
            list(state["exp_avg_sq"]),
            [],
            [step] * len(weights),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def update_native(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        copies: Sequence[Tensor | None],
        step: int,
        *,
        clip: Tensor | None,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update weights, moments and copies in place; see `UpdateRule.update_native`."""
        segments = zip(
            weights, gradients, state["exp_avg"], state["exp_avg_sq"], copies, strict=True
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
