"""The opening reduction of a step: how many valid tokens the global batch has.

Started before any work and waited for where the first loss arises, so that it hides behind
the first microbatch's forward pass. Losses are divided by it when they arise: the gradient
is exact in every layout, and a microbatch without valid tokens is nothing special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.config.plan import ModelShape
from megatron_lite.mesh.collectives import Work, all_reduce
from megatron_lite.mesh.groups import Group
from megatron_lite.model.multi_token import further_weights, term_name
from megatron_lite.train.microbatches import Microbatch

LM = "lm"
MOE = "moe"


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


def local_counts(
    model: ModelShape, microbatches: Sequence[Microbatch], cp_size: int
) -> dict[str, Tensor]:
    """Count what this rank adds to the denominator of every loss term of the model.

    Args:
        microbatches: of this rank, at least one.
        cp_size: ranks that hold parts of each.

    Returns:
        Loss term -> 0-dim fp64.
    """
    counts = {LM: torch.stack([microbatch.valid for microbatch in microbatches]).sum()}
    if model.experts is not None:
        # The losses of the router are means over the microbatches of the global batch.
        counts[MOE] = torch.full_like(counts[LM], len(microbatches) / cp_size)
    for depth in range(model.mtp_depths):
        valid = [further_weights(m.weights, depth).sum() for m in microbatches]
        counts[term_name(depth)] = torch.stack(valid).sum().to(counts[LM].dtype)
    return counts


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
