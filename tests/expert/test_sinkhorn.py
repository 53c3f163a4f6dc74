"""Sinkhorn's assignment: balanced, without gradient, for training only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_lite.expert.router import route_tokens
from megatron_lite.expert.sinkhorn import sinkhorn
from tests.expert.routing_parts import EXPERTS, PLAIN, Sink, build_parts, build_tokens, context

BALANCED = replace(PLAIN, sinkhorn=True)


def test_rows_and_columns_weigh_the_same():
    logits = 5 * torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scaled = sinkhorn(logits)
    torch.testing.assert_close(scaled.sum(0), torch.full((8,), 1 / 8).double(), rtol=1e-2, atol=0)
    torch.testing.assert_close(scaled.sum(1), torch.full((40,), 1 / 40).double(), rtol=2e-2, atol=0)


def test_large_logits_do_not_overflow():
    scaled = sinkhorn(torch.tensor([[1e4, 0.0], [1e4, 1e4]]))
    assert scaled.isfinite().all()


def test_choice_is_more_even_than_that_of_the_logits():
    weight = build_parts(PLAIN).params["router.weight"].detach().clone()
    x = build_tokens()
    x[..., 0] = 3.0
    weight[2, 0] = 5.0  # nearly all tokens like expert 2
    records = []
    for shape in (PLAIN, BALANCED):
        mb = context(Sink())
        route_tokens(build_parts(shape, weight), x, mb)
        records.append(mb.losses.routing[1].counts)
    assert records[1].max() < 0.7 * records[0].max()
    assert records[0].sum() == records[1].sum()


@pytest.mark.parametrize("k", [1, 2])
def test_weights_are_those_of_the_logits(k):
    parts, x = build_parts(replace(BALANCED, topk=k)), build_tokens().requires_grad_()
    routing = route_tokens(parts, x, context(Sink()))
    logits = x.flatten(0, 1) @ parts.params["router.weight"].detach().T
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    expected = scores.gather(1, routing.ids.long())
    torch.testing.assert_close(routing.probs, expected)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    routing.probs.sum().backward()
    torch.testing.assert_close(x.grad, grad)


def test_evaluation_chooses_by_the_logits():
    parts, x = build_parts(BALANCED), build_tokens()
    with torch.no_grad():
        routing = route_tokens(parts, x, context(None))
    logits = x.flatten(0, 1) @ parts.params["router.weight"].detach().T
    assert torch.equal(routing.ids.long(), logits.topk(2).indices)
    assert routing.ids.max() < EXPERTS
