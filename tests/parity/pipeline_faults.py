"""Planted bugs of pipelines; see `faults.py`.

Messages that carry another microbatch, tied ends that do not add up, a stage that the norm
forgets, weight gradients that are never computed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron_lite.optim import optimizer
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.exchange import Exchange
from megatron_lite.spec.params import ParamSpec
from megatron_lite.train import build, step
from megatron_lite.train.passes import Passes
from tests.parity.faults import own_rank, without_partial


@contextmanager
def message_of_the_microbatch_before() -> Iterator[None]:
    """A buffer is reused too early: the next message carries what the last one did."""
    original = Exchange.send_forward
    last: dict[int, Tensor] = {}

    def planted(self: Exchange, action: Action) -> None:
        assert action.stage is not None and action.microbatch is not None
        place = (action.stage, action.microbatch)
        mine = self._outputs[place]
        if action.microbatch:
            self._outputs[place] = last[action.stage]
        last[action.stage] = mine
        original(self, action)

    with patch.object(Exchange, "send_forward", planted):
        yield


@contextmanager
def gradient_message_of_the_microbatch_before() -> Iterator[None]:
    original = Exchange.send_backward
    last: dict[int, Tensor] = {}

    def planted(self: Exchange, action: Action) -> None:
        assert action.stage is not None and action.microbatch is not None
        place = (action.stage, action.microbatch)
        mine = self._input_gradients[place]
        if action.microbatch:
            self._input_gradients[place] = last[action.stage]
        last[action.stage] = mine
        original(self, action)

    with patch.object(Exchange, "send_backward", planted):
        yield


@contextmanager
def _respecified_on_rank(change: Callable[[ParamSpec], ParamSpec]) -> Iterator[None]:
    original = build.specs_on_rank

    def planted(*args: Any) -> tuple[ParamSpec, ...]:
        return tuple(change(spec) for spec in original(*args))

    with patch.object(build, "specs_on_rank", planted):
        yield


@contextmanager
def tied_gradient_not_reduced() -> Iterator[None]:
    with _respecified_on_rank(lambda spec: without_partial(spec, "tied_ends", ".weight")):
        yield


@contextmanager
def tied_weight_counted_twice() -> Iterator[None]:
    original = optimizer.norm_ranges

    def planted(pieces: Any, *parts: Any) -> Any:
        tied = [
            dataclasses.replace(p, speaks_for_tensor=True) if p.spec.holders else p for p in pieces
        ]
        return original(tied, *parts)

    with patch.object(optimizer, "norm_ranges", planted):
        yield


@contextmanager
def norm_of_one_stage_missing() -> Iterator[None]:
    original = step.reduce_closing

    def planted(*, squares: tuple[Tensor, Tensor], **others: Any) -> Any:
        mine, bad = squares
        return original(squares=(mine * 0 if own_rank() == 1 else mine, bad), **others)

    with patch.object(step, "reduce_closing", planted):
        yield


@contextmanager
def microbatch_dropped() -> Iterator[None]:
    """The deferred weight gradients of the second microbatch are counted but not computed."""
    original = Passes.weight_gradient

    def planted(self: Passes, action: Action) -> None:
        if action.microbatch == 1:
            deferred = next(d for (_, number), d in self._deferred.items() if number == 1)
            deferred._queue = [(param, lambda main: None) for param, _ in deferred._queue]
        original(self, action)

    with patch.object(Passes, "weight_gradient", planted):
        yield


@contextmanager
def weight_gradients_never_run() -> Iterator[None]:
    """The W of one microbatch is left out; counting contributions finds it."""
    original = Passes.weight_gradient

    def planted(self: Passes, action: Action) -> None:
        if action.microbatch != 1:
            original(self, action)

    with patch.object(Passes, "weight_gradient", planted):
        yield
