"""Products of many experts: the loop and torch's grouped product agree, gradients accumulate."""

from __future__ import annotations

import weakref
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.expert import grouped
from megatron_lite.expert.grouped import (
    ExpertRows,
    PackedTokens,
    grouped_linears,
)
from megatron_lite.microbatch import WeightGradientStore
from megatron_lite.ops.moe import gather, route
from tests.expert.moe_problem import EARLIER, Sink, context

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}
COUNTS = [(5, 0, 3, 1), (0, 0, 9, 0), (0, 0, 0, 0), (1, 0, 0, 0)]


def rows_of(counts: tuple[int, ...]) -> ExpertRows:
    offsets = (0, *accumulate(counts))
    return ExpertRows(offsets, torch.tensor(offsets[1:], dtype=torch.int32))


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    bound = BOUNDS[got.dtype] * max(want.norm().item(), 1e-30)
    assert (got.double() - want).norm().item() <= bound


@pytest.mark.parametrize("path", ["loop", "grouped", "throughout"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("h", "f"), [(16, 24), (5, 7)])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_products_match_float64(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    dtype: torch.dtype,
    counts: tuple[int, ...],
    h: int,
    f: int,
    biased: bool,
) -> None:
    """Two linears on the same rows, one with a bias; the main gradients hold something."""
    if path == "loop":
        monkeypatch.setattr(grouped, "_grouped_mm", None)
    monkeypatch.setitem(grouped._MOST_GROUPED, "cpu", 2)
    # As on CUDA: every product by one call, where torch has it.
    monkeypatch.setitem(grouped._GROUPED_THROUGHOUT, "cpu", path == "throughout")
    rows, n = rows_of(counts), len(counts)
    x = draw(dtype, sum(counts), h).requires_grad_()
    weights = [nn.Parameter(draw(dtype, n, f, h)), nn.Parameter(draw(dtype, n, 2 * f, h))]
    bias = nn.Parameter(draw(dtype, n, f))
    sink = Sink()
    mb = context(WeightGradientStore(sink), False)
    out = grouped_linears(x, weights, (bias if biased else None, None), rows, mb)
    grad = draw(dtype, sum(counts), 3 * f)
    out.backward(grad)
    assert x.grad is not None
    experts = torch.repeat_interleave(torch.arange(n), torch.tensor(counts))
    whole = torch.cat([weight.detach().double() for weight in weights], dim=1)
    wide_x, wide = x.detach().double(), grad.double()
    want = torch.einsum("ri,roi->ro", wide_x, whole[experts])
    if biased:
        want[:, :f] += bias.detach().double()[experts]
    assert_near(out.detach(), want)
    assert_near(x.grad, torch.einsum("ro,roi->ri", wide, whole[experts]))
    wgrad = torch.zeros_like(whole).index_add_(0, experts, wide.unsqueeze(2) * wide_x.unsqueeze(1))
    bgrad = torch.zeros(n, f, dtype=torch.float64).index_add_(0, experts, wide[:, :f])
    expected = [(weights[0], wgrad[:, :f]), (weights[1], wgrad[:, f:])]
    for param, exact in [*expected, (bias, bgrad)] if biased else expected:
        main = sink.main_grad(param)
        assert main.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # In bf16 without native operations a product is rounded before it is added.
        bound = BOUNDS[dtype] * max(exact.norm().item(), 1e-30)
        assert (main.double() - EARLIER - exact).norm().item() <= bound + 1e-6 * main.norm().item()
        empty = [expert for expert, count in enumerate(counts) if count == 0]
        assert torch.equal(main[empty], torch.full_like(main[empty], EARLIER))
        assert sink.counts[id(param)] == 1


def test_grouped_product_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    if grouped._grouped_mm is None:
        pytest.skip("this torch has no grouped product")
    calls = []
    plain = grouped._grouped_mm

    def counting(*args: Tensor, **kwargs: Tensor) -> Tensor:
        calls.append(args[0].dtype)
        return plain(*args, **kwargs)

    monkeypatch.setattr(grouped, "_grouped_mm", counting)
    rows = rows_of((2, 0, 3))
    for dtype, h, weights, used in (
        *((torch.float32, 16, 1, 2), (torch.bfloat16, 16, 1, 2)),
        *((torch.float64, 16, 1, 0), (torch.float32, 5, 1, 0), (torch.float32, 16, 2, 0)),
    ):
        calls.clear()
        x = draw(dtype, 5, h).requires_grad_()
        mb = context(WeightGradientStore(Sink()), False)
        params = [nn.Parameter(draw(dtype, 3, 8, h)) for _ in range(weights)]
        out = grouped_linears(x, params, [None] * weights, rows, mb)
        out.backward(torch.ones_like(out))
        assert len(calls) == used, (dtype, h, weights)


def test_no_loop_over_experts_where_products_are_grouped_throughout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if grouped._grouped_mm is None:
        pytest.skip("this torch has no grouped product")

    def looped(rows: ExpertRows) -> list[tuple[int, int, int]]:
        raise AssertionError("a loop over experts")

    monkeypatch.setattr(ExpertRows, "segments", looped)
    monkeypatch.setitem(grouped._MOST_GROUPED, "cpu", 8)
    monkeypatch.setitem(grouped._GROUPED_THROUGHOUT, "cpu", True)
    x = draw(torch.bfloat16, 5, 16).requires_grad_()
    weights = [nn.Parameter(draw(torch.bfloat16, 3, 8, 16)) for _ in range(2)]
    biases = [nn.Parameter(draw(torch.bfloat16, 3, 8)) for _ in range(2)]
    mb = context(WeightGradientStore(Sink()), False)
    out = grouped_linears(x, weights, biases, rows_of((2, 0, 3)), mb)
    out.backward(draw(torch.bfloat16, 5, 16))
    with pytest.raises(AssertionError, match="a loop over experts"):  # by the other way
        monkeypatch.setitem(grouped._GROUPED_THROUGHOUT, "cpu", False)
        grouped_linears(x, weights, biases, rows_of((2, 0, 3)), mb)


def test_rows_are_packed_again_only_for_the_tensor_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gathered once more for two weights together; another input of the same shape is kept."""
    tokens = draw(torch.float64, 4, 6)
    ids = torch.tensor([[1, 0], [0, -1], [1, 2], [2, 0]], dtype=torch.int32)
    _, bounds, row_of, source = route(ids, 3, 1, 8, False)
    source = source[:7]
    x, _ = gather(tokens, None, source, row_of, False)
    packed = PackedTokens(tokens, source, row_of, weakref.ref(x))
    rows = ExpertRows(tuple(bounds.tolist()), bounds[1:].int(), packed)
    times = []
    monkeypatch.setattr(grouped, "gather", lambda *args: times.append(1) or gather(*args))
    for inputs, repacked in ((x, 1), (x.clone(), 0)):
        for deferred in (False, True):
            weights = [nn.Parameter(draw(torch.float64, 3, 5, 6)) for _ in range(2)]
            sink, plain = Sink(), Sink()
            store = WeightGradientStore(sink, deferred)
            times.clear()
            out = grouped_linears(inputs, weights, (None, None), rows, context(store, False))
            out.backward(torch.ones_like(out))
            store.flush()
            assert len(times) == repacked
            kept = context(WeightGradientStore(plain), False)
            without = ExpertRows(rows.offsets, rows.ends)
            grouped_linears(inputs, weights, (None, None), without, kept).sum().backward()
            for weight in weights:
                assert torch.equal(sink.main_grad(weight), plain.main_grad(weight))


def test_frozen_weights_get_no_gradient() -> None:
    frozen = nn.Parameter(draw(torch.float64, 2, 3, 4), requires_grad=False)
    trained = nn.Parameter(draw(torch.float64, 2, 3, 4))
    x = draw(torch.float64, 5, 4).requires_grad_()
    sink = Sink()
    mb = context(WeightGradientStore(sink), False)
    grouped_linears(x, (frozen, trained), (None, None), rows_of((2, 3)), mb).sum().backward()
    assert list(sink.counts) == [id(trained)]
    assert x.grad is not None
