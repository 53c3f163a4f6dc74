"""What flows through one microbatch: the context that every layer receives.

The context is immutable and is captured by autograd functions and recomputation alike, so
a recomputed region sees exactly what the first pass saw. Weight gradients leave through
`WeightGradientStore`, never through autograd's accumulation: whoever computes one writes it
into the main gradient and reports it, which is what makes input and weight gradients
separable (zero-bubble schedules) and readiness an event (bucketed reductions).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn


class GradientSink(Protocol):
    """Owner of the main gradients."""

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Buffer of the parameter's shape, in the accumulation dtype; add in place."""
        ...

    def written(self, param: nn.Parameter) -> None:
        """Report that one use-site's contribution of one microbatch is complete."""
        ...


class WeightSource(Protocol):
    """Owner of parameters that are whole only around their use.

    Use-sites are the spec's; a pass is a (stage, microbatch), which holds what it uses.
    """

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has to announce itself."""
        ...

    def before_forward(
        self, uses: tuple[str, ...], pass_id: Hashable, *, backward_next: bool = False
    ) -> None:
        """Return when the parameters of these use-sites are there.

        Args:
            uses: in forward order.
            pass_id: of stage and microbatch.
            backward_next: behind them the pass turns back.
        """
        ...

    def after_forward(self, uses: tuple[str, ...], pass_id: Hashable, *, again: bool) -> None:
        """The forward pass is through; `again`: its backward pass will need them."""
        ...

    def before_backward(self, uses: tuple[str, ...], pass_id: Hashable) -> None:
        """Return when the parameters of these use-sites are there, for the gradients."""
        ...

    def after_backward(self, uses: tuple[str, ...], pass_id: Hashable) -> None:
        """The backward pass through these use-sites is over."""
        ...

    def end_pass(self, pass_id: Hashable) -> None:
        """Nothing of a pass is needed any more."""
        ...


class Stopwatch(Protocol):
    """Who adds up the seconds of named parts of a step."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Time a block."""
        ...


class WeightGradientStore:
    """Takes the weight gradients of one microbatch in one stage.

    Immediate by default. Deferred (`deferred=True`, or from `defer` on), computations queue
    in the order of the backward pass until `flush`, which is the W action of a schedule; a
    parameter that is used several times has several entries.
    """

    def __init__(self, sink: GradientSink, deferred: bool = False) -> None:
        self._sink = sink
        self._deferred = deferred
        self._queue: list[tuple[nn.Parameter, Callable[[Tensor], object]]] = []

    def put(
        self, param: nn.Parameter, accumulate: Callable[[Tensor], object], deferrable: bool = False
    ) -> None:
        """Add one contribution.

        Args:
            param: the parameter; frozen ones (`requires_grad` False) are skipped.
            accumulate: adds the contribution to the main gradient it is given.
            deferrable: a GEMM that a W action may run later; everything else runs now.
        """
        if not param.requires_grad:
            return
        if self._deferred and deferrable:
            self._queue.append((param, accumulate))
        else:
            self._run(param, accumulate)

    def defer(self) -> None:
        """Leave what can wait to `flush`: the backward pass that follows is an I."""
        self._deferred = True

    def main_grad(self, param: nn.Parameter) -> Tensor | None:
        """Main gradient for an operation that adds piece by piece; None when frozen.

        Such an operation calls `written` once when its last piece is in.
        """
        return self._sink.main_grad(param) if param.requires_grad else None

    def written(self, param: nn.Parameter) -> None:
        """Report a contribution that was added through `main_grad`."""
        if param.requires_grad:
            self._sink.written(param)

    def flush(self) -> None:
        """Run the deferred contributions in the order they arose."""
        queue, self._queue = self._queue, []
        for param, accumulate in queue:
            self._run(param, accumulate)

    def _run(self, param: nn.Parameter, accumulate: Callable[[Tensor], object]) -> None:
        with torch.no_grad():
            accumulate(self._sink.main_grad(param))
        self._sink.written(param)


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """What one MoE layer did with this rank's tokens of one microbatch; device tensors.

    Attributes:
        counts: [e] int64, how often each expert was chosen, before dropping.
        dropped: [e] int64, choices that went nowhere, of the expert that was chosen.
        rerouted: 0-dim int64, choices that went to another expert than the one chosen.
        entropy: 0-dim, sum over tokens of the entropy of their scores, in nats.
        losses: term ("aux_loss", "z_loss", ...) -> 0-dim, the part of these tokens in the
            microbatch's value, coefficient included; parts add up over the microbatch's ranks.
    """

    counts: Tensor
    dropped: Tensor
    rerouted: Tensor
    entropy: Tensor
    losses: Mapping[str, Tensor]


class LossSink:
    """Collects the unscaled sums of one microbatch's loss terms for the log.

    `add` keeps 0-dim tensors; nothing is synchronised until the step reads them. `routing`
    holds one record per MoE layer, set and not added: recomputation runs a layer twice; and so
    `dispatched`, the bytes that this rank sent to other ranks' experts in a forward pass.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.per_sample: dict[str, Tensor] = {}
        self.activations: dict[str, Tensor] = {}
        self.routing: dict[int, RoutingRecord] = {}
        self.dispatched: dict[int, int] = {}

    def add(self, term: str, value: Tensor) -> None:
        """Add a 0-dim sum of a loss term."""
        self.sums[term] = self.sums[term] + value if term in self.sums else value


@dataclass(frozen=True)
class MicrobatchContext:
    """Everything a layer may need to know about the microbatch it works on.

    Attributes:
        step: zero-based step.
        microbatch: index inside the step, of this data-parallel rank.
        stage: pipeline stage.
        training: dropout and gradients are on.
        seed: the run's seed, key of the stateless generator.
        sample_ids: [b] int64, consumed-sample index of each sample.
        positions: [s_local] int64, logical positions of this rank's slice of the sequence
            outside tensor regions (sequence parallel).
        full_positions: [s] int64, logical positions inside tensor regions.
        loss_weights: [s, b], weight of each target, 0 where it does not count; None where
            there is no loss.
        denominators: loss term -> 0-dim tensor, the global denominator of the step.
        wgrads: where weight gradients go; None in evaluation.
        weights: who brings parameters that are not always there; None where all are.
        losses: where loss sums go.
        keep_activations: debug dump of activations is on.
        native: operations use their native implementation on this device.
        timers: who times parts of the pass; None: nobody.
    """

    step: int
    microbatch: int
    stage: int
    training: bool
    seed: int
    sample_ids: Tensor
    positions: Tensor
    full_positions: Tensor
    loss_weights: Tensor | None
    denominators: Mapping[str, Tensor]
    wgrads: WeightGradientStore | None
    losses: LossSink = field(default_factory=LossSink)
    keep_activations: bool = False
    native: bool = False
    weights: WeightSource | None = None
    timers: Stopwatch | None = None

    def measure(self, timer: str) -> AbstractContextManager[None]:
        """Time a block under a name of `STEP_TIMERS`, where someone does."""
        return nullcontext() if self.timers is None else self.timers.measure(timer)

    @property
    def pass_id(self) -> tuple[int, int]:
        """Which pass this is to `weights`."""
        return self.stage, self.microbatch
