"""Planted bugs of multi-token prediction; see `faults.py`.

A copy of the embedding that is no tied weight, a depth that is divided by another loss's
targets or by its own rank's, targets from another document or another sample.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lite.mesh.groups import Group
from megatron_lite.model import gpt, multi_token
from megatron_lite.train import denominators, step
from megatron_lite.train.denominators import LM, Denominators
from tests.parity import pipeline_faults


@contextmanager
def embedding_copy_not_reduced() -> Iterator[None]:
    """The stage of the loss looks tokens up, too; its gradient stays there."""
    with pipeline_faults.tied_gradient_not_reduced():
        yield


@contextmanager
def embedding_copy_counted_twice() -> Iterator[None]:
    with pipeline_faults.tied_weight_counted_twice():
        yield


class _MainForAll(dict[str, Tensor]):
    """What the loss of every depth is divided by."""

    def __init__(self, counts: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._counts = counts

    def __missing__(self, term: str) -> Tensor:
        return self._counts[LM if term.startswith("mtp_") else term]


@contextmanager
def depth_divided_by_the_main_denominator() -> Iterator[None]:
    """Where losses arise; the log divides rightly, so that only gradients tell."""
    original = step.TrainStep.share_denominators

    def planted(self: step.TrainStep) -> None:
        original(self)
        self.denominators = _MainForAll(self.counts)  # type: ignore[assignment]

    with patch.object(step.TrainStep, "share_denominators", planted):
        yield


@contextmanager
def depth_denominator_per_rank() -> Iterator[None]:
    original = step.start_denominators

    def planted(sums: Mapping[str, Tensor], group: Group) -> Denominators:
        whole = original(sums, group)
        values = [
            total * group.size if term.startswith("mtp_") else whole[term]
            for term, total in sums.items()
        ]
        return Denominators(tuple(sums), torch.stack(values), None)

    with patch.object(step, "start_denominators", planted):
        yield


@contextmanager
def target_across_a_document_border() -> Iterator[None]:
    """A target counts where its own position does, whatever ends before it."""

    def planted(weights: Tensor, depth: int) -> Tensor:
        return multi_token.shift(weights, depth + 1)

    with (
        patch.object(gpt, "further_weights", planted),
        patch.object(denominators, "further_weights", planted),
    ):
        yield


@contextmanager
def target_of_the_next_sample() -> Iterator[None]:
    """The batch is shifted as one row: past the end comes the next sample of the microbatch."""

    def planted(tokens: Tensor, by: int) -> Tensor:
        return tokens.t().reshape(-1).roll(-by).view(tokens.shape[::-1]).t().contiguous()

    with patch.object(gpt, "shift", planted), patch.object(multi_token, "shift", planted):
        yield
