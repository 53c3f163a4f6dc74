"""What an update rule is: one step on lists of long flat tensors.

A rule owns hyper-parameters, not state: `Optimizer` keeps one flat buffer per state kind
and hands the segments of one optimizer group over. A new optimizer is one more file with
one class, and a line in `recipe.build_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """What is updated at once; everything in lists of as many 1-D tensors, of equal lengths.

    Attributes:
        weights: master dtype.
        gradients: main gradient dtype.
        state: by kind.
        copies: in the compute dtype, receive the rounded weights; None where the weights are
            the parameters.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    state: Mapping[str, Sequence[Tensor]]
    copies: list[Tensor | None]


class UpdateRule(Protocol):
    """Elementwise optimizer step."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its state, each of the weights' shape and dtype, 0 at the start."""
        ...

    def update(self, parts: Segments, step: Tensor, *, lr: float, weight_decay: float) -> None:
        """Update weights and state in place; copies are left.

        Args:
            parts: with gradients in the weights' dtype, already clipped.
            step: 0-dim fp32, number of this update, from 1; on the weights' device.
            lr: learning rate.
            weight_decay: of this group.
        """
        ...

    def update_native(
        self, parts: Segments, step: int, *, clip: Tensor | None, lr: float, weight_decay: float
    ) -> None:
        """The same by the native operations: scale, update and round in one pass.

        Args:
            parts: with gradients that are not clipped; they are only read.
            step: number of this update, from 1.
            clip: factor of the gradients, one element of the master dtype on their device.
            lr: learning rate.
            weight_decay: of this group.
        """
        ...
