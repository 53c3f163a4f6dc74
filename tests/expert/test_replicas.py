"""Replicated experts: outputs and every gradient equal a plain loop, whoever computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lite.expert.replicas import bring_replicas, hot_experts
from megatron_lite.native.load import load_native
from tests.expert.dispatch_ranks import groups_of
from tests.expert.moe_problem import ROUTINGS, Case, Layout, build_parts, context, draw
from tests.expert.replica_ranks import kept_bytes, run_cases, with_counts
from tests.expert.test_dispatch import assert_matches
from tests.pool import RankPool

LAYOUTS = [Layout(2, 1), Layout(4, 1), Layout(2, 2), Layout(2, 1, 2), Layout(4, 2)]
HOT = (6, 0, 1)  # of two ranks, not in their order; 1 has no row where all go to 0
CASES = [
    *(Case(routing, bias=bias) for routing in ROUTINGS for bias in (False, True)),
    *(Case("random", k=1), Case("dropped", k=8, bias=True), Case("one", k=1)),
    *(Case("random", tokens=8), Case("random", h=6, f=12)),
]
HIDDEN, WIDTH = 16, 32


def run(
    pool: RankPool, layout: Layout, cases: list[Case], hot: Sequence[int] = HOT, **kwargs: Any
) -> list[list[dict[str, Any]]]:
    """Results by case, then by rank."""
    by_rank = pool.run(layout.world, run_cases, cases=cases, hot=hot, layout=layout, **kwargs)
    return [list(results) for results in zip(*by_rank, strict=True)]


def hot_elements(layout: Layout, hot: Sequence[int], bias: bool) -> int:
    """Weights of the hot experts that one rank has a slice of."""
    width = WIDTH // layout.etp
    return len(hot) * (3 * HIDDEN * width + (2 * width + HIDDEN if bias else 0))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_routing_matches_a_plain_loop_in_every_layout(
    rank_pool: RankPool, layout: Layout, again: bool
) -> None:
    for case, results in zip(CASES, run(rank_pool, layout, CASES, again=again), strict=True):
        assert_matches(case, layout, results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
def test_dtypes_match_with_and_without_native_operations(
    rank_pool: RankPool, dtype: torch.dtype, native: bool
) -> None:
    if native and load_native().library is None:
        pytest.skip("no native library")
    cases = [Case("random", dtype=dtype), Case("dropped", k=8, dtype=dtype, bias=True)]
    cases += [Case("one", k=1, dtype=dtype), Case("none", dtype=dtype)]
    for layout in (Layout(2, 1), Layout(2, 2)):
        for case, results in zip(cases, run(rank_pool, layout, cases, native=native), strict=True):
            assert_matches(case, layout, results)


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 2)], ids=str)
def test_owners_report_once_and_may_wait_for_w(rank_pool: RankPool, layout: Layout) -> None:
    case = Case("random", bias=True)
    (results,) = run(rank_pool, layout, [case], deferred=True)
    assert_matches(case, layout, results)
    for result in results:
        for name in ("gate", "up", "fc2"):
            assert (result[f"{name} early"], result[f"{name} written"]) == (0, 1)


def test_frozen_weights_are_brought_and_get_no_gradient(rank_pool: RankPool) -> None:
    """The middle one of three, so the others' gradients must still find their places."""
    case, layout = Case("random"), Layout(2, 1)
    (results,) = run(rank_pool, layout, [case], frozen=True)
    assert all("up" not in result for result in results)
    assert_matches(case, layout, results)


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(2, 2), Layout(2, 1, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_weights_travel_once_there_and_gradients_once_back(
    rank_pool: RankPool, layout: Layout, bias: bool
) -> None:
    """Counted: one all-reduce over ep in each pass, N more slots per rank in the counts."""
    cases = [Case("random", bias=bias), Case("one", k=1, bias=bias)]
    weights = ("all_reduce.sum", "ep", hot_elements(layout, HOT, bias))
    for case, results in zip(cases, run(rank_pool, layout, cases), strict=True):
        for result in results:
            by_phase = {
                phase: [(op, group, n) for p, op, group, n in result["records"] if p == phase]
                for phase in ("forward", "backward")
            }
            brought, counts, *rows = by_phase["forward"]
            assert brought == weights
            slots = (case.experts + layout.ep * len(HOT)) * layout.etp
            assert counts == ("all_to_all", "expert_block", slots)
            assert {op for op, _, _ in rows} == {"all_to_all"}
            assert len(rows) == 2
            there, summed, back = by_phase["backward"]
            assert summed == weights
            assert [there, back] == rows
            assert result["reads"] == ({"tolist": 1}, {})


def test_a_second_forward_pass_brings_the_weights_again(rank_pool: RankPool) -> None:
    layout, case = Layout(2, 1), Case("random")
    (results,) = run(rank_pool, layout, [case], again=True)
    for result in results:
        reduced = [(phase, n) for phase, op, _, n in result["records"] if op == "all_reduce.sum"]
        n = hot_elements(layout, HOT, bias=False)
        assert reduced == [("forward", n), ("backward", n), ("backward", n)]


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(4, 1), Layout(2, 2)], ids=str)
def test_rows_for_hot_experts_stay_with_their_expert_rank(
    rank_pool: RankPool, layout: Layout
) -> None:
    cases = [Case("random"), Case("dropped", k=8), Case("one", k=2), Case("last")]
    local = cases[0].experts // layout.ep
    for hot in ((), HOT):
        for case, results in zip(cases, run(rank_pool, layout, cases, hot), strict=True):
            for rank, result in enumerate(results):
                ids = draw(case).ids.chunk(layout.world)[rank]
                ep_rank, _ = layout.place(rank)
                is_hot = torch.isin(ids, torch.tensor(hot, dtype=ids.dtype))
                stays = is_hot | (ids // local == ep_rank)
                kept = int(((ids >= 0) & stays).sum())
                away = int((ids >= 0).sum()) - kept
                # To each of the etp ranks; what is for this very rank does not leave it.
                assert result["sent"][0] == away * layout.etp + kept * (layout.etp - 1)


def test_a_batch_for_one_hot_expert_leaves_no_rank_idle_and_sends_nothing(
    rank_pool: RankPool,
) -> None:
    case, layout = Case("one", k=1), Layout(4, 1)
    (cold,), (hot,) = run(rank_pool, layout, [case], ()), run(rank_pool, layout, [case], (0,))
    assert [result["sent"] for result in cold][1:] == [[6, 0, 6, 0]] * 3  # there, back, twice
    assert [result["sent"] for result in hot] == [[0, 0, 0, 0]] * 4
    assert_matches(case, layout, hot)


def test_the_weights_of_hot_experts_are_kept_and_nothing_else(rank_pool: RankPool) -> None:
    if load_native().library is None:
        pytest.skip("no native library")
    case = Case("random", dtype=torch.float32, h=64, f=96, tokens=64)
    layout = Layout(2, 1)
    kept = [
        sum(rank_pool.run(layout.world, kept_bytes, case=case, hot=hot, layout=layout))
        for hot in ((), HOT)
    ]
    weights_bytes = layout.world * len(HOT) * 3 * case.h * case.f * 4
    assert kept[1] - kept[0] == pytest.approx(weights_bytes, rel=0.02)


def test_hot_are_the_most_chosen_and_of_equal_ones_the_lower() -> None:
    layout, case = Layout(1, 1), Case()
    parts = build_parts(case, draw(case), layout, groups_of(layout, 0), "alltoall")
    counted = with_counts(parts, (6, 0, 1), frozen=False)
    assert hot_experts(counted).tolist() == [6, 0, 1]
    counts = counted.state("expert_counts")
    assert counts is not None
    counts.copy_(torch.tensor([1.0, 7, 3, 7, 3, 0, 7, 3]))
    assert hot_experts(counted).tolist() == [1, 3, 6]
    wider = replace(counted, shape=replace(counted.shape, replicated=5))
    assert hot_experts(wider).tolist() == [1, 3, 6, 2, 4]
    counts.zero_()  # before the first step
    assert hot_experts(counted).tolist() == [0, 1, 2]


def _none_outside_training(layout: Layout, rank: int) -> tuple[bool, bool]:
    case = Case()
    parts = build_parts(case, draw(case), layout, groups_of(layout, rank), "alltoall")
    parts, mb = with_counts(parts, HOT, frozen=False), context(None, False)
    evaluating = replace(mb, training=False)
    return bring_replicas(parts, evaluating) is None, bring_replicas(parts, mb) is None


def test_one_expert_rank_and_evaluation_bring_nothing(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, _none_outside_training, layout=Layout(1, 1)) == [(True, True)]
    assert rank_pool.run(2, _none_outside_training, layout=Layout(1, 2)) == [(True, True)] * 2
    assert rank_pool.run(2, _none_outside_training, layout=Layout(2, 1)) == [(True, False)] * 2
