"""Elementwise updates chunk by chunk: of state elsewhere, or kept in narrower dtypes.

A chunk is a short run of one optimizer group. Its narrow moments are widened, it is updated
by the same operations as ever, and rounded back, so a run costs a chunk of wide memory
however long the state is. Where state lies on the host and parameters on a device, gradients
come and parameters go through two slots (`staging.py`); where it lies in a file, the next
chunk is read ahead and the last one let go. Invariant: elements are independent, so chunks
change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.optim.elementwise import ElementwiseUpdates, GroupTensors
from megatron_lite.optim.groups import ParamGroup, StepRates
from megatron_lite.optim.rules import Segments, UpdateRule
from megatron_lite.optim.staging import Staging
from megatron_lite.optim.state_home import StateHome
from megatron_lite.shard.buffers import FlatBuffers

# Elements. Long enough that starting an operation or a read costs nothing, short enough
# that three chunks of everything are a few tens of MiB.
CHUNK = 2**20
# Widened moments are read and written at once: they should still be in the cache.
CHUNK_IN_PLACE = 2**16


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of one group that is updated at once; all tensors are as long."""

    rule: UpdateRule
    group: ParamGroup
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    copy: Tensor | None  # the parameters where `weight` is a master

    @property
    def stored(self) -> list[Tensor]:
        """What lies in the state's home."""
        return [*self.state.values(), *([self.weight] if self.copy is not None else [])]


def cut_chunks(parts: Sequence[tuple[UpdateRule, GroupTensors]], elements: int) -> Iterator[Chunk]:
    """Cut groups into chunks of at most `elements`, in order."""
    for rule, tensors in parts:
        for index, weight in enumerate(tensors.weights):
            for start in range(0, weight.numel(), elements):
                part, copy = slice(start, start + elements), tensors.copies[index]
                yield Chunk(
                    rule,
                    tensors.group,
                    weight[part],
                    tensors.gradients[index][part],
                    {kind: held[index][part] for kind, held in tensors.state.items()},
                    None if copy is None else copy[part],
                )


class ChunkedUpdates:
    """Updates groups whose state has one home by rules of the kind `UpdateRule`."""

    def __init__(
        self,
        parts: Sequence[tuple[UpdateRule, GroupTensors]],
        buffers: FlatBuffers,
        home: StateHome,
        *,
        native: bool,
        is_away: bool,
    ) -> None:
        """Cut the chunks and allocate what one of them needs.

        Args:
            parts: groups with their rules.
            buffers: of this rank.
            home: of the state.
            native: by the native operations.
            is_away: the state is elsewhere than the parameters; else only narrow.
        """
        # On a device a launch costs more than what a cache saves.
        in_place = CHUNK if buffers.device.type == "cuda" else CHUNK_IN_PLACE
        elements = home.chunk_elements or (CHUNK if is_away else in_place)
        self._chunks = list(cut_chunks(parts, elements))
        self._home, self._native = home, native
        self._master = getattr(torch, buffers.precision.master)
        self._device = torch.device("cpu") if is_away else buffers.device
        self._step = torch.zeros((), dtype=torch.float32, device=self._device)
        longest = max((len(chunk.gradient) for chunk in self._chunks), default=0)
        narrow = {
            kind
            for chunk in self._chunks
            for kind, tensor in chunk.state.items()
            if tensor.dtype != self._master
        }
        self._wide = {
            kind: torch.empty(longest, dtype=self._master, device=self._device)
            for kind in sorted(narrow)
        }
        self._staging: Staging | None = None
        if is_away and home.is_staged and self._chunks:
            copies = [chunk.copy for chunk in self._chunks if chunk.copy is not None]
            self._staging = Staging(
                buffers.device,
                longest,
                gradient=getattr(torch, buffers.precision.main_grad),
                master=self._master,
                compute=copies[0].dtype if copies else self._master,
            )

    def step(self, update: int, rates: StepRates, clip: float | Tensor) -> None:
        """Update weights, state and parameters.

        Args:
            update: its number, from 1.
            rates: of this update.
            clip: factor of the gradients. Afterwards they are scaled, or not.
        """
        self._step.fill_(update)
        scale: Tensor | None = None
        if isinstance(clip, Tensor) or clip != 1.0:
            scale = torch.as_tensor(clip, dtype=self._master, device=self._device)
        if self._staging is not None:
            self._staging.begin()
        self._prepare(0)
        for number, chunk in enumerate(self._chunks):
            self._prepare(number + 1)
            weight, gradient, copy = self._bring(number, chunk)
            lr, weight_decay = rates.of(chunk.group)
            self._update(chunk, weight, gradient, copy, update, scale, lr, weight_decay)
            self._take_back(number, chunk, weight, copy)
            self._home.leave(chunk.stored)
        if self._staging is not None:
            self._staging.end()

    def _prepare(self, number: int) -> None:
        """Begin to bring a chunk; nothing after the last."""
        if number >= len(self._chunks):
            return
        chunk = self._chunks[number]
        self._home.expect(chunk.stored)
        if self._staging is not None:
            moved = chunk.weight if chunk.copy is None else None
            self._staging.fetch(number, chunk.gradient, moved)

    def _bring(self, number: int, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weight, gradient and room for the rounded weight, where the update happens."""
        if self._staging is None:
            return chunk.weight, chunk.gradient, chunk.copy
        length = len(chunk.gradient)
        slot = self._staging.wait_fetched(number)
        if chunk.copy is None:
            return slot.weight[:length], slot.gradient[:length], None
        self._staging.wait_sent(number)  # its room for rounded weights is free
        return chunk.weight, slot.gradient[:length], slot.copy[:length]

    def _take_back(self, number: int, chunk: Chunk, weight: Tensor, copy: Tensor | None) -> None:
        """Bring the new parameters to where they are read."""
        if self._staging is None:
            return
        if chunk.copy is None:
            self._staging.send(number, weight, chunk.weight)
        else:
            assert copy is not None
            self._staging.send(number, copy, chunk.copy)

    def _update(
        self,
        chunk: Chunk,
        weight: Tensor,
        gradient: Tensor,
        copy: Tensor | None,
        update: int,
        scale: Tensor | None,
        lr: float,
        weight_decay: float,
    ) -> None:
        state = {kind: [self._widen(kind, tensor)] for kind, tensor in chunk.state.items()}
        if self._native:
            if gradient.is_cuda:
                gradient = gradient.to(weight.dtype)  # all that the kernels take there
            parts = Segments([weight], [gradient], state, [copy])
            chunk.rule.update_native(parts, update, clip=scale, lr=lr, weight_decay=weight_decay)
        else:
            gradient = gradient.to(weight.dtype)
            if scale is not None:
                gradient.mul_(scale)
            parts = Segments([weight], [gradient], state, [copy])
            chunk.rule.update(parts, self._step, lr=lr, weight_decay=weight_decay)
            if copy is not None:
                copy.copy_(weight)
        for kind, tensor in chunk.state.items():
            if kind in self._wide:
                tensor.copy_(state[kind][0])

    def _widen(self, kind: str, tensor: Tensor) -> Tensor:
        """State in the masters' dtype: itself, or a copy that is rounded back."""
        if kind not in self._wide:
            return tensor
        return self._wide[kind][: len(tensor)].copy_(tensor)


def build_updates(
    resident: Sequence[tuple[UpdateRule, GroupTensors]],
    away: Sequence[tuple[UpdateRule, GroupTensors]],
    buffers: FlatBuffers,
    home: StateHome,
    *,
    native: bool,
    native_away: bool,
) -> list[ElementwiseUpdates | ChunkedUpdates]:
    """The updates of groups by where their state is.

    Args:
        resident: groups with their rules, state beside the parameters.
        away: groups whose state the home keeps elsewhere.
        buffers: of this rank.
        home: of the state.
        native: by native operations on the parameters' device.
        native_away: by those of the host.
    """
    precision = buffers.precision
    is_narrow = bool(precision.moments) or precision.main_grad != precision.master
    found: list[ElementwiseUpdates | ChunkedUpdates] = []
    if is_narrow and resident:
        found.append(ChunkedUpdates(resident, buffers, home, native=native, is_away=False))
    elif resident:
        found.append(ElementwiseUpdates(resident, buffers.device, native))
    if away:
        found.append(ChunkedUpdates(away, buffers, home, native=native_away, is_away=True))
    return found
