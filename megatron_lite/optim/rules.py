"""What an update rule is: one step on lists of long flat tensors.

A rule owns hyper-parameters, not state: `Optimizer` keeps one flat buffer per state kind
and hands the segments of one optimizer group over. A new optimizer is one more file with
one class, and a line in `recipe.build_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class UpdateRule(Protocol):
    """Elementwise optimizer step."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its state, each of the weights' shape and dtype, 0 at the start."""
        ...

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
        """Update weights and state in place.

        Args:
            weights: 1-D segments, master dtype.
            gradients: the same shapes and dtype, already clipped.
            state: kind -> the same shapes.
            step: 0-dim fp32, number of this update, from 1; on the weights' device.
            lr: learning rate.
            weight_decay: of this group.
        """
        ...

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
        """The same by the native operations: scale, update and round in one pass.

        Args:
            weights: 1-D segments, master dtype.
            gradients: the same shapes and dtype, not clipped; only read.
            state: kind -> the same shapes.
            copies: the same shapes in the compute dtype, receive the rounded weights; None
                where the weights are the parameters.
            step: number of this update, from 1.
            clip: factor of the gradients, one element of the master dtype on their device.
            lr: learning rate.
            weight_decay: of this group.
        """
        ...
