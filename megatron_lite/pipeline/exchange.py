"""What flows between stages: activations forward, their gradients backward.

The table says when a tensor is sent, received or handed over; here it is kept until then.
Shapes follow from the configuration on both sides; none is ever sent. A stage's
graph ends in `leave`: its output goes to the next stage as a plain tensor that this rank
may drop once it is sent, while a 0-dim handle stays behind, whose backward pass takes the
output's gradient from where the next stage has left it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron_lite.mesh.collectives import Work
from megatron_lite.mesh.p2p import Channel, Link, receive_into, send
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.channels import channel_of

Place: TypeAlias = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class MessageShape:
    """What every message is: [length, samples of the microbatch, channels]."""

    length: int
    channels: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Arrival:
    """A tensor that is here, or on its way."""

    tensor: Tensor
    work: Work | None = None

    def take(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass
class _Departures:
    """Messages of one channel under way; the next is sent when the one before has left."""

    work: Work | None = None
    tensor: Tensor | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = self.tensor = None


@dataclass(eq=False)
class Exchange:
    """The messages of one pipeline rank.

    Args:
        links: this rank's channels.
        placement: stage -> pipeline rank.
        message: what every message is.

    The two halves of a pair use it at the same time, each for its own microbatch.
    """

    links: Mapping[Channel, Link]
    placement: tuple[int, ...]
    message: MessageShape
    _waits: dict[int, str] = field(default_factory=dict)  # by thread
    _inputs: dict[Place, _Arrival] = field(default_factory=dict)
    _outputs: dict[Place, Tensor] = field(default_factory=dict)
    _output_gradients: dict[Place, _Arrival] = field(default_factory=dict)
    _input_gradients: dict[Place, Tensor] = field(default_factory=dict)
    _departures: dict[Channel, _Departures] = field(default_factory=dict)

    @property
    def waiting(self) -> str:
        """What this rank waits for, for watchdogs; "" while it waits for nothing."""
        return " and ".join(tuple(self._waits.values()))

    def _wait(self, arrived: Callable[[], Any], what: str) -> Any:
        """Wait; while that lasts, and when it fails, it is known for what."""
        thread = threading.get_ident()
        self._waits[thread] = what
        result = arrived()
        del self._waits[thread]
        return result

    def take_input(self, place: Place) -> Tensor:
        """Wait for a stage's input and give it away."""
        source = self.placement[place[0] - 1]
        return self._take(self._inputs.pop(place), f"the input from pipeline rank {source}")

    def put_output(self, place: Place, output: Tensor) -> None:
        """Keep a stage's output until it is sent or handed over."""
        self._outputs[place] = output

    def take_output_gradient(self, place: Place) -> Tensor:
        """Wait for the gradient of a stage's output and give it away."""
        source = self.placement[place[0] + 1]
        arrival = self._output_gradients.pop(place)
        return self._take(arrival, f"the gradient from pipeline rank {source}")

    def put_input_gradient(self, place: Place, gradient: Tensor) -> None:
        """Keep the gradient of a stage's input until it is sent or handed over."""
        self._input_gradients[place] = gradient

    def send_forward(self, action: Action) -> None:
        """SEND_F: the output of a stage to the next stage's rank."""
        self._send(action, self._outputs.pop(_place(action)))

    def send_backward(self, action: Action) -> None:
        """SEND_B: the gradient of a stage's input to the previous stage's rank."""
        self._send(action, self._input_gradients.pop(_place(action)))

    def receive_forward(self, action: Action, samples: int) -> None:
        """RECV_F: start receiving a stage's input, of so many samples."""
        self._inputs[_place(action)] = self._receive(action, samples)

    def receive_backward(self, action: Action, samples: int) -> None:
        """RECV_B: start receiving the gradient of a stage's output."""
        self._output_gradients[_place(action)] = self._receive(action, samples)

    def hand_forward(self, action: Action) -> None:
        """LOCAL_F: a stage's output becomes the input of the next, on the same rank."""
        stage, microbatch = _place(action)
        self._inputs[stage + 1, microbatch] = _Arrival(self._outputs.pop((stage, microbatch)))

    def hand_backward(self, action: Action) -> None:
        """LOCAL_B: a stage's input gradient becomes the previous stage's output gradient."""
        stage, microbatch = _place(action)
        gradient = self._input_gradients.pop((stage, microbatch))
        self._output_gradients[stage - 1, microbatch] = _Arrival(gradient)

    def finish(self) -> None:
        """Wait for what is still under way at the end of a table.

        Raises:
            RuntimeError: something was kept that nobody took, a defect of the table.
        """
        for channel, departures in self._departures.items():
            self._wait(departures.wait, f"pipeline rank {channel[1]} to receive")
        kept = [
            *(f"input of {place}" for place in self._inputs),
            *(f"output of {place}" for place in self._outputs),
            *(f"output gradient of {place}" for place in self._output_gradients),
            *(f"input gradient of {place}" for place in self._input_gradients),
        ]
        if kept:
            self.clear()
            raise RuntimeError(f"left over after the step: {', '.join(kept)}")

    def clear(self) -> None:
        """Forget everything, after a failure."""
        for kept in (
            self._inputs,
            self._outputs,
            self._output_gradients,
            self._input_gradients,
            self._departures,
        ):
            kept.clear()

    def _take(self, arrival: _Arrival, what: str) -> Tensor:
        tensor: Tensor = self._wait(arrival.take, what)
        return tensor

    def _send(self, action: Action, tensor: Tensor) -> None:
        channel = channel_of(action, self.placement)
        departures = self._departures.setdefault(channel, _Departures())
        self._wait(departures.wait, f"pipeline rank {channel[1]} to receive")
        departures.tensor = tensor.contiguous()
        departures.work = send(departures.tensor, self.links[channel])

    def _receive(self, action: Action, samples: int) -> _Arrival:
        message = self.message
        shape = (message.length, samples, message.channels)
        tensor = torch.empty(shape, dtype=message.dtype, device=message.device)
        link = self.links[channel_of(action, self.placement)]
        return _Arrival(tensor, receive_into(tensor, link))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del grads
        return ctx.gradient(), None


def leave(output: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """End a stage's graph without keeping its output.

    Args:
        output: of the stage, any shape.
        gradient: gives the output's gradient when the backward pass begins.

    Returns:
        A 0-dim handle; its `backward()` starts the stage's backward pass.
    """
    handle: Tensor = _Leave.apply(output, gradient)  # type: ignore[no-untyped-call]
    return handle


def _place(action: Action) -> Place:
    assert action.stage is not None and action.microbatch is not None
    return action.stage, action.microbatch
