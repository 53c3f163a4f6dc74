"""Buffers of the host between a device and state that is updated on the host.

Two slots, so that while the host updates one chunk the next one's gradients come in and the
last one's parameters go out, on two streams. Who touches a slot waits for the event behind
its last copy, never for the device. With the parameters on the CPU the same calls are plain
copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for one chunk, on the host; pinned where a device fills it.

    Attributes:
        gradient: as it comes.
        weight: where the parameters themselves are updated.
        copy: rounded parameters, where masters are.
    """

    gradient: Tensor
    weight: Tensor
    copy: Tensor


class Staging:
    """Two slots and the streams that fill and empty them."""

    def __init__(
        self,
        device: torch.device,
        elements: int,
        *,
        gradient: torch.dtype,
        master: torch.dtype,
        compute: torch.dtype,
    ) -> None:
        """Allocate the slots.

        Args:
            device: of gradients and parameters.
            elements: of a chunk, at most.
            gradient, master, compute: dtypes.
        """
        pinned = device.type == "cuda"
        narrow = compute != master

        def room(dtype: torch.dtype, wanted: bool = True) -> Tensor:
            return torch.empty(elements if wanted else 0, dtype=dtype, pin_memory=pinned)

        self.slots = [
            Slot(room(gradient), room(master, not narrow), room(compute, narrow)) for _ in range(2)
        ]
        self._device = device
        self._fetching = _stream(device)
        self._sending = _stream(device)
        self._fetched: list[torch.cuda.Event | None] = [None, None]
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def begin(self) -> None:
        """Let the copies begin behind what the device is doing now."""
        for stream in (self._fetching, self._sending):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, number: int, gradient: Tensor, weight: Tensor | None) -> None:
        """Start to bring a chunk into slot `number` mod 2.

        The host is done with what the slot brought before.
        """
        slot = self.slots[number % 2]
        sent = self._sent[number % 2]
        with _on(self._fetching):
            if weight is not None:
                # The weights of two chunks before may still be on their way out of the slot.
                if self._fetching is not None and sent is not None:
                    self._fetching.wait_event(sent)
                slot.weight[: len(weight)].copy_(weight, non_blocking=True)
            slot.gradient[: len(gradient)].copy_(gradient, non_blocking=True)
            self._fetched[number % 2] = _mark(self._fetching)

    def wait_fetched(self, number: int) -> Slot:
        """The slot, once its chunk is there."""
        event = self._fetched[number % 2]
        if event is not None:
            event.synchronize()
        return self.slots[number % 2]

    def wait_sent(self, number: int) -> None:
        """Return when what the slot sent last is on the device."""
        event = self._sent[number % 2]
        if event is not None:
            event.synchronize()

    def send(self, number: int, source: Tensor, target: Tensor) -> None:
        """Start to bring parameters of slot `number` mod 2 to the device."""
        with _on(self._sending):
            target.copy_(source, non_blocking=True)
            self._sent[number % 2] = _mark(self._sending)

    def end(self) -> None:
        """Let the device go on behind the last parameters; the host does not wait."""
        if self._sending is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._sending)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return stream.record_event() if stream is not None else None
