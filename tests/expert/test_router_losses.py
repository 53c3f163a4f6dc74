"""Auxiliary losses: they reach the router, by their coefficient, and count choices exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.expert.losses import (
    MicrobatchCounts,
    balance_losses,
    count_choices,
    global_shares,
    loss_terms,
    z_loss,
)
from megatron_lite.expert.router import choose_experts, route_tokens, token_mixture, token_scores
from tests.expert.routing_parts import (
    ALL_LOSSES,
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

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def with_loss(shape, kind, coefficient):
    if kind == "z_loss":
        return replace(shape, z_loss_coeff=coefficient)
    return replace(shape, balancing=((kind, coefficient),) if coefficient else ())


def router_gradient(shape, weight=None, cotangent=None):
    """Router gradient of (probs . cotangent) + auxiliary losses, and that sum."""
    parts, sink = build_parts(shape, weight), Sink()
    mb = context(sink)
    x = build_tokens().requires_grad_()
    probs = route_tokens(parts, x, mb).probs
    loss = (probs * (torch.ones_like(probs) if cotangent is None else cotangent)).sum()
    loss.backward()
    added = sum(mb.losses.routing[1].losses.values()) / MICROBATCHES
    return sink.grads[parts.params["router.weight"]], loss.item() + float(added)


@pytest.mark.parametrize("kind", [*KINDS, "z_loss"])
@pytest.mark.parametrize("base", [PLAIN, SIGMOID], ids=["softmax", "sigmoid"])
def test_c063_loss_reaches_the_router_in_proportion(base, kind):
    none, small, large = (
        router_gradient(with_loss(base, kind, coefficient))[0] for coefficient in (0.0, 0.01, 0.02)
    )
    assert (small - none).norm() > 1e-6
    torch.testing.assert_close(large - none, 2 * (small - none), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", [*KINDS, "z_loss"])
def test_c063_finite_difference_of_loss_and_auxiliary_loss(kind):
    shape = with_loss(SIGMOID, kind, 5.0)
    weight = build_parts(shape).params["router.weight"].detach()
    cotangent = torch.linspace(-1, 1, SEQUENCE * SAMPLES * shape.topk, dtype=torch.float64)
    cotangent = cotangent.view(-1, shape.topk)
    gradient, _ = router_gradient(shape, weight, cotangent)
    for place in ((0, 0), (5, 7)):
        nudge = torch.zeros_like(weight)
        nudge[place] = 1e-6
        above, below = (
            router_gradient(shape, weight + sign * nudge, cotangent)[1] for sign in (1, -1)
        )
        assert gradient[place].item() == pytest.approx((above - below) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("name", ["post", "pre_top_1", "sigmoid", "sqrtsoftplus"])
def test_gradient_of_the_losses_in_the_logits(name):
    shape = replace(SHAPES[name], balancing=ALL_LOSSES, z_loss_coeff=0.001)
    parts = build_parts(shape)
    logits = build_tokens().flatten(0, 1)[:6] @ parts.params["router.weight"].detach().T
    ids = choose_experts(token_scores(logits, shape), shape, None)
    own = count_choices(ids, EXPERTS, SAMPLES)

    def losses(logits):
        mixture = token_mixture(logits, token_scores(logits, shape), shape)
        found = balance_losses(
            parts, mixture, MicrobatchCounts(own, parts), SAMPLES, context(Sink())
        )
        return (*found.values(), z_loss(logits, 0.001, 6))

    assert torch.autograd.gradcheck(losses, logits.requires_grad_())


def test_balanced_routing_has_the_least_loss():
    # Every expert is chosen equally often and has the mean score: the loss is its coefficient.
    shape = replace(PLAIN, topk=EXPERTS, balancing=(("aux_loss", 0.25),))
    parts, mb = build_parts(shape, torch.zeros(EXPERTS, 16)), context(Sink())
    route_tokens(parts, build_tokens(), mb)
    assert mb.losses.routing[1].losses["aux_loss"].item() == pytest.approx(0.25, rel=1e-12)
    # All tokens to one expert with all of its score: E times as much.
    shape = replace(PLAIN, topk=1, pre_softmax=True, balancing=(("aux_loss", 0.25),))
    weight = torch.zeros(EXPERTS, 16)
    weight[3] = 1e3
    parts, mb = build_parts(shape, weight), context(Sink())
    route_tokens(parts, build_tokens().abs(), mb)
    loss = mb.losses.routing[1].losses["aux_loss"].item()
    assert loss == pytest.approx(0.25 * EXPERTS, rel=1e-12)


def test_loss_per_sample_tells_samples_apart():
    # Two samples, each to one expert of its own: balanced over the two, not within one.
    shape = replace(PLAIN, num_experts=2, topk=1, pre_softmax=True)
    x = torch.tensor([[1.0, -1.0]] * 4, dtype=torch.float64).unsqueeze(-1)
    weight = torch.tensor([[50.0], [-50.0]])
    values = {}
    for kind in ("aux_loss", "seq_aux_loss"):
        one = with_loss(shape, kind, 1.0)
        mb = context(Sink(), torch.arange(4), samples=2)
        route_tokens(build_parts(one, weight), x, mb)
        values[kind] = mb.losses.routing[1].losses[kind].item()
    assert values == {"aux_loss": pytest.approx(1.0), "seq_aux_loss": pytest.approx(2.0)}


def test_global_loss_starts_uniform():
    like = torch.zeros(1, dtype=torch.float64)
    counts = torch.tensor([3.0, 1.0, 0.0, 0.0])
    assert global_shares(torch.zeros(4), like).tolist() == [0.25] * 4
    assert global_shares(counts, like).tolist() == [0.75, 0.25, 0.0, 0.0]


def test_without_gradient_of_the_weights_the_losses_still_count():
    # Top-1 of a softmax over itself: the weight is 1 whatever the router does.
    shape = replace(PLAIN, topk=1, balancing=(("aux_loss", 0.01),))
    gradient, _ = router_gradient(shape)
    assert gradient.abs().sum() > 0
    nothing, _ = router_gradient(replace(shape, balancing=()))
    assert nothing.abs().sum() == 0


def test_terms_in_the_order_of_the_log():
    shape = replace(PLAIN, balancing=ALL_LOSSES[::-1], z_loss_coeff=0.1)
    assert loss_terms(shape) == (*KINDS, "z_loss")
    assert loss_terms(PLAIN) == ()


@given(st.data())
def test_choices_are_counted_per_sample(data):
    experts, samples = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, experts))
    positions = data.draw(st.integers(1, 5))
    rows = [data.draw(st.permutations(range(experts)))[:k] for _ in range(positions * samples)]
    counts = count_choices(torch.tensor(rows), experts, samples)
    for sample in range(samples):
        flat = [e for row in rows[sample::samples] for e in row]
        assert counts[sample].tolist() == [flat.count(e) for e in range(experts)]
