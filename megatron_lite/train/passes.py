"""Forward and backward passes of a step's microbatches through the stages of this rank.

One handler per kind of action; which stage and microbatch comes when is the table's
business. A pass keeps what its backward needs under (stage, microbatch) and nothing else:
the graph, the stage's input whose gradient is wanted, and after an I the weight gradients
that its W will compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_lite.microbatch import (
    GradientSink,
    LossSink,
    MicrobatchContext,
    Stopwatch,
    WeightGradientStore,
    WeightSource,
)
from megatron_lite.model.gpt import GPTStage
from megatron_lite.pipeline.actions import Action, Kind, singles_of
from megatron_lite.pipeline.exchange import Exchange, Place, leave
from megatron_lite.pipeline.runner import Handler
from megatron_lite.train.microbatches import Microbatch


@dataclass(frozen=True, eq=False)
class PassOptions:
    """What all passes of a step share; see `MicrobatchContext`.

    Attributes:
        training: with dropout.
        sink: where weight gradients go; None where nothing is differentiated.
        weights: who brings parameters that are not always there; None where all are.
        timers: who times parts of a pass; None: nobody.
    """

    step: int
    training: bool
    seed: int
    positions: Tensor
    full_positions: Tensor
    native: bool
    sink: GradientSink | None
    weights: WeightSource | None = None
    timers: Stopwatch | None = None
    keep_activations: bool = False


@dataclass(frozen=True, eq=False)
class _Pending:
    """A forward pass that waits for its backward."""

    handle: Tensor  # 0-dim: the loss, or what `leave` has left
    source: Tensor | None  # the stage's input where its gradient is wanted
    wgrads: WeightGradientStore


@dataclass(eq=False)
class Passes:
    """The passes of one step, or of one global batch of an evaluation.

    Attributes:
        microbatches: of this data-parallel rank, in order.
        denominators: loss term -> global denominator.
        sinks: what the passes have told, by (stage, microbatch).
    """

    stage: GPTStage
    exchange: Exchange
    microbatches: Sequence[Microbatch]
    denominators: Mapping[str, Tensor]
    options: PassOptions
    sinks: dict[Place, LossSink] = field(default_factory=dict)
    _pending: dict[Place, _Pending] = field(default_factory=dict)
    _deferred: dict[Place, WeightGradientStore] = field(default_factory=dict)

    def handlers(self) -> dict[Kind, Handler]:
        """Handlers of all kinds but those that end a step."""
        exchange = self.exchange
        return {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.input_gradient,
            Kind.W: self.weight_gradient,
            Kind.SEND_F: exchange.send_forward,
            Kind.RECV_F: lambda action: exchange.receive_forward(action, self._samples(action)),
            Kind.LOCAL_F: exchange.hand_forward,
            Kind.SEND_B: exchange.send_backward,
            Kind.RECV_B: lambda action: exchange.receive_backward(action, self._samples(action)),
            Kind.LOCAL_B: exchange.hand_backward,
        }

    def forward(self, action: Action) -> None:
        """F: run a stage on one microbatch."""
        place = stage, number = _place(action)
        part, microbatch = self.stage.stage_parts[stage], self.microbatches[number]
        has_gradients = self.options.sink is not None
        source = microbatch.tokens if part.embedding else self.exchange.take_input(place)
        if has_gradients and not part.embedding:
            source.requires_grad_()
        context = self._context(place, microbatch)
        output = self.stage.run_part(part, source, microbatch.labels, context)
        self.sinks[place] = context.losses
        if not part.head:
            self.exchange.put_output(place, output.detach())
        if has_gradients:
            assert context.wgrads is not None
            handle = (
                output
                if part.head
                else leave(output, partial(self.exchange.take_output_gradient, place))
            )
            wanted = None if part.embedding else source
            self._pending[place] = _Pending(handle, wanted, context.wgrads)
        else:
            self._end_pass(place)

    def backward(self, action: Action) -> None:
        """B: input and weight gradients; a loss's gradient must start with exactly 1."""
        self._backward(_place(action))

    def input_gradient(self, action: Action) -> None:
        """I: the input gradient, and what cannot be deferred."""
        place = _place(action)
        wgrads = self._pending[place].wgrads
        wgrads.defer()
        self._backward(place)
        self._deferred[place] = wgrads

    def weight_gradient(self, action: Action) -> None:
        """W: the weight gradients that I has left."""
        self._deferred.pop(_place(action)).flush()

    def _samples(self, action: Action) -> int:
        return self.microbatches[_place(action)[1]].sample_ids.numel()

    def _backward(self, place: Place) -> None:
        pending = self._pending.pop(place)
        pending.handle.backward()  # type: ignore[no-untyped-call]
        if pending.source is not None:
            assert pending.source.grad is not None
            self.exchange.put_input_gradient(place, pending.source.grad)
        self._end_pass(place)

    def _end_pass(self, place: Place) -> None:
        if self.options.weights is not None:
            self.options.weights.end_pass(place)

    def _context(self, place: Place, microbatch: Microbatch) -> MicrobatchContext:
        options = self.options
        return MicrobatchContext(
            step=options.step,
            microbatch=place[1],
            stage=place[0],
            training=options.training,
            seed=options.seed,
            sample_ids=microbatch.sample_ids,
            positions=options.positions,
            full_positions=options.full_positions,
            loss_weights=microbatch.weights,
            denominators=self.denominators,
            wgrads=None if options.sink is None else WeightGradientStore(options.sink),
            keep_activations=options.keep_activations,
            native=options.native,
            weights=options.weights,
            timers=options.timers,
        )


def once(calls: int, handler: Handler) -> Handler:
    """A handler of a rank's stages whose work is one: done at the last of so many calls."""
    left = [calls]

    def run(action: Action) -> None:
        left[0] -= 1
        if left[0] == 0:
            handler(action)

    return run


def backward_passes(actions: Sequence[Action]) -> list[int]:
    """Stages in the order in which a rank completes their weight gradients."""
    ends = (Kind.B, Kind.W)
    return [a.stage for a in singles_of(actions) if a.kind in ends and a.stage is not None]


def loss_sums(sinks: Mapping[Place, LossSink], term: str) -> dict[int, Tensor]:
    """Undivided sums of a loss term by microbatch, where this rank computed losses."""
    return {place[1]: sink.sums[term] for place, sink in sinks.items() if term in sink.sums}


def no_loss(device: torch.device) -> Tensor:
    """The share of a rank without losses in a sum over ranks: 0-dim fp64."""
    return torch.zeros((), dtype=torch.float64, device=device)


def _place(action: Action) -> Place:
    assert action.stage is not None and action.microbatch is not None
    return action.stage, action.microbatch
