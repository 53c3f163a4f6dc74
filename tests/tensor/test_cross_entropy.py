"""The head: loss and gradients equal fp64 in chunks and shards, within its memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import load_native
from megatron_lite.telemetry.meters import LiveStorageMeter
from megatron_lite.tensor import cross_entropy
from megatron_lite.tensor.cross_entropy import chunk_count
from tests.pool import RankPool
from tests.tensor.cross_entropy_head import ALONE, B, H, S, answer, draw, run_head, run_rank

# Norm of the error against fp64 on the same inputs over the norm of the result: loss, hidden
# gradient, weight gradient. In 16 bits each logit and each gradient of one are rounded.
BOUNDS = {
    torch.float64: (1e-13, 1e-13, 1e-13),
    torch.float32: (1e-6, 2e-6, 2e-6),
    torch.bfloat16: (4e-3, 1.5e-2, 1.5e-2),
    torch.float16: (5e-4, 2e-3, 2e-3),
}
V, PADDED = 101, 104


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param and load_native().library is None:
        pytest.skip("no native library")
    return bool(request.param)


def share_of_norm(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("chunks", [1, 5, 1000])
def test_loss_and_gradients_match_float64(
    monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype, chunks: int
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 1)
    problem = draw(dtype, V, PADDED)
    got, want = run_head(problem, native, chunks), answer(problem)
    for name, exact, bound in zip(("loss", "hidden", "weight"), want, BOUNDS[dtype], strict=True):
        assert share_of_norm(got[name], exact) <= bound, name
    assert got["written"] == 1
    assert not got["weight"][V:].any()
    assert not got["hidden"][problem.weights == 0].any()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("tp", "v", "sp"), [(2, V, False), (2, V, True), (4, 70, False)], ids=["tp2", "tp2+sp", "tp4"]
)
def test_shards_match_float64(
    rank_pool: RankPool, native: bool, tp: int, v: int, sp: bool, dtype: torch.dtype
) -> None:
    """With v = 70 the last of four ranks holds padding only."""
    results = rank_pool.run(
        tp, run_rank, dtype=dtype, v=v, padded=PADDED, sp=sp, chunks=3, native=native
    )
    loss, hidden, weight = answer(draw(dtype, v, PADDED))
    bounds = BOUNDS[dtype]
    for result in results:
        assert share_of_norm(result["loss"], loss) <= bounds[0]
    rows = torch.cat([result["weight"] for result in results])
    assert share_of_norm(rows, weight) <= bounds[2]
    assert not rows[v:].any()
    slices = [r["hidden"] for r in results] if sp else [results[0]["hidden"]]
    assert share_of_norm(torch.cat(slices), hidden) <= bounds[1]
    expected = Counter({("all_reduce.max", S * B // 3): 3, ("all_reduce.sum", 2 * S * B // 3): 3})
    if sp:
        expected["all_gather", S * B * H] = 1
        expected["reduce_scatter.sum", S * B * H] = 1
    else:
        expected["all_reduce.sum", S * B * H] = 1
    assert Counter(results[0]["records"]) == expected


def test_frozen_weight_gets_no_gradient(native: bool) -> None:
    problem = draw(torch.float32, V, PADDED)
    got = run_head(problem, native, frozen=True)
    assert got["written"] == 0
    assert not got["weight"].any()
    assert share_of_norm(got["hidden"], answer(problem)[1]) <= BOUNDS[torch.float32][1]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_evaluation_gives_the_losses_of_training(native: bool, dtype: torch.dtype) -> None:
    problem = draw(dtype, V, PADDED)
    hidden, target = problem.hidden.flatten(0, 1), problem.labels.flatten()
    weight = problem.weight[:V]
    run = cross_entropy._head
    losses = run(hidden, weight, target, None, 2, ALONE, None, None, native)
    scale = torch.ones_like(losses)
    grad = torch.empty_like(hidden)
    assert torch.equal(run(hidden, weight, target, scale, 2, ALONE, None, grad, native), losses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_is_an_eighth_of_fp32_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Storages alive in tensors; what an operation allocates inside itself is not seen."""
    if load_native().library is None:
        pytest.skip("no native library")
    t, v, h = 512, 4000, 8
    budget = t * v * 4 // 8
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", budget)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(t, h, generator=generator).to(dtype)
    weight = torch.randn(v, h, generator=generator).to(dtype)
    target, scale = torch.randint(0, v, (t,), generator=generator), torch.ones(t)
    main, grad = torch.zeros(v, h), torch.empty_like(hidden)
    chunks = chunk_count(t, v, 64, dtype.itemsize)
    with LiveStorageMeter() as meter:
        meter.track([hidden, weight, target, scale, main, grad])
        before = meter.live_bytes
        meter.reset_peak()
        cross_entropy._head(hidden, weight, target, scale, chunks, ALONE, main, grad, True)
    assert chunks == (4 if dtype == torch.bfloat16 else 8)
    per_token = 64 * t  # losses and statistics
    assert meter.peak_bytes - before <= budget + per_token


def test_chunks_are_as_few_as_memory_allows() -> None:
    assert chunk_count(2048, 32000, 64, 4) == 8
    assert chunk_count(2048, 32000, 64, 2) == 4
    assert chunk_count(2048, 32000, 3) == 3
    assert chunk_count(5, 2**40, 64) == 5
    assert chunk_count(1, 0, 8) == 1
