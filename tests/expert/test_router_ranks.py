"""Routers over slices of a microbatch: the same choices, losses and gradients as one rank."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.expert.routing_parts import EXPERTS, SAMPLES, SEQUENCE
from tests.expert.routing_ranks import SLICED, route_slice

LAYOUTS = [(2, 1, False), (2, 1, True), (1, 2, False), (4, 1, False), (2, 2, True)]


@pytest.fixture(scope="module")
def whole(rank_pool):
    @cache
    def of(name):
        (result,) = rank_pool.run(1, route_slice, name=name, tp=1, cp=1, sp=False)
        return result

    return of


@pytest.mark.parametrize(("tp", "cp", "sp"), LAYOUTS)
@pytest.mark.parametrize("name", SLICED)
def test_slices_of_a_microbatch_are_routed_as_a_whole(rank_pool, whole, name, tp, cp, sp):
    results = rank_pool.run(tp * cp, route_slice, name=name, tp=tp, cp=cp, sp=sp)
    wanted = whole(name)
    for result in results:
        positions = result["positions"]
        assert torch.equal(result["ids"], wanted["ids"][positions])
        torch.testing.assert_close(result["probs"], wanted["probs"][positions])
        torch.testing.assert_close(
            result["grad_x"], wanted["grad_x"][positions], rtol=1e-11, atol=1e-13
        )
    for key in ("grad_weight", "counts", "dropped", "rerouted"):
        total = sum(result[key] for result in results)
        torch.testing.assert_close(total, wanted[key], rtol=1e-11, atol=1e-13)
    for term, value in wanted["losses"].items():
        total = sum(result["losses"][term] for result in results)
        torch.testing.assert_close(total, value, rtol=1e-12, atol=0)


def test_capacity_cases_drop_something(whole):
    assert all(whole(name)["dropped"].sum() > 0 for name in SLICED if "capacity" in name)
    assert all(whole(name)["rerouted"] > 0 for name in SLICED if "reroute" in name)


def test_router_talks_only_where_a_decision_needs_the_microbatch(rank_pool):
    def records(name):
        result, _ = rank_pool.run(2, route_slice, name=name, tp=2, cp=1, sp=False)
        return result["records"]

    tokens = SEQUENCE * SAMPLES
    counts = ("all_reduce.sum", EXPERTS)
    per_sample = ("all_reduce.sum", SAMPLES * EXPERTS)
    assert records("post_groups") == []
    assert records("post") == [counts]
    assert records("pre") == [per_sample]
    assert records("sigmoid") == [per_sample]  # one for all three losses
    k = SLICED["capacity_probs"].topk
    assert records("capacity_probs") == [per_sample, ("all_gather", 2 * k * tokens + SEQUENCE)]
    wide = 2 * (SLICED["capacity_reroute"].topk + 3)
    assert records("capacity_reroute") == [per_sample, ("all_gather", wide * tokens + SEQUENCE)]
    assert records("sinkhorn") == [("all_gather", EXPERTS * tokens + SEQUENCE)]
