"""MoE operations: integers equal to a stable sort, rows to float64, gradients, odd routings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops.moe import (
    _combine_backward_reference,
    _combine_reference,
    _gather_reference,
    _route_reference,
    combine,
    gather,
    moe_combine,
    moe_combine_backward,
    moe_gather,
    moe_route,
    moe_scatter_probs,
    moe_splits,
    received_ids,
    route,
    route_capacity,
)
from tests.kernels import moe_routes
from tests.sim import build

# Largest error against fp64 on the same inputs, relative to the largest value.
BOUNDS = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}
PROBS_BOUND = 2e-6  # of the gradients of probabilities, fp32 (1e-14 in fp64)
# tokens, experts, k, align, share of dropped assignments
ROUTINGS = [
    (0, 4, 2, 8, 0.0),
    (1, 1, 1, 1, 0.0),
    (7, 3, 2, 1, 0.3),
    (40, 64, 8, 16, 0.1),  # experts without tokens
    (9, 2, 5, 4, 0.2),  # k > experts
    (30, 8, 2, 8, 1.0),  # nothing left
    (513, 5, 1, 128, 0.0),
]


def drawn_ids(tokens: int, experts: int, k: int, dropped: float) -> Tensor:
    ids = moe_routes.draw_ids(np.random.default_rng(tokens), tokens, experts, k, dropped)
    return torch.from_numpy(ids.astype(np.int32))


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def routed(case: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """row_of and source of one of ROUTINGS."""
    tokens, experts, k, align, dropped = case
    ids = drawn_ids(tokens, experts, k, dropped)
    _, _, row_of, source = moe_route(
        ids, experts, align, route_capacity(tokens * k, experts, align)
    )
    return row_of, source


def probs_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_near(got: Tensor, exact: Tensor, bound: float) -> None:
    assert got.shape == exact.shape
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    assert ((got.double() - exact).abs() <= bound * scale).all()


# ---- routing ---------------------------------------------------------------------------
@pytest.mark.parametrize("case", ROUTINGS, ids=str)
@pytest.mark.parametrize("more", [0, 100])
def test_routing_is_a_stable_order_by_expert(
    native: Native, case: tuple[Any, ...], more: int
) -> None:
    tokens, experts, k, align, dropped = case
    ids = drawn_ids(tokens, experts, k, dropped)
    rows = route_capacity(tokens * k, experts, align) + more
    want = moe_routes.route_reference(ids.numpy(), experts, align, rows)
    for run in (moe_route, _route_reference):
        counts, offsets, row_of, source = run(ids, experts, align, rows)
        assert row_of.shape == ids.shape and row_of.dtype == source.dtype == torch.int32
        assert counts.dtype == offsets.dtype == torch.int64
        got = (counts, offsets, row_of.flatten(), source)
        exact = (want.counts, want.offsets, want.row_of, want.source)
        for mine, theirs in zip(got, exact, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs)


def test_ids_outside_the_experts_are_dropped(native: Native) -> None:
    ids = torch.tensor([[8, -7], [2**31 - 1, -(2**31)], [7, 0]], dtype=torch.int32)
    counts, _, row_of, source = moe_route(ids, 8, 1, 6)
    assert counts.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    assert row_of.tolist() == [[-1, -1], [-1, -1], [1, 0]]
    assert source.tolist() == [5, 4, -1, -1, -1, -1]


def test_integers_equal_those_of_the_simulated_kernels(native: Native) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    kernels = build.load(moe_routes.SOURCES)
    for tokens, experts, k, align, dropped in ROUTINGS[1:]:
        ids = drawn_ids(tokens, experts, k, dropped)
        theirs = moe_routes.route(kernels, ids.numpy(), experts, align)
        counts, offsets, row_of, source = moe_route(ids, experts, align, theirs.source.size)
        np.testing.assert_array_equal(counts, theirs.counts)
        np.testing.assert_array_equal(offsets, theirs.offsets)
        np.testing.assert_array_equal(row_of.flatten(), theirs.row_of)
        np.testing.assert_array_equal(source, theirs.source)


def test_splits_sum_the_experts_of_each_rank(native: Native) -> None:
    counts = torch.arange(12) * 2**31
    for ranks in (1, 2, 6, 12):
        assert torch.equal(moe_splits(counts, ranks), counts.view(ranks, -1).sum(1))


def test_a_dispatch_over_two_ranks_finds_its_way_back(native: Native) -> None:
    """Four experts on two ranks, both ranks played here; expert e multiplies by e + 1."""
    tokens, experts, k, h, tile = 11, 4, 2, 5, 8
    xs = [drawn(tokens, h, dtype=torch.float64, seed=rank) for rank in range(2)]
    probs = [torch.rand(tokens, k, dtype=torch.float64) for _ in range(2)]
    ids = [drawn_ids(tokens + rank, experts, k, 0.2)[:tokens].contiguous() for rank in range(2)]
    routes = [moe_route(i, experts, 1, tokens * k) for i in ids]
    packed = [moe_gather(x, None, r[3], r[2])[0] for x, r in zip(xs, routes, strict=True)]
    splits = [moe_splits(r[0], 2).tolist() for r in routes]
    returned: list[list[Tensor]] = [[], []]
    for rank in range(2):
        arriving = [
            packed[peer].split([*splits[peer], tokens * k - sum(splits[peer])])[rank]
            for peer in range(2)
        ]
        received = torch.cat(arriving)
        counts = torch.stack([r[0].view(2, -1)[rank] for r in routes])
        local = received_ids(counts, len(received))
        rows = route_capacity(len(received), 2, tile)
        _, offsets, row_of, source = moe_route(local, 2, tile, rows)
        tiles, _ = moe_gather(received, None, source, row_of)
        for expert in range(2):
            tiles[offsets[expert] : offsets[expert + 1]] *= 2 * rank + expert + 1
        back = moe_combine(tiles, None, row_of, source)
        for peer, part in enumerate(back.split([len(part) for part in arriving])):
            returned[peer].append(part)
    for rank in range(2):
        own = torch.cat(returned[rank])
        whole = torch.zeros_like(packed[rank])
        whole[: len(own)] = own
        out = moe_combine(whole, probs[rank], routes[rank][2], routes[rank][3])
        factor = torch.where(ids[rank] < 0, 0, ids[rank] + 1) * probs[rank]
        torch.testing.assert_close(out, xs[rank] * factor.sum(1, keepdim=True))


# ---- rows ------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ROUTINGS, ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn],
    ids=str,
)
def test_gather_copies_rows_and_clears_padding(
    native: Native, case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    row_of, source = routed(case)
    tokens, k = row_of.shape
    probs = torch.rand(tokens, k, dtype=torch.float64 if dtype == torch.float64 else None)
    for h in (1, 7, 64):
        x = torch.randint(1, 100, (tokens, h + 3), dtype=torch.uint8).to(dtype)[:, 2 : h + 2]
        packed, packed_probs = moe_gather(x, probs, source, row_of)
        want, want_probs = _gather_reference(x.contiguous(), probs, source, row_of)
        assert packed.dtype == dtype
        assert torch.equal(packed.double(), want.double())
        assert torch.equal(packed_probs, want_probs)
        assert torch.equal(moe_gather(x, None, source, row_of)[0].double(), want.double())
    back = moe_scatter_probs(packed_probs, row_of)
    assert torch.equal(back, torch.where(row_of < 0, 0, probs))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("h", [7, 136])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_combine_and_its_gradients_match_float64(
    level: str, dtype: torch.dtype, h: int, weighted: bool
) -> None:
    for case in ROUTINGS:
        row_of, source = routed(case)
        packed = drawn(len(source), h, dtype=dtype, seed=1)
        packed[source < 0] = torch.nan  # padding reaches nothing
        grad = drawn(row_of.shape[0], h, dtype=dtype, seed=2)
        probs = torch.rand(row_of.shape, dtype=probs_dtype(dtype)) if weighted else None
        wide = None if probs is None else probs.double()
        out = moe_combine(packed, probs, row_of, source)
        exact = _combine_reference(packed.double(), wide, row_of, source)
        assert_near(out, exact, BOUNDS[dtype])
        d_packed, d_probs = moe_combine_backward(grad, packed, probs, row_of, source)
        want = _combine_backward_reference(grad.double(), packed.double(), wide, row_of, source)
        assert_near(d_packed, want[0], BOUNDS[dtype])
        assert not d_packed[source < 0].any()
        assert_near(d_probs, want[1], 1e-14 if dtype == torch.float64 else PROBS_BOUND)
        assert not d_probs[row_of < 0].any() if weighted else d_probs.numel() == 0


@pytest.mark.parametrize("k", [1, 3, 7, 8])
def test_large_results_are_written_past_the_caches_alike(level: str, k: int) -> None:
    tokens, h = 1001, 2400 // k // 16 * 16  # 8 MiB and more, rows of whole lines
    row_of, source = routed((tokens, 16, k, 8, 0.1))
    x = drawn(tokens, h, dtype=torch.float32, seed=k)
    for part in (x, x[:, : h - 1]):  # the second has no whole lines
        packed, _ = moe_gather(part, None, source, row_of)
        assert packed.nbytes >= 8 << 20
        assert torch.equal(packed, _gather_reference(part, None, source, row_of)[0])


def test_results_do_not_depend_on_threads(native: Native) -> None:
    row_of, source = routed((700, 16, 4, 8, 0.1))
    packed, grad = (drawn(n, 96, dtype=torch.float32, seed=n) for n in (len(source), 700))
    probs = torch.rand(700, 4)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(
                [
                    moe_combine(packed, probs, row_of, source),
                    *moe_combine_backward(grad, packed, probs, row_of, source),
                    *moe_gather(grad, probs, source, row_of),
                ]
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strided_rows_are_read_as_they_lie(native: Native) -> None:
    row_of, source = routed((7, 3, 2, 1, 0.3))
    wide = drawn(14, 40, dtype=torch.bfloat16, seed=1)
    x, packed = wide[::2, 3:11], wide.t()[3:11, :14].t()
    assert torch.equal(
        moe_gather(x, None, source, row_of)[0],
        moe_gather(x.contiguous(), None, source, row_of)[0],
    )
    assert torch.equal(
        moe_combine(packed, None, row_of, source),
        moe_combine(packed.contiguous(), None, row_of, source),
    )


# ---- rules -----------------------------------------------------------------------------
@pytest.mark.parametrize("weighted", [True, False])
def test_autograd_and_fake_rules(native: Native, weighted: bool) -> None:
    row_of, source = routed((6, 3, 2, 4, 0.2))
    x = drawn(6, 5, dtype=torch.float64, seed=1).requires_grad_()
    packed = drawn(len(source), 5, dtype=torch.float64, seed=2).requires_grad_()
    probs = torch.rand(6, 2, dtype=torch.float64).requires_grad_() if weighted else None
    leaves = [probs] if probs is not None else []

    def packed_rows(x: Tensor, *probs: Tensor) -> Any:
        rows, packed_probs = moe_gather(x, probs[0] if probs else None, source, row_of)
        return (rows, packed_probs) if probs else rows

    def sums(packed: Tensor, *probs: Tensor) -> Any:
        return moe_combine(packed, probs[0] if probs else None, row_of, source)

    assert torch.autograd.gradcheck(packed_rows, [x, *leaves])
    assert torch.autograd.gradcheck(sums, [packed, *leaves])
    torch.library.opcheck(moe_gather, (x, probs, source, row_of))
    torch.library.opcheck(moe_combine, (packed, probs, row_of, source))
    inner = None if probs is None else probs.detach()
    torch.library.opcheck(
        moe_combine_backward, (x.detach(), packed.detach(), inner, row_of, source)
    )
    torch.library.opcheck(moe_scatter_probs, (torch.rand(len(source)), row_of))
    torch.library.opcheck(moe_splits, (torch.arange(6), 3))
    torch.library.opcheck(moe_route, (drawn_ids(6, 3, 2, 0.2), 3, 4, 40))


def test_native_and_reference_give_the_same_gradients(native: Native) -> None:
    ids, probs = drawn_ids(40, 6, 3, 0.2), torch.rand(40, 3)
    results = []
    for choice in (True, False):
        x = drawn(40, 33, dtype=torch.float32, seed=1).requires_grad_()
        weights = probs.clone().requires_grad_()
        _, _, row_of, source = route(ids, 6, 4, route_capacity(120, 6, 4), choice)
        rows, row_probs = gather(x, weights, source, row_of, choice)
        out = combine(rows.tanh() * row_probs.unsqueeze(1), weights, row_of, source, choice)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weights.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    row_of, source = routed((6, 3, 2, 1, 0.0))
    ids, x, packed = drawn_ids(6, 3, 2, 0.0), torch.zeros(6, 4), torch.zeros(12, 4)
    with pytest.raises(RuntimeError, match="ids: must be contiguous int32 with 2 dims"):
        moe_route(ids.long(), 3, 1, 12)
    with pytest.raises(RuntimeError, match=r"rows: must be in \[33, 2147483647\] for 12"):
        moe_route(ids, 3, 8, 32)
    with pytest.raises(RuntimeError, match=r"experts: must be in \[1, 8192\], not 0"):
        moe_route(ids, 0, 1, 12)
    with pytest.raises(RuntimeError, match="ranks: must divide the 6 experts, not 4"):
        moe_splits(torch.arange(6), 4)
    with pytest.raises(RuntimeError, match="x: has 5 tokens, row_of 6"):
        moe_gather(x[:5], None, source, row_of)
    with pytest.raises(RuntimeError, match="source: holds 99, must be below 12"):
        moe_gather(x, None, torch.full_like(source, 99), row_of)
    with pytest.raises(RuntimeError, match="row_of: holds 12, must be below 12"):
        moe_combine(packed, None, row_of + 1, source)
    with pytest.raises(RuntimeError, match="packed: has 11 rows, source 12"):
        moe_combine(packed[:11], None, row_of, source)
    with pytest.raises(RuntimeError, match="probs: wrong shape"):
        moe_combine(packed, torch.zeros(12), row_of, source)
    with pytest.raises(RuntimeError, match="probs: dtype must be float32"):
        moe_combine(packed, torch.zeros(6, 2, dtype=torch.float64), row_of, source)
    with pytest.raises(RuntimeError, match="grad: wrong shape"):
        moe_combine_backward(x[:5], packed, None, row_of, source)
