"""Capacity: who is dropped, exactly; larger than needed; dropped choices count nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.errors import UserError
from megatron_lite.expert.capacity import Choices, expert_capacity, place_choices
from megatron_lite.expert.dispatch import run_experts
from megatron_lite.expert.router import route_tokens
from tests.expert import routing_reference as reference
from tests.expert.routing_parts import (
    EXPERTS,
    PLAIN,
    SAMPLES,
    SEQUENCE,
    SHAPES,
    Sink,
    build_parts,
    build_tokens,
    context,
)

TWO = replace(PLAIN, num_experts=2, topk=1, pre_softmax=True)


def route_four(factor, policy, tried=0):
    """Four tokens that all prefer expert 0, with probabilities .9, .6, .8, .7."""
    wanted = torch.tensor([0.9, 0.6, 0.8, 0.7], dtype=torch.float64)
    logits = torch.stack([wanted.log(), (1 - wanted).log()], dim=1)
    shape = replace(TWO, capacity_factor=factor, drop_policy=policy, reroute_candidates=tried)
    mb = context(Sink(), torch.arange(4), samples=1)
    # Tokens are their own logits, the router is the identity.
    parts = build_parts(shape, torch.eye(2, dtype=torch.float64))
    routing = route_tokens(parts, logits.unsqueeze(1), mb)
    return routing, mb.losses.routing[1]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_c064_capacity_beyond_the_tokens_drops_none(policy):
    routing, record = route_four(5.0, policy)
    assert routing.ids.tolist() == [[0]] * 4
    assert record.dropped.tolist() == [0, 0]
    assert routing.probs.flatten().tolist() == pytest.approx([0.9, 0.6, 0.8, 0.7])


@pytest.mark.parametrize(
    ("policy", "ids"), [("probs", [0, -1, 0, -1]), ("position", [0, 0, -1, -1])]
)
def test_c064_policies_keep_their_two_tokens(policy, ids):
    assert expert_capacity(replace(TWO, capacity_factor=1.0), 4) == 2
    routing, record = route_four(1.0, policy)
    assert routing.ids.flatten().tolist() == ids
    assert record.dropped.tolist() == [2, 0]
    assert record.counts.tolist() == [4, 0]  # the choice, before dropping
    assert (routing.probs.flatten() == 0).tolist() == [e < 0 for e in ids]


@pytest.mark.parametrize(
    ("policy", "ids", "weights"),
    [
        ("probs", [0, 1, 0, 1], [0.9, 0.4, 0.8, 0.3]),
        ("position", [0, 0, 1, 1], [0.9, 0.6, 0.2, 0.3]),
    ],
)
def test_overflow_goes_to_the_next_expert_at_its_score(policy, ids, weights):
    routing, record = route_four(1.0, policy, tried=1)
    assert routing.ids.flatten().tolist() == ids
    assert routing.probs.flatten().tolist() == pytest.approx(weights)
    assert record.dropped.tolist() == [0, 0] and record.rerouted == 2
    assert record.counts.tolist() == [4, 0]  # the choice, before anything moves


def test_overflow_that_finds_no_room_is_dropped():
    routing, record = route_four(0.5, "probs", tried=1)  # one room each: .9 there, .4 of .6 here
    assert routing.ids.flatten().tolist() == [0, 1, -1, -1]
    assert record.dropped.tolist() == [2, 0] and record.rerouted == 1


def test_c064_unknown_policy_is_the_users_fault():
    with pytest.raises(UserError, match=r"--moe-token-drop-policy 'least' .*'probs', 'position'"):
        route_four(1.0, "least")


def test_c064_dropped_tokens_leave_the_layer_with_zero():
    routing, _ = route_four(1.0, "probs")
    x = torch.ones(4, 2, dtype=torch.float64)
    parts, mb = build_parts(TWO), context(Sink(), torch.arange(4), samples=1)
    # Experts that hand back their rows: what is left is the weight of the token.
    out = run_experts(parts, x, routing.ids, routing.probs, lambda rows, _: rows, mb)
    assert out[:, 0].tolist() == pytest.approx([0.9, 0.0, 0.8, 0.0])


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_one_token_in_total_finds_room(policy):
    shape = replace(SHAPES["sigmoid"], capacity_factor=0.01, drop_policy=policy)
    mb = context(Sink(), torch.arange(1), samples=1)
    x = build_tokens()[:1, :1].requires_grad_()
    routing = route_tokens(build_parts(shape), x, mb)
    routing.probs.sum().backward()
    assert (routing.ids >= 0).all() and x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "factor", "rows"), [(80, 1.1, 11), (80, 1.0, 10), (81, 1.0, 11), (8, 0.1, 1)]
)
def test_capacity_rounds_up_the_decimal_number(tokens, factor, rows):
    assert expert_capacity(replace(PLAIN, topk=1, capacity_factor=factor), tokens) == rows


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.25, 0.75, 1.0])
@pytest.mark.parametrize("name", ["post", "pre", "sigmoid_groups"])
def test_dropping_equals_the_plain_reference(name, factor, policy):
    free = SHAPES[name]
    shape = replace(free, capacity_factor=factor, drop_policy=policy)
    parts, x = build_parts(shape), build_tokens()
    open_mb, mb = context(Sink()), context(Sink())
    unlimited = route_tokens(build_parts(free), x, open_mb)
    x.requires_grad_()
    routing = route_tokens(parts, x, mb)
    kept = torch.tensor(reference.keep(unlimited.ids.tolist(), unlimited.probs, shape))
    assert not kept.all()
    assert torch.equal(routing.ids, torch.where(kept, unlimited.ids, -1))
    assert torch.equal(routing.probs, unlimited.probs * kept)
    record, whole = mb.losses.routing[1], open_mb.losses.routing[1]
    assert record.dropped.sum() == (~kept).sum()
    assert torch.equal(record.counts, whole.counts) and record.losses == whole.losses


def test_evaluation_drops_as_training_does():
    shape = replace(SHAPES["sigmoid"], capacity_factor=0.5)
    parts, x = build_parts(shape), build_tokens()
    with torch.no_grad():
        evaluated = route_tokens(parts, x, context(None))
    assert (evaluated.ids < 0).any()
    assert torch.equal(evaluated.ids, route_tokens(parts, x, context(Sink())).ids)


def test_dropped_choices_have_no_gradient():
    shape = replace(PLAIN, pre_softmax=True, capacity_factor=0.5)
    x = build_tokens().requires_grad_()
    routing = route_tokens(build_parts(shape), x, context(Sink()))
    routing.probs.sum().backward()
    lost = (routing.ids < 0).all(1).view(SEQUENCE, SAMPLES)
    assert lost.any()
    assert (x.grad[lost] == 0).all() and (x.grad[~lost] != 0).any(1).all()


@given(st.data())
def test_every_expert_keeps_as_many_as_fit(data):
    experts = data.draw(st.integers(1, EXPERTS))
    k = data.draw(st.integers(1, experts))
    capacity = data.draw(st.integers(1, 20))
    policy = data.draw(st.sampled_from(["probs", "position"]))
    tokens = data.draw(st.integers(1, 15))
    ids = torch.tensor([data.draw(st.permutations(range(experts)))[:k] for _ in range(tokens)])
    level = st.sampled_from([0.0, 0.25, 0.5])  # few, so that many are equal
    weights = torch.tensor([[data.draw(level) for _ in range(k)] for _ in range(tokens)])
    nothing = ids[:, :0]
    placed = place_choices(Choices(ids, weights, nothing, nothing), experts, capacity, policy)
    kept = placed >= 0
    assert torch.equal(placed[kept], ids[kept])
    counts = torch.bincount(ids.flatten(), minlength=experts)
    kept_counts = torch.bincount(ids[kept], minlength=experts)
    assert torch.equal(kept_counts, counts.clamp(max=capacity))
    assert kept.sum() + (~kept).sum() == tokens * k
    for expert in range(experts):
        mine = ids == expert
        inside, outside = (mine & kept).nonzero(), (mine & ~kept).nonzero()
        for token, slot in inside.tolist():
            for other, place in outside.tolist():
                if policy == "position":
                    assert token < other
                else:
                    first = (-weights[token, slot].item(), token)
                    assert first < (-weights[other, place].item(), other)


@st.composite
def reroute_cases(draw):
    experts = draw(st.integers(2, EXPERTS))
    k = draw(st.integers(1, experts - 1))
    tried = draw(st.integers(1, experts - k))
    tokens = draw(st.integers(1, 12))
    wanted = [draw(st.permutations(range(experts)))[: k + tried] for _ in range(tokens)]
    for row in wanted:  # groups may allow fewer
        end = draw(st.integers(k, k + tried))
        row[end:] = [-1] * (k + tried - end)
    level = st.sampled_from([0.0, 0.25, 0.5])
    weights = [[draw(level) for _ in row] for row in wanted]
    policy = draw(st.sampled_from(["probs", "position"]))
    return wanted, weights, experts, k, draw(st.integers(1, 12)), policy


@given(reroute_cases())
def test_rerouting_equals_the_plain_reference(case):
    wanted, weights, experts, k, capacity, policy = case
    ids, levels = torch.tensor(wanted), torch.tensor(weights)
    choices = Choices(ids[:, :k], levels[:, :k], ids[:, k:], levels[:, k:])
    placed = place_choices(choices, experts, capacity, policy).tolist()
    assert placed == reference.place(wanted, weights, experts, k, capacity, policy)
    for row in placed:
        there = [expert for expert in row if expert >= 0]
        assert len(set(there)) == len(there)


@pytest.mark.parametrize("name", ["post", "pre", "sigmoid_one_group", "sqrtsoftplus", "pre_groups"])
def test_rerouted_weights_and_gradients_are_those_of_the_experts_in_charge(name):
    shape = replace(SHAPES[name], balancing=(), z_loss_coeff=0.0)  # they add to the gradient
    shape = replace(shape, capacity_factor=0.75, reroute_candidates=2)
    parts, x = build_parts(shape), build_tokens().requires_grad_()
    mb = context(Sink())
    routing = route_tokens(parts, x, mb)
    record = mb.losses.routing[1]
    assert record.rerouted > 0 and record.dropped.sum() > 0
    plain, by_hand = build_parts(SHAPES[name]), build_tokens().requires_grad_()
    logits = by_hand.flatten(0, 1) @ plain.params["router.weight"].detach().T
    first = route_tokens(plain, build_tokens(), context(Sink())).ids
    rows = []
    for token, ids, before in zip(logits, routing.ids.tolist(), first.tolist(), strict=True):
        if shape.is_limited:
            size = shape.num_experts // shape.num_groups
            assert {e // size for e in ids if e >= 0} <= {e // size for e in before}
        final = [new if new >= 0 else old for new, old in zip(ids, before, strict=True)]
        weights = reference.weights_of(reference.score_list(token, shape), final, shape)
        rows.append(torch.stack([w * (e >= 0) for w, e in zip(weights, ids, strict=True)]))
    probs = torch.stack(rows)
    torch.testing.assert_close(routing.probs, probs, rtol=1e-12, atol=1e-15)
    cotangent = torch.cos(torch.arange(probs.numel()).double()).view_as(probs)
    (routing.probs * cotangent).sum().backward()
    (probs * cotangent).sum().backward()
    torch.testing.assert_close(x.grad, by_hand.grad, rtol=1e-9, atol=1e-12)
