"""The tensors of one rank's buckets: parameters and main gradients, whole and owned.

A stored parameter is a view of its bucket's tensor, so that an optimizer writes all of
them with one operation and a gather fills them with one message. What a rank owns is a
slice of the whole tensor, or, where the whole exists only for a time (gradients from stage
2 on, parameters in stage 3), a tensor of its own. Such whole tensors give their memory
back and get new memory under the same views, so nobody has to find a parameter again.
Invariant: alignment gaps and the padding of shards are zero and stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_lite.config.plan import ParallelShape, PrecisionShape
from megatron_lite.shard.flat import FlatLayout
from megatron_lite.shard.ownership import Ownership
from megatron_lite.shard.pieces import Piece, StatePiece, cut_pieces, find_pieces, state_pieces
from megatron_lite.spec.physical import PhysicalParam


class FlatBuffers:
    """Owns the tensors of all buckets and re-points the parameters into them.

    Attributes:
        values: parameters of whole buckets, compute dtype.
        owned_values: what this rank owns of them.
        gradients: main gradients of whole buckets, accumulation dtype.
        owned_gradients: what this rank owns of them; the global gradients after a step.
        windows: bucket -> what this rank owns.
        pieces: the logical parameters in whole buckets.
        owned_pieces: those in the windows.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Mapping[str, nn.Parameter],
        coordinates: Mapping[str, Mapping[str, int]],
        parallel: ParallelShape,
        precision: PrecisionShape,
        ownership: Ownership,
    ) -> None:
        """Allocate the buckets and move the parameters' present values into them.

        Args:
            layout: of this rank's trained parameters.
            params: by physical name; on one device.
            coordinates: grid name -> this rank's coordinate on it.
            parallel: sizes of the axes.
            precision: dtype of main gradients and masters.
            ownership: what this rank owns.
        """
        self.layout = layout
        self.precision = precision
        self.ownership = ownership
        self.params = {name: params[name] for name in layout.slots}
        self.windows = ownership.windows(layout.buckets)
        self.pieces: tuple[Piece, ...] = find_pieces(layout, coordinates, parallel)
        self.owned_pieces = cut_pieces(self.pieces, layout, ownership, coordinates, parallel)
        self.device = (
            next(iter(self.params.values())).device if self.params else torch.device("cpu")
        )
        self.values: dict[int, Tensor] = {}
        self.owned_values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.owned_gradients: dict[int, Tensor] = {}
        self._gradient_views: dict[str, Tensor] = {}
        self.released: set[int] = set()  # buckets whose parameters have no memory
        for index in range(len(layout.buckets)):
            self._allocate(index)

    def _allocate(self, index: int) -> None:
        """Make a bucket's tensors and point its parameters into them."""
        bucket, window = self.layout.buckets[index], self.windows[index]
        stage = self.ownership.stage if self.ownership.is_cut(bucket) else 0
        owned = slice(window.start, window.stop)
        values = self._zeros(bucket.elements, bucket.key.dtype)
        self._adopt(index, values)
        self.values[index] = values
        self.owned_values[index] = values[owned]
        if stage == 3:
            self.owned_values[index] = values[owned].clone()
            self.release_values(index)
        gradients = self._zeros(bucket.elements, self.precision.main_grad)
        self.gradients[index] = gradients
        for name in bucket.names:  # now: without memory a tensor cannot be sliced
            slot = self.layout.slots[name]
            flat = gradients[slot.start : slot.start + slot.numel]
            self._gradient_views[name] = flat.view(slot.physical.shape)
        if stage >= 2:
            self.owned_gradients[index] = self.zeros(index, self.precision.main_grad)
            release(gradients)
        else:
            self.owned_gradients[index] = gradients[owned]

    def _adopt(self, index: int, values: Tensor) -> None:
        for name in self.layout.buckets[index].names:
            slot, param = self.layout.slots[name], self.params[name]
            flat = values[slot.start : slot.start + slot.numel]
            if param.dtype != flat.dtype or param.shape != slot.physical.shape:
                raise ValueError(
                    f"{name} is {param.dtype} {list(param.shape)}, "
                    f"planned {flat.dtype} {list(slot.physical.shape)}"
                )
            with torch.no_grad():
                flat.view(slot.physical.shape).copy_(param)
            # In-place view: the module's parameter and the bucket are one storage from here.
            param.data = flat.view(slot.physical.shape)

    @property
    def gathered_buckets(self) -> tuple[int, ...]:
        """Buckets whose parameters exist whole only while they are gathered."""
        if self.ownership.stage < 3:
            return ()
        buckets = enumerate(self.layout.buckets)
        return tuple(index for index, bucket in buckets if self.ownership.is_cut(bucket))

    def is_transient(self, index: int) -> bool:
        """Whether the bucket's whole gradient exists only until it is reduced."""
        return self.ownership.stage >= 2 and self.ownership.is_cut(self.layout.buckets[index])

    def release_values(self, index: int) -> None:
        """Give the memory of gathered parameters back."""
        release(self.values[index])
        self.released.add(index)

    def restore_values(self, index: int) -> None:
        """Give the parameters of a bucket memory; its contents are undefined."""
        restore(self.values[index])
        self.released.discard(index)

    def zeros(self, index: int, dtype: str) -> Tensor:
        """A further tensor for what is owned of a bucket: masters, moments."""
        return self._zeros(self.windows[index].elements, dtype)

    def _zeros(self, elements: int, dtype: str) -> Tensor:
        return torch.zeros(elements, dtype=getattr(torch, dtype), device=self.device)

    def gradient_of(self, name: str) -> Tensor:
        """Main gradient of a stored parameter in the whole bucket, a view in its shape."""
        return self._gradient_views[name]

    def gradient_pieces(self) -> Iterator[StatePiece]:
        """Owned logical main gradients, kind "grad": after `finish` the global gradients."""
        return state_pieces("grad", self.owned_gradients, self.owned_pieces)

    def value_pieces(self) -> Iterator[StatePiece]:
        """Logical parameters in the compute dtype, kind "param": whole, or what is owned
        where they are not always there."""
        if self.gathered_buckets:
            return state_pieces("param", self.owned_values, self.owned_pieces)
        return state_pieces("param", self.values, self.pieces)


def release(tensor: Tensor) -> None:
    """Give a tensor's memory back; it and its views keep their shapes."""
    tensor.untyped_storage().resize_(0)


def restore(tensor: Tensor) -> None:
    """Give a released tensor new memory of undefined contents."""
    storage = tensor.untyped_storage()
    if storage.size() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())


def is_released(tensor: Tensor) -> bool:
    """Whether a tensor has no memory now."""
    return tensor.untyped_storage().size() == 0


def trained(
    physicals: Sequence[PhysicalParam], params: Mapping[str, nn.Parameter]
) -> tuple[PhysicalParam, ...]:
    """The parameters with `requires_grad`; frozen ones have no gradient, state or decay."""
    return tuple(p for p in physicals if params[p.name].requires_grad)
