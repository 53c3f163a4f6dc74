"""The flat tensors of one rank: parameters and main gradients, by buffer key.

A stored parameter is a view of its flat parameter buffer, so that an optimizer writes all
of them with one operation and a gather could fill them with one message. Invariant:
alignment gaps of every buffer are zero and stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_lite.config.plan import ParallelShape, PrecisionShape
from megatron_lite.shard.flat import BufferKey, FlatLayout
from megatron_lite.shard.pieces import Piece, StatePiece, find_pieces, state_pieces
from megatron_lite.spec.physical import PhysicalParam


class FlatBuffers:
    """Owns the flat parameter buffers and re-points the parameters into them.

    Attributes:
        values: parameters, compute dtype.
        gradients: main gradients, accumulation dtype.
        pieces: the logical parameters inside.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Mapping[str, nn.Parameter],
        coordinates: Mapping[str, Mapping[str, int]],
        parallel: ParallelShape,
        precision: PrecisionShape,
    ) -> None:
        """Allocate the buffers and move the parameters' present values into them.

        Args:
            layout: of this rank's trained parameters.
            params: by physical name; on one device.
            coordinates: grid name -> this rank's coordinate on it.
            parallel: sizes of the axes.
            precision: dtype of main gradients and masters.
        """
        self.layout = layout
        self.precision = precision
        self.params = {name: params[name] for name in layout.slots}
        self.pieces: tuple[Piece, ...] = find_pieces(layout, coordinates, parallel)
        self.device = (
            next(iter(self.params.values())).device if self.params else torch.device("cpu")
        )
        self.values = {key: self.zeros(key, key.dtype) for key in layout.sizes}
        self.gradients = {key: self.zeros(key, precision.main_grad) for key in layout.sizes}
        for name, slot in layout.slots.items():
            param = self.params[name]
            flat = self.values[slot.key][slot.start : slot.start + slot.numel]
            if param.dtype != flat.dtype or param.shape != slot.physical.shape:
                raise ValueError(
                    f"{name} is {param.dtype} {list(param.shape)}, "
                    f"planned {flat.dtype} {list(slot.physical.shape)}"
                )
            with torch.no_grad():
                flat.copy_(param.reshape(-1))
            # In-place view: the module's parameter and the buffer are one storage from here.
            param.data = flat.view(slot.physical.shape)

    def zeros(self, key: BufferKey, dtype: str) -> Tensor:
        """A further flat buffer for a key: masters, moments."""
        return torch.zeros(self.layout.sizes[key], dtype=getattr(torch, dtype), device=self.device)

    def gradient_of(self, name: str) -> Tensor:
        """Main gradient of a stored parameter, a view in its shape."""
        slot = self.layout.slots[name]
        flat = self.gradients[slot.key][slot.start : slot.start + slot.numel]
        return flat.view(slot.physical.shape)

    def gradient_pieces(self) -> Iterator[StatePiece]:
        """Logical main gradients, kind "grad": after `finish` the global gradients."""
        return state_pieces("grad", self.gradients, self.pieces)


def trained(
    physicals: Sequence[PhysicalParam], params: Mapping[str, nn.Parameter]
) -> tuple[PhysicalParam, ...]:
    """The parameters with `requires_grad`; frozen ones have no gradient, state or decay."""
    return tuple(p for p in physicals if params[p.name].requires_grad)
