"""The opening reduction of a step: how many valid tokens the global batch has.

Started before any work and waited for where the first loss arises, so that it hides behind
the first microbatch's forward pass. Losses are divided by it when they arise: the gradient
is exact in every layout, and a microbatch without valid tokens is nothing special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import Work, all_reduce
from megatron_lite.mesh.groups import Group


class Denominators(Mapping[str, Tensor]):
    """Loss term -> 0-dim global denominator, waiting at the first access.

    Attributes:
        sums: [terms] fp64, global once waited for, before the clamp.
    """

    def __init__(self, terms: Sequence[str], sums: Tensor, work: Work | None) -> None:
        self.sums = sums
        self._terms = tuple(terms)
        self._work = work
        self._values: dict[str, Tensor] = {}

    def __getitem__(self, term: str) -> Tensor:
        if not self._values:
            if self._work is not None:
                self._work.wait()
            # A batch without valid tokens has loss and gradient 0, not 0/0.
            self._values = dict(zip(self._terms, self.sums.clamp(min=1.0).unbind(), strict=True))
        return self._values[term]

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)


def start_denominators(local_sums: Mapping[str, Tensor], dp_cp_group: Group) -> Denominators:
    """Start the step's opening reduction.

    Args:
        local_sums: loss term -> 0-dim fp64 sum of the loss weights of this rank's samples.
        dp_cp_group: ranks that hold other parts of the global batch.

    Comm: one asynchronous all-reduce of len(local_sums) fp64 elements over dp_cp.
    """
    sums = torch.stack(list(local_sums.values()))
    work = all_reduce(sums, dp_cp_group, async_op=True)
    return Denominators(tuple(local_sums), sums, work)
