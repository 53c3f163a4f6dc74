"""Balance once per step: the bias follows global counts, whatever the layout, and no one else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_lite.expert.balance import log_scalars, start_balance
from megatron_lite.expert.router import route_tokens
from megatron_lite.mesh.groups import local_group
from tests.expert.routing_parts import (
    EXPERTS,
    PLAIN,
    SAMPLES,
    SEQUENCE,
    Sink,
    build_parts,
    build_tokens,
    context,
)
from tests.expert.routing_ranks import STATEFUL, balance_steps

STEPS, MICROBATCHES = 3, 8
SETTINGS = [(1, False, False), (1, True, True), (2, False, True), (2, True, False)]


def by_hand():
    """Bias and counts of both layers after each step, counting choices one by one."""
    layers = [build_parts(STATEFUL, layer=layer) for layer in STATEFUL.layers]
    seen = []
    for step in range(STEPS):
        counts = [[0] * EXPERTS for _ in layers]
        for number in range(MICROBATCHES):
            x = build_tokens(seed=100 * step + number)
            for parts, mine in zip(layers, counts, strict=True):
                free = replace(STATEFUL, capacity_factor=None)  # choices before dropping
                for row in route_tokens(replace(parts, shape=free), x, context(None)).ids.tolist():
                    for expert in row:
                        mine[expert] += 1
        for parts, mine in zip(layers, counts, strict=True):
            mean = sum(mine) / EXPERTS
            for expert, count in enumerate(mine):
                parts.state("expert_bias")[expert] += 0.001 * ((mean > count) - (mean < count))
        seen.append(([parts.state("expert_bias").clone() for parts in layers], counts))
    return seen


@pytest.mark.parametrize(("ranks", "twice", "evaluate"), SETTINGS)
def test_c066_bias_moves_once_per_step_by_global_counts(rank_pool, ranks, twice, evaluate):
    results = rank_pool.run(
        ranks,
        balance_steps,
        steps=STEPS,
        microbatches=MICROBATCHES,
        twice=twice,
        evaluate=evaluate,
    )
    expected = by_hand()
    for result in results:
        for step, (bias, counts) in zip(result["steps"], expected, strict=True):
            for layer in range(2):
                torch.testing.assert_close(step["bias"][layer], bias[layer], rtol=0, atol=1e-15)
                assert step["counts"][layer].tolist() == counts[layer]


def test_log_does_not_depend_on_ranks_or_recomputation(rank_pool):
    logs = []
    for ranks, twice, evaluate in SETTINGS:
        options = {"steps": 2, "microbatches": MICROBATCHES, "twice": twice, "evaluate": evaluate}
        results = rank_pool.run(ranks, balance_steps, **options)
        logs.append([step["log"] for step in results[0]["steps"]])
    for log in logs[1:]:
        for mine, wanted in zip(log, logs[0], strict=True):
            assert mine == pytest.approx(wanted, rel=1e-12)


def step_of(parts, inputs, shape):
    """One step's balance over the given microbatches of one layer."""
    sinks = []
    for x in inputs:
        mb = context(Sink(), microbatches=len(inputs))
        route_tokens(parts, x, mb)
        mb.losses.dispatched[parts.layer] = 1000  # bytes, of each pass
        sinks.append(mb.losses)
    return start_balance(shape, [parts], sinks, local_group("stage"), "cpu")


def test_log_scalars_by_hand():
    shape = replace(PLAIN, topk=1, pre_softmax=True, capacity_factor=2.0, pad_to_capacity=True)
    shape = replace(shape, balancing=(("aux_loss", 0.01),), z_loss_coeff=0.001)
    weight = torch.zeros(EXPERTS, 16)
    weight[3, 0] = 1.0
    x = torch.zeros(SEQUENCE, SAMPLES, 16, dtype=torch.float64)
    x[..., 0] = 2.0  # every token to expert 3
    balance = step_of(build_parts(shape, weight), [x, x], shape)
    sums = {name: float(value) for name, value in balance.log_sums(shape.layers).items()}
    log = log_scalars(shape, sums, 2, shape.layers)
    tokens = SEQUENCE * SAMPLES
    room = 9  # of 36 tokens
    assert log["moe/dropped_share_layer_1"] == pytest.approx((tokens - room) / tokens)
    assert log["moe/busiest_over_mean_layer_1"] == pytest.approx(EXPERTS)
    assert log["moe/dispatch_bytes"] == log["moe/dispatch_bytes_layer_1"] == 2000
    assert "moe/rerouted_share" not in log
    scores = torch.softmax(torch.tensor([0.0] * 7 + [2.0], dtype=torch.float64), 0)
    entropy = -(scores * scores.log()).sum().item()
    assert log["moe/entropy_layer_1"] == pytest.approx(entropy)
    assert log["moe/aux_loss_layer_1"] == pytest.approx(0.01 * EXPERTS * scores[7].item())
    z = torch.logsumexp(torch.tensor([0.0] * 7 + [2.0], dtype=torch.float64), 0).item()
    assert log["moe_z_loss"] == pytest.approx(0.001 * z * z)
    assert log["moe/padded_share_layer_1"] == pytest.approx(1 - room / (EXPERTS * room))
    loads = [log[f"moe/load_expert_{expert}_layer_1"] for expert in range(EXPERTS)]
    assert loads == [0, 0, 0, 1, 0, 0, 0, 0]
    # The other layer is another rank's, and here of nobody.
    assert log["moe/dropped_share_layer_3"] == 0
    assert log["moe/dropped_share"] == log["moe/dropped_share_layer_1"]
    assert log["moe/busiest_over_mean"] == pytest.approx(EXPERTS)
    assert [name for name in log if "/" not in name] == ["moe_aux_loss", "moe_z_loss"]


def test_rank_without_layers_has_the_same_keys():
    mine = start_balance(STATEFUL, [], [], local_group("stage"), "cpu")
    parts = [build_parts(STATEFUL, layer=layer) for layer in STATEFUL.layers]
    other = start_balance(STATEFUL, parts, [], local_group("stage"), "cpu")
    for layers in ((), STATEFUL.layers):
        sums = mine.log_sums(layers)
        assert list(sums) == list(other.log_sums(layers))
        assert all(value == 0 for value in sums.values())
    mine.update()


def test_counts_as_the_mean_leave_the_bias_alone():
    shape = replace(STATEFUL, num_experts=3, topk=3)  # every expert by every token
    parts = build_parts(shape)
    before = parts.state("expert_bias").clone()
    balance = step_of(parts, [build_tokens()], shape)
    balance.update()
    assert torch.equal(parts.state("expert_bias"), before)


def test_a_frozen_router_keeps_its_bias_and_counts_on():
    shape = replace(STATEFUL, capacity_factor=None)
    parts = [build_parts(shape, layer=layer) for layer in shape.layers]
    parts[0].params["router.weight"].requires_grad_(False)
    before = [part.state("expert_bias").clone() for part in parts]
    sinks = []
    for part in parts:
        mb = context(Sink())
        route_tokens(part, build_tokens(), mb)
        sinks.append(mb.losses)
    balance = start_balance(shape, parts, sinks, local_group("stage"), "cpu")
    balance.update()
    assert torch.equal(parts[0].state("expert_bias"), before[0])
    assert not torch.equal(parts[1].state("expert_bias"), before[1])
    for part, counts in zip(parts, balance.counts, strict=True):
        assert torch.equal(part.state("expert_counts"), counts)


def test_router_without_state_is_left_alone():
    parts = build_parts(PLAIN)
    before = parts.params["router.weight"].detach().clone()
    balance = step_of(parts, [build_tokens()], PLAIN)
    balance.update()
    assert torch.equal(parts.params["router.weight"], before)
    assert balance.counts.sum() == SEQUENCE * SAMPLES * PLAIN.topk


def test_rerouted_and_dropped_shares_are_of_all_choices():
    shape = replace(PLAIN, topk=1, pre_softmax=True, capacity_factor=2.0, reroute_candidates=1)
    weight = torch.zeros(EXPERTS, 16)
    weight[3, 0], weight[5, 0] = 2.0, 1.0  # every token to expert 3, then 5
    x = torch.ones(SEQUENCE, SAMPLES, 16, dtype=torch.float64)
    balance = step_of(build_parts(shape, weight), [x, x], shape)
    sums = {name: float(value) for name, value in balance.log_sums().items()}
    log = log_scalars(shape, sums, 2)
    tokens, room = SEQUENCE * SAMPLES, 9
    assert log["moe/rerouted_share"] == pytest.approx(room / tokens)
    assert log["moe/dropped_share"] == pytest.approx((tokens - 2 * room) / tokens)
