"""The exponential moving average of the weights, sharded as they are.

average <- decay average + (1 - decay) weight after every update, in the masters' dtype; it
starts as the weights that the run starts from. It is state: saved, and evaluated in the
weights' place with `--eval-with-ema`. Frozen parameters are their own average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lite.shard.buffers import FlatBuffers
from megatron_lite.shard.gather import ResidentWeights
from megatron_lite.shard.pieces import StatePiece, state_pieces


class WeightAverage:
    """The average of what one rank owns."""

    def __init__(self, buffers: FlatBuffers, weights: Mapping[int, Tensor], decay: float) -> None:
        """Allocate it; `restart` gives it its first value.

        Args:
            buffers: parameters.
            weights: owned weights, by bucket.
            decay: per update.
        """
        self.decay = decay
        self._buffers, self._weights = buffers, weights
        self.tensors = {i: buffers.zeros(i, buffers.precision.master) for i in weights}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the weights."""
        for index, tensor in self.tensors.items():
            tensor.copy_(self._weights[index])

    @torch.no_grad()
    def update(self) -> None:
        """Follow the weights after an update."""
        averages = list(self.tensors.values())
        weights = [self._weights[index] for index in self.tensors]
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    def state_pieces(self, kind: str) -> Iterator[StatePiece]:
        """Logical pieces, as `kind`."""
        return state_pieces(kind, self.tensors, self._buffers.owned_pieces)

    @contextmanager
    def in_place(self, gathered: ResidentWeights) -> Iterator[None]:
        """Let the parameters be the average inside of the block.

        Costs a copy of the owned parameters for its duration.

        Args:
            gathered: told when owned parameters change.

        Comm: see `gathered.updated`, twice.
        """
        owned = self._buffers.owned_values
        kept = {index: values.clone() for index, values in owned.items()}
        self._exchange(self.tensors, gathered)
        try:
            yield
        finally:
            self._exchange(kept, gathered)

    @torch.no_grad()
    def _exchange(self, source: Mapping[int, Tensor], gathered: ResidentWeights) -> None:
        gathered.settle()
        for index, values in self._buffers.owned_values.items():
            values.copy_(source[index])
        gathered.updated()
        gathered.settle()
