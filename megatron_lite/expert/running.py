"""Counts of the experts over the microbatches of a step so far: Megatron's global balance.

Every microbatch's loss compares with the mean of what all ranks of the stage have counted
up to it, so its value depends on how many microbatches there are and on their order: the one
loss here that differs between layouts. The global loss of the step before does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.mesh import collectives
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import MicrobatchContext


class RunningCounts:
    """One layer's running mean; starts anew with every step.

    Args:
        stage: the ranks that hold other tokens of the layer.
    """

    def __init__(self, stage: Group) -> None:
        self._stage = stage
        self._step = -1
        self._total: Tensor | None = None
        self._shares: dict[int, Tensor] = {}

    def share(self, own: Tensor, mb: MicrobatchContext) -> Tensor:
        """Return each expert's share of the choices so far, [E] fp64.

        Args:
            own: [E] int64, choices of this rank's tokens of the microbatch. A layer that
                runs again for the same microbatch (recomputation) is not counted again.

        Comm: one all-reduce over stage of E int64, where the microbatch is new.
        """
        if mb.step != self._step:
            self._step, self._total = mb.step, None
            self._shares.clear()
        if mb.microbatch not in self._shares:
            counts = own.clone()
            collectives.all_reduce(counts, self._stage)
            self._total = counts if self._total is None else self._total + counts
            self._shares[mb.microbatch] = self._total / self._total.sum().to(torch.float64)
        return self._shares[mb.microbatch]
