"""A rank's microbatches on the device, as the model takes them.

Tokens and labels become [s, b]; the loss mask becomes weights in the accumulation dtype.
The number of valid tokens is counted before any work starts, because losses are divided by
the global count when they arise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.data.loader import Batch


class Placement(Protocol):
    """Where and in which dtype microbatches are wanted."""

    @property
    def device(self) -> torch.device: ...
    @property
    def wide_dtype(self) -> torch.dtype: ...


@dataclass(eq=False)
class Microbatch:
    """One microbatch.

    Attributes:
        tokens, labels: [s, b] int64.
        weights: [s, b] of each target, accumulation dtype.
        valid: 0-dim fp64, sum of the loss mask.
        sample_ids: [b] int64, consumed-sample indices.
        origins: (dataset, row) of each sample.
        valid_per_sample: [b], sums of the loss mask.
        scale: what undoes the averaging of `weights` in sums for the log.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    valid: Tensor
    sample_ids: Tensor
    origins: Sequence[tuple[int, int]]
    valid_per_sample: Tensor
    scale: Tensor

    def average(self) -> None:
        """Make the weights sum to 1 (an all-masked microbatch keeps its zeros)."""
        self.scale = self.valid.clamp(min=1.0)
        self.weights = self.weights / self.scale.to(self.weights.dtype)


def to_device(batches: Sequence[Batch], place: Placement) -> list[Microbatch]:
    """Move a rank's share of a global batch to the device."""
    microbatches = []
    for batch in batches:
        mask = batch.loss_mask.to(place.device, torch.float64)
        microbatches.append(
            Microbatch(
                tokens=batch.tokens.t().contiguous().to(place.device),
                labels=batch.labels.t().contiguous().to(place.device),
                weights=mask.t().to(place.wide_dtype).contiguous(),
                valid=mask.sum(),
                sample_ids=batch.sample_ids.to(place.device),
                origins=batch.origins,
                valid_per_sample=mask.sum(dim=1),
                scale=torch.ones((), dtype=torch.float64, device=place.device),
            )
        )
    return microbatches
