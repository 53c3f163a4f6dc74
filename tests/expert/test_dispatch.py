"""Dispatch: outputs and every gradient equal a plain loop in float64, in every layout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.expert.dispatch import run_experts
from megatron_lite.expert.grouped import grouped_linear
from megatron_lite.microbatch import WeightGradientStore
from megatron_lite.native.load import load_native
from megatron_lite.telemetry.meters import LiveStorageMeter
from tests.expert.dispatch_ranks import groups_of, order_of_events, run_cases
from tests.expert.moe_problem import (
    PARAMS,
    ROUTINGS,
    Case,
    Layout,
    Sink,
    answer,
    build_parts,
    context,
    draw,
    own_slice,
)
from tests.pool import RankPool

LAYOUTS = [
    *(Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(1, 1, 2)),
    *(Layout(4, 1), Layout(2, 2), Layout(2, 1, 2), Layout(1, 2, 2)),
]
DISPATCHERS = ("alltoall", "allgather")
CASES = [
    *(Case(routing, bias=bias) for routing in ROUTINGS for bias in (False, True)),
    *(Case("random", k=1), Case("dropped", k=8, bias=True), Case("one", k=1)),
    *(Case("random", tokens=4), Case("random", h=6, f=10)),
]
# Norm of the error against float64 on the same inputs over the norm of the answer. In bf16
# the rows, the results of both linears and the parts of etp are rounded.
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param and load_native().library is None:
        pytest.skip("no native library")
    return bool(request.param)


def run(pool: RankPool, layout: Layout, cases: list[Case], **kwargs: Any) -> list[list[Any]]:
    """Results by case, then by rank."""
    by_rank = pool.run(layout.world, run_cases, cases=cases, layout=layout, **kwargs)
    return [list(results) for results in zip(*by_rank, strict=True)]


def assert_near(got: Tensor, want: Tensor, bound: float, what: str) -> None:
    error = (got.double() - want).norm().item()
    assert error <= bound * max(want.norm().item(), 1e-30), f"{what}: {error}"


def assert_matches(case: Case, layout: Layout, results: list[dict[str, Any]]) -> None:
    """Tokens of all ranks, and each rank's slice of the experts summed over edp and etp copies."""
    want, bound = answer(case), BOUNDS[case.dtype]
    for name in ("out", "x", "probs"):
        got = torch.cat([result[name] for result in results])
        assert torch.isfinite(got).all()
        assert_near(got, want[name], bound, name)
    for name, (_, dim) in PARAMS.items():
        if name not in results[0]:
            continue
        block = layout.ep * layout.etp
        for place in range(block):
            # The bias of the second linear is whole on every etp rank, and its gradient partial.
            first = place // layout.etp * layout.etp
            parts = range(first, first + layout.etp) if dim is None else (place,)
            holders = [copy * block + part for copy in range(layout.edp) for part in parts]
            got = sum(results[holder][name].double() for holder in holders)
            assert isinstance(got, Tensor)
            assert_near(got, own_slice(want[name], dim, layout, place), bound, f"{name} of {place}")
    for result in results:
        assert all(result[f"{name} written"] == 1 for name in PARAMS if name in result)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_routing_matches_a_plain_loop_in_every_layout(
    rank_pool: RankPool, layout: Layout, dispatcher: str
) -> None:
    by_case = run(rank_pool, layout, CASES, dispatcher=dispatcher, native=False)
    for case, results in zip(CASES, by_case, strict=True):
        assert_matches(case, layout, results)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_eight_ranks_match_a_plain_loop(rank_pool: RankPool, dispatcher: str) -> None:
    cases, layout = [Case("dropped", k=8, bias=True), Case("lone")], Layout(4, 2)
    by_case = run(rank_pool, layout, cases, dispatcher=dispatcher, native=False)
    for case, results in zip(cases, by_case, strict=True):
        assert_matches(case, layout, results)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(2, 2)], ids=str)
def test_dtypes_match_with_and_without_native_operations(
    rank_pool: RankPool, layout: Layout, dispatcher: str, dtype: torch.dtype, native: bool
) -> None:
    cases = [
        *(Case("random", dtype=dtype), Case("dropped", k=8, dtype=dtype, bias=True)),
        *(Case("one", k=1, dtype=dtype), Case("lone", dtype=dtype), Case("none", dtype=dtype)),
        Case("random", dtype=dtype, h=10, f=6),
    ]
    by_case = run(rank_pool, layout, cases, dispatcher=dispatcher, native=native)
    for case, results in zip(cases, by_case, strict=True):
        assert_matches(case, layout, results)
        assert results[0]["out"].dtype == dtype


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_experts_without_tokens_get_exactly_nothing(rank_pool: RankPool, dispatcher: str) -> None:
    """All tokens choose expert 7; gradients of the others are written and 0, bit for bit."""
    layout = Layout(2, 1)
    (results,) = run(rank_pool, layout, [Case("last")], dispatcher=dispatcher, native=False)
    for name in ("gate", "up", "fc2"):
        whole = torch.cat([result[name] for result in results])
        assert not whole[:7].any()
        assert whole[7].any()


def test_all_to_all_gives_the_bits_of_one_rank(rank_pool: RankPool) -> None:
    """Rows of an expert are ordered by (source rank, token), so EP changes no product."""
    cases = [Case("random", dtype=torch.float32), Case("dropped", k=8, dtype=torch.float32)]
    alone = run(rank_pool, Layout(1, 1), cases, dispatcher="alltoall", native=False)
    for ep in (2, 4):
        spread = run(rank_pool, Layout(ep, 1), cases, dispatcher="alltoall", native=False)
        for (one,), many in zip(alone, spread, strict=True):
            for name in ("out", "x", "probs", "gate", "up", "fc2"):
                assert torch.equal(one[name], torch.cat([result[name] for result in many])), name


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(2, 2), Layout(2, 1, 2)], ids=str)
def test_all_to_all_sends_each_row_once_per_direction(rank_pool: RankPool, layout: Layout) -> None:
    cases = [Case("random", k=2), Case("dropped", k=8), Case("one", k=2)]
    by_case = run(rank_pool, layout, cases, dispatcher="alltoall", native=False)
    for case, results in zip(cases, by_case, strict=True):
        ids = draw(case).ids.chunk(layout.world)
        sent_in_all = received_in_all = 0
        for rank, result in enumerate(results):
            assert {(op, group) for _, op, group, _ in result["records"]} == {
                ("all_to_all", "expert_block")
            }
            counts, there, back, *none = [n for p, _, _, n in result["records"] if p == "forward"]
            assert not none
            assert counts == case.experts * layout.etp
            assert there == int((ids[rank] >= 0).sum()) * layout.etp * case.h
            if case.routing != "dropped":
                t = case.tokens // layout.world
                assert there == case.k * t * layout.etp * case.h
            backward = [n for p, _, _, n in result["records"] if p == "backward"]
            assert backward == [there, back]
            sent_in_all, received_in_all = sent_in_all + there, received_in_all + back
        assert sent_in_all == received_in_all


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(2, 2)], ids=str)
def test_all_gather_sends_the_same_whatever_the_routing(
    rank_pool: RankPool, layout: Layout
) -> None:
    cases = [Case("random"), Case("none"), Case("one")]
    for case, results in zip(
        cases,
        run(rank_pool, layout, cases, dispatcher="allgather", native=False),
        strict=True,
    ):
        all_x, choices = case.tokens * case.h, case.tokens * case.k
        want = Counter(
            {
                ("forward", "all_gather", all_x): 1,
                ("forward", "all_gather", 2 * choices): 1,
                ("forward", "reduce_scatter.sum", all_x): 1,
                ("backward", "all_gather", all_x): 1,
                ("backward", "reduce_scatter.sum", all_x): 1,
                ("backward", "reduce_scatter.sum", choices): 1,
            }
        )
        for result in results:
            assert Counter((p, op, n) for p, op, _, n in result["records"]) == want


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(4, 1), Layout(2, 2)], ids=str)
def test_the_host_reads_counts_once_per_layer_and_pass(
    rank_pool: RankPool, layout: Layout, dispatcher: str
) -> None:
    cases = [Case("random"), Case("dropped", bias=True)]
    for results in run(rank_pool, layout, cases, dispatcher=dispatcher, native=False):
        for result in results:
            assert result["reads"] == ({"tolist": 1}, {})


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 2)], ids=str)
def test_weight_gradients_wait_for_w(rank_pool: RankPool, layout: Layout, dispatcher: str) -> None:
    """I leaves weight gradients to W; biases and the input's gradient do not wait."""
    cases = [Case("random", bias=True)]
    (results,) = run(rank_pool, layout, cases, dispatcher=dispatcher, native=False, deferred=True)
    assert_matches(cases[0], layout, results)
    for result in results:
        for name in ("gate", "up", "fc2"):
            assert (result[f"{name} early"], result[f"{name} written"]) == (0, 1)
        assert result["up_bias early"] == 1


def test_other_work_runs_while_tokens_travel(rank_pool: RankPool) -> None:
    """Forward between departure and arrival of the tokens, backward of their gradients."""
    for forward, backward, got, want in rank_pool.run(2, order_of_events, layout=Layout(2, 1)):
        assert forward == ["depart", "meanwhile", "arrive", "depart", "arrive"]
        assert backward == ["depart", "arrive", "depart", "meanwhile back", "arrive"]
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_packed_rows_are_not_kept_on_one_rank() -> None:
    """Alive between the passes: results of k*t*h and index maps, no copy of the rows."""
    if load_native().library is None:
        pytest.skip("no native library")
    case = Case("random", k=8, dtype=torch.float32, h=256, f=256, tokens=64)
    layout, problem = Layout(1, 1), draw(case)
    parts = build_parts(case, problem, layout, groups_of(layout, 0), "alltoall")
    weight = parts.params["experts.linear_gate.weight"]
    mb = context(WeightGradientStore(Sink()), True)
    x = problem.x.clone().requires_grad_()
    with LiveStorageMeter() as meter:
        meter.track([x, problem.ids, problem.probs, weight])
        before = meter.live_bytes
        out = run_experts(
            parts,
            x,
            problem.ids,
            problem.probs,
            lambda rows, where: grouped_linear(rows, weight, None, where, mb),
            mb,
        )
        kept = meter.live_bytes - before
    rows_bytes = case.k * case.tokens * case.h * 4
    assert rows_bytes <= kept < 1.2 * rows_bytes + out.numel() * 4
