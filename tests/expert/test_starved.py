"""Gradients of experts in every layout, and experts or ranks that get no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.expert.dispatch_ranks import run_cases, train
from tests.expert.moe_problem import Case, Layout, answer, draw, own_slice
from tests.pool import RankPool

STACKS = {"gate": 1, "up": 1, "fc2": 2}
DISPATCHERS = ("alltoall", "allgather")


def whole(results: list[dict[str, Any]], name: str, layout: Layout) -> Tensor:
    """[E, out, in] from the slices of the ranks, summed over edp."""
    block = layout.ep * layout.etp
    slices = [
        sum(results[copy * block + place][name].double() for copy in range(layout.edp))
        for place in range(block)
    ]
    stacks = [slices[first : first + layout.etp] for first in range(0, block, layout.etp)]
    return torch.cat([torch.cat(stack, STACKS[name]) for stack in stacks])


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "layout",
    [Layout(1, 1, 4), Layout(2, 1, 2), Layout(4, 1), Layout(1, 2, 2), Layout(2, 2)],
    ids=str,
)
def test_c056_gradients_of_experts_have_one_scale_in_every_layout(
    rank_pool: RankPool, layout: Layout, dispatcher: str
) -> None:
    """The same global batch on four ranks: each expert's raw gradient is that of one process."""
    case = Case("random", k=2)
    by_rank = rank_pool.run(
        layout.world, run_cases, cases=[case], layout=layout, dispatcher=dispatcher, native=False
    )
    results = [result for (result,) in by_rank]
    for name in STACKS:
        got, want = whole(results, name, layout), answer(case)[name]
        for expert in range(case.experts):
            assert want[expert].norm() > 1e-3
            ratio = (got[expert].norm() / want[expert].norm()).item()
            assert ratio == pytest.approx(1, abs=1e-6), (name, expert)
            torch.testing.assert_close(got[expert], want[expert], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(4, 1), Layout(2, 2)], ids=str)
def test_c065_experts_and_ranks_without_tokens_end_finite_and_unchanged(
    rank_pool: RankPool, layout: Layout, dispatcher: str
) -> None:
    """Three steps in which expert 0 gets all; three more with other empty experts per rank."""
    base = Case("one", k=1, experts=4)
    later = [replace(base, routing=r, seed=9) for r in ("crossed", "lone", "none")]
    for cases, busy in (([base] * 3, {0}), ([*later[:1]] * 2 + later[1:], {0, 2, 3})):
        ((alone, _),) = rank_pool.run(
            1, train, cases=cases, layout=Layout(1, 1), dispatcher=dispatcher
        )
        spread = rank_pool.run(
            layout.world, train, timeout_s=60, cases=cases, layout=layout, dispatcher=dispatcher
        )
        start = draw(cases[0])
        for rank, (weights, gradients) in enumerate(spread):
            ep_rank, _ = layout.place(rank)
            held = base.experts // layout.ep
            for name, dim in STACKS.items():
                assert torch.isfinite(weights[name]).all()
                want = own_slice(alone[name], dim, layout, rank)
                torch.testing.assert_close(weights[name], want, rtol=1e-12, atol=1e-13)
                before = own_slice(getattr(start, name), dim, layout, rank)
                for local in range(held):
                    idle = ep_rank * held + local not in busy
                    assert torch.equal(weights[name][local], before[local]) == idle
                    assert not (idle and gradients[name][local].any())
