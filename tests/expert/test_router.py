"""The router against one that goes token by token, in float64; its gradients; ties; noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.expert.router import (
    choose_experts,
    chosen_weights,
    largest,
    route_tokens,
    router_logits,
    token_scores,
)
from tests.expert import routing_reference as reference
from tests.expert.routing_parts import (
    EXPERTS,
    MICROBATCHES,
    PLAIN,
    SAMPLES,
    SEQUENCE,
    SHAPES,
    SIGMOID,
    Sink,
    build_parts,
    build_tokens,
    context,
)

COTANGENT = torch.randn(
    SEQUENCE * SAMPLES,
    EXPERTS,
    generator=torch.Generator().manual_seed(9),
    dtype=torch.float64,
)


def routed(shape, x, parts=None, **options):
    """Run the router and its backward pass; (routing, x's and the router's gradient, mb)."""
    parts = parts or build_parts(shape)
    sink = Sink()
    mb = context(sink, **options)
    x = x.clone().requires_grad_()
    routing = route_tokens(parts, x, mb)
    routing.probs.backward(COTANGENT[:, : shape.topk].to(routing.probs.dtype))
    return routing, x.grad, sink.grads.get(parts.params["router.weight"]), mb


@pytest.mark.parametrize("name", SHAPES)
def test_router_equals_the_plain_one(name):
    shape = SHAPES[name]
    parts, x = build_parts(shape), build_tokens()
    routing, grad_x, grad_weight, mb = routed(shape, x, parts)
    weight = parts.params["router.weight"].detach().clone().requires_grad_()
    x = x.requires_grad_()
    ids, probs, losses = reference.route(
        x.flatten(0, 1) @ weight.T,
        shape,
        SAMPLES,
        parts.state("expert_bias"),
        parts.state("expert_counts"),
    )
    assert routing.ids.tolist() == ids
    torch.testing.assert_close(routing.probs, probs, rtol=1e-12, atol=1e-14)
    record = mb.losses.routing[parts.layer]
    assert list(record.losses) == list(losses)
    for term, value in losses.items():
        torch.testing.assert_close(record.losses[term], value, rtol=1e-12, atol=0)
    assert record.counts.tolist() == [sum(row.count(e) for row in ids) for e in range(EXPERTS)]
    assert record.dropped.sum() == 0
    total = (probs * COTANGENT[:, : shape.topk]).sum() + sum(losses.values()) / MICROBATCHES
    total.backward()
    torch.testing.assert_close(grad_x, x.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad_weight, weight.grad, rtol=1e-10, atol=1e-12)


def test_a_bias_of_the_router_shifts_its_logits_and_gets_their_gradient():
    shape = SHAPES["post"]
    parts, x = build_parts(shape), build_tokens()
    bias = torch.nn.Parameter(torch.linspace(-2.0, 2.0, EXPERTS, dtype=torch.float64))
    parts.params["router.bias"] = bias
    sink = Sink()
    routing = route_tokens(parts, x.requires_grad_(), context(sink))
    routing.probs.backward(COTANGENT[:, : shape.topk])
    weight = parts.params["router.weight"].detach()
    shift = bias.detach().clone().requires_grad_()
    logits = x.detach().flatten(0, 1) @ weight.T + shift
    ids, probs, losses = reference.route(logits, shape, SAMPLES, None, None)
    assert routing.ids.tolist() == ids
    total = (probs * COTANGENT[:, : shape.topk]).sum() + sum(losses.values()) / MICROBATCHES
    total.backward()
    torch.testing.assert_close(sink.grads[bias], shift.grad, rtol=1e-10, atol=1e-12)
    assert sink.writes == 2 and bias.grad is None


@pytest.mark.parametrize("name", SHAPES)
def test_gradient_through_the_scores(name):
    shape = SHAPES[name]
    parts, x = build_parts(shape), build_tokens()
    logits = x.flatten(0, 1)[:6] @ parts.params["router.weight"].detach().T
    ids = choose_experts(token_scores(logits, shape), shape, parts.state("expert_bias"))

    def weights(logits):
        return chosen_weights(logits, token_scores(logits, shape), ids, shape)

    assert torch.autograd.gradcheck(weights, logits.requires_grad_())


def test_entropy_is_that_of_the_scores():
    *_, mb = routed(PLAIN, torch.zeros_like(build_tokens()))
    expected = SEQUENCE * SAMPLES * torch.log(torch.tensor(EXPERTS, dtype=torch.float64))
    torch.testing.assert_close(mb.losses.routing[1].entropy, expected)


@pytest.mark.parametrize(
    "shape", [PLAIN, SIGMOID, SHAPES["post_groups"]], ids=lambda s: str(s.topk)
)
def test_ties_go_to_the_lowest_expert(shape):
    parts = build_parts(replace(shape, expert_bias=False))
    routing, *_ = routed(parts.shape, torch.zeros_like(build_tokens()), parts)
    assert routing.ids.tolist() == [list(range(shape.topk))] * (SEQUENCE * SAMPLES)


def test_ties_among_many_experts():
    scores = torch.tensor([0.0, -0.0, 1.0]).repeat(100).expand(50, -1)
    assert (largest(scores, 102) == torch.tensor([*range(2, 300, 3), 0, 1])).all()


@given(st.data())
def test_the_choice_is_that_of_a_stable_sort(data):
    tokens, experts = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 12))
    k = data.draw(st.integers(1, experts))
    level = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0])
    rows = [[data.draw(level) for _ in range(experts)] for _ in range(tokens)]
    expected = [sorted(range(experts), key=lambda e: (-row[e], e))[:k] for row in rows]
    assert largest(torch.tensor(rows), k).tolist() == expected


def test_the_bias_decides_the_choice_and_not_the_weight():
    parts = build_parts(SIGMOID)
    parts.params["router.expert_bias"].data.copy_(torch.tensor([9.0] * 4 + [0.0] * 4))
    x = build_tokens()
    routing, *_ = routed(SIGMOID, x, parts)
    assert (routing.ids.sort(1).values == torch.arange(4)).all()
    scores = (x.flatten(0, 1) @ parts.params["router.weight"].detach().T).sigmoid()[:, :4]
    expected = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(routing.probs.gather(1, routing.ids.long().argsort(1)), expected)


def test_group_limit_uses_few_groups():
    routing, *_ = routed(SHAPES["sigmoid_groups"], build_tokens())
    assert all(len(set(row)) == 2 for row in (routing.ids // 2).tolist())
    free, *_ = routed(SIGMOID, build_tokens())
    assert any(len(set(row)) > 2 for row in (free.ids // 2).tolist())


def test_scores_that_underflow_give_no_nan():
    parts = build_parts(SIGMOID, torch.full((EXPERTS, 16), -1e4, dtype=torch.float64))
    routing, grad_x, grad_weight, _ = routed(SIGMOID, torch.ones_like(build_tokens()), parts)
    assert all(t.isfinite().all() for t in (routing.probs, grad_x, grad_weight))


@pytest.mark.parametrize(
    ("compute", "router", "expected"),
    [
        (torch.bfloat16, "float32", torch.float32),
        (torch.bfloat16, "float64", torch.float64),
        (torch.float32, "float64", torch.float64),
        (torch.float64, "float32", torch.float64),
    ],
)
def test_router_computes_in_its_own_dtype(compute, router, expected):
    shape = replace(SHAPES["sigmoid"], router_dtype=router)
    parts, x = build_parts(shape, dtype=compute), build_tokens(compute)
    routing, grad_x, grad_weight, _ = routed(shape, x, parts)
    assert (routing.probs.dtype, grad_x.dtype) == (expected, compute)
    logits = x.double().flatten(0, 1) @ parts.params["router.weight"].detach().double().T
    scores = logits.sigmoid().gather(1, routing.ids.long())
    exact = scores / scores.sum(1, keepdim=True)
    # Far below the rounding of bf16: the product was not formed in it.
    torch.testing.assert_close(routing.probs.double(), exact, rtol=1e-5, atol=1e-6)
    assert grad_weight.isfinite().all()


def test_weight_gradient_waits_for_its_action():
    parts, sink = build_parts(PLAIN), Sink()
    mb = context(sink, deferred=True)
    x = build_tokens().requires_grad_()
    route_tokens(parts, x, mb).probs.sum().backward()
    assert sink.writes == 0
    mb.wgrads.flush()
    assert sink.writes == 1


def test_frozen_router_passes_the_gradient_on():
    parts = build_parts(SIGMOID)
    parts.params["router.weight"].requires_grad_(False)
    _, grad_x, grad_weight, _ = routed(SIGMOID, build_tokens(), parts)
    assert grad_weight is None and grad_x.abs().sum() > 0


def test_evaluation_leaves_no_record_and_no_noise():
    shape = replace(SHAPES["sigmoid"], jitter=0.5)
    parts, x = build_parts(shape), build_tokens()
    mb = context(None)
    with torch.no_grad():
        quiet = route_tokens(parts, x, mb)
        plain = route_tokens(build_parts(SHAPES["sigmoid"]), x, mb)
    assert not mb.losses.routing
    assert torch.equal(quiet.probs, plain.probs)


def test_recomputation_leaves_the_same_record_once():
    shape = replace(SHAPES["sigmoid"], capacity_factor=0.5, jitter=0.1)
    parts, x = build_parts(shape), build_tokens()
    sink = Sink()
    mb = context(sink)
    with torch.no_grad():
        first = route_tokens(parts, x, mb)
    before = mb.losses.routing[parts.layer]
    second = route_tokens(parts, x.requires_grad_(), mb)
    after = mb.losses.routing[parts.layer]
    assert list(mb.losses.routing) == [parts.layer]
    assert torch.equal(first.ids, second.ids) and torch.equal(first.probs, second.probs)
    assert torch.equal(before.counts, after.counts) and torch.equal(before.dropped, after.dropped)
    assert before.losses == after.losses
    assert before.counts.sum() == SEQUENCE * SAMPLES * shape.topk


def test_noise_is_a_function_of_the_decision():
    shape = replace(PLAIN, jitter=0.3)
    x = build_tokens()
    first, *_ = routed(shape, x)
    again, *_ = routed(shape, x)
    assert torch.equal(first.probs, again.probs)
    assert not torch.equal(first.probs, routed(shape, x, step=4)[0].probs)
    assert not torch.equal(first.probs, routed(PLAIN, x)[0].probs)
    weight = build_parts(shape).params["router.weight"].detach()
    other = build_parts(shape, weight, layer=2)
    assert not torch.equal(first.probs, routed(shape, x, other)[0].probs)
    # One sample alone has the noise that it has among others.
    alone = route_tokens(build_parts(shape), x[:, :1], context(Sink(), samples=1))
    torch.testing.assert_close(alone.probs, first.probs.view(SEQUENCE, SAMPLES, -1)[:, 0])


def test_noise_keeps_to_its_range_and_has_its_gradient():
    shape = replace(PLAIN, topk=EXPERTS, jitter=0.3)
    x = torch.ones_like(build_tokens()).requires_grad_()
    # With the identity as a router, logits are the noise itself.
    eye = torch.eye(EXPERTS, 16, dtype=torch.float64)
    parts = build_parts(shape, eye)
    mb = context(Sink())
    noise = router_logits(parts, x, mb)
    assert noise.min() >= 0.7 and noise.max() <= 1.3
    assert abs(noise.mean() - 1) < 0.05 and noise.std() > 0.15
    noise.sum().backward()
    torch.testing.assert_close(x.grad.flatten(0, 1)[:, :EXPERTS], noise.detach())
    weight = parts.params["router.weight"]
    sums = mb.wgrads.main_grad(weight)
    torch.testing.assert_close(sums[:, :EXPERTS], noise.detach().sum(0).expand(EXPERTS, -1))
