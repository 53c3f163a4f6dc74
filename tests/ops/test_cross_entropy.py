"""Cross-entropy's operations: native equals fp64, shards equal the whole, gradients, odd inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.native.load import Native
from megatron_lite.ops.cross_entropy import _cross_entropy as differentiable
from megatron_lite.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_,
    cross_entropy_gradient_,
    cross_entropy_statistics,
    gradient_reference,
    rebase,
    statistics_reference,
    whole_reference,
)
from megatron_lite.ops.norm import accumulation_dtype

# Largest error against fp64 on the same rounded logits: of losses relative to 3 + |largest
# term|; of gradients, beside one rounding to the dtype, relative to the scale.
LOSS_BOUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
GRAD_BOUND = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
HALF_ULP = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
SUBNORMAL = {torch.float16: 2.0**-25}  # half the step
DTYPES = list(LOSS_BOUND)
# (label smoothing, z-loss)
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.2, 1e-4)]


def drawn(t: int, v: int, dtype: torch.dtype, seed: int = 0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(t, v, dtype=torch.float64, generator=generator) + shift).to(dtype)


def labels_and_scale(t: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    scale = torch.rand(t, dtype=torch.float64, generator=generator) + 0.1
    return torch.randint(0, v, (t,), generator=generator), scale.to(accumulation_dtype(dtype))


def oracle(
    logits: Tensor, target: Tensor, scale: Tensor, smoothing: float, z: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, gradient, size of the largest term per token; torch's own operations in fp64."""
    x = logits.detach().double().requires_grad_()
    nll = functional.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
    lse = x.logsumexp(-1)
    loss = nll + z * lse.square()
    (grad,) = torch.autograd.grad(loss, x, scale.double())
    return loss.detach(), grad, 3 + nll.detach().abs() + z * lse.detach().square()


def assert_near(
    loss: Tensor, grad: Tensor, logits: Tensor, target: Tensor, scale: Tensor, terms: Any
) -> None:
    dtype = logits.dtype
    want_loss, want_grad, largest = oracle(logits, target, scale, *terms)
    assert loss.dtype == accumulation_dtype(dtype)
    assert grad.dtype == dtype
    assert ((loss.double() - want_loss).abs() <= LOSS_BOUND[dtype] * largest).all()
    factor = scale.double().unsqueeze(-1) * largest.unsqueeze(-1)
    bound = HALF_ULP[dtype] * want_grad.abs() + GRAD_BOUND[dtype] * factor
    assert ((grad.double() - want_grad).abs() <= bound + SUBNORMAL.get(dtype, 0.0)).all()


def in_shards(
    logits: Tensor,
    target: Tensor,
    scale: Tensor | None,
    widths: list[int],
    columns: list[int],
    terms: tuple[float, float],
    statistics: Callable[..., Any] = cross_entropy_statistics,
    gradient: Callable[..., Any] = cross_entropy_gradient_,
) -> list[Tensor]:
    """What the ranks of a tensor-parallel group do, one after the other; losses per rank."""
    shards = list(logits.split(widths, dim=1))
    firsts = [sum(widths[:i]) for i in range(len(widths))]
    targets = [target - first for first in firsts]
    totals = terms[0] != 0
    local = [statistics(x, y, n, totals) for x, y, n in zip(shards, targets, columns, strict=True)]
    peak = torch.stack([peak for peak, _ in local]).amax(0)
    sums = sum(
        rebase(part, own, peak, y, n)
        for (own, part), y, n in zip(local, targets, columns, strict=True)
    )
    return [
        gradient(x, y, peak, sums, scale, n, sum(columns), *terms)
        for x, y, n in zip(shards, targets, columns, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "v"), [(1, 1), (3, 7), (5, 64), (4, 1000), (2, 4099), (0, 16)])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_native_matches_float64(
    native: Native, t: int, v: int, terms: tuple[float, float], dtype: torch.dtype
) -> None:
    logits = drawn(t, v, dtype)
    target, scale = labels_and_scale(t, v, dtype)
    grad = logits.clone()
    loss = cross_entropy_(grad, target, scale, v, *terms)
    assert_near(loss, grad, logits, target, scale, terms)
    kept = logits.clone()
    assert torch.equal(cross_entropy_(kept, target, None, v, *terms), loss)
    assert torch.equal(kept, logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize(
    ("widths", "columns"),
    [
        ([60, 60], [60, 60]),
        ([33, 33, 33, 33], [33, 33, 33, 21]),  # padding at the end
        ([40, 40, 40], [40, 40, 0]),  # a shard of padding only
        ([7, 4096, 1], [7, 4096, 1]),
    ],
    ids=str,
)
def test_shards_equal_the_whole(
    native: Native,
    widths: list[int],
    columns: list[int],
    terms: tuple[float, float],
    dtype: torch.dtype,
) -> None:
    t, stored, v = 9, sum(widths), sum(columns)
    logits = drawn(t, stored, dtype)
    logits[:, v:] = float("nan")  # padding must not be read
    target, scale = labels_and_scale(t, v, dtype)
    for pieces in (
        (cross_entropy_statistics, cross_entropy_gradient_),
        (statistics_reference, gradient_reference),
    ):
        grad = logits.clone()
        losses = in_shards(grad, target, scale, widths, columns, terms, *pieces)
        for loss in losses:
            assert_near(loss, grad[:, :v], logits[:, :v], target, scale, terms)
        assert not grad[:, v:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", [(0.0, 0.0), (0.1, 1e-4)], ids=str)
def test_every_level_agrees_with_float64(
    level: str, dtype: torch.dtype, terms: tuple[float, float]
) -> None:
    for t, v in ((3, 4099), (6, 131)):
        logits = drawn(t, v, dtype)
        target, scale = labels_and_scale(t, v, dtype)
        grad = logits.clone()
        loss = cross_entropy_(grad, target, scale, v, *terms)
        assert_near(loss, grad, logits, target, scale, terms)
        apart = logits.clone()
        (again,) = in_shards(apart, target, scale, [v], [v], terms)
        assert torch.equal(again, loss)
        assert torch.equal(apart, grad)


def test_results_do_not_depend_on_threads(native: Native) -> None:
    logits = drawn(101, 1003, torch.bfloat16)
    target, scale = labels_and_scale(101, 1003, torch.bfloat16)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            grad = logits.clone()
            loss = cross_entropy_(grad, target, scale, 1003, 0.1, 1e-4)
            results.append((loss, grad, *cross_entropy_statistics(logits, target, 1003, True)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("widths", [[777], [500, 277]], ids=str)
def test_a_large_common_offset_costs_no_digits(
    native: Native, shift: float, widths: list[int]
) -> None:
    logits = drawn(5, 777, torch.float32, shift=shift)
    target, scale = labels_and_scale(5, 777, torch.float32)
    grad = logits.clone()
    losses = in_shards(grad, target, scale, widths, widths, (0.1, 0.0))
    for loss in losses:
        assert_near(loss, grad, logits, target, scale, (0.1, 0.0))


@pytest.mark.parametrize("v", [50, 64, 5000])
def test_extreme_logits_keep_finite_losses(native: Native, v: int) -> None:
    """Peaks of 3e38, masked columns (also whole blocks and shards of them), far minima."""
    logits = torch.zeros(5, v)
    logits[0, 3] = 3e38
    logits[1, : v // 2] = float("-inf")
    logits[2, v // 2 : -1] = float("-inf")
    logits[3] = -3e38
    logits[4, 1:] = float("-inf")
    target, scale = torch.tensor([3, v - 1, v - 1, 0, 0]), torch.ones(5)
    for widths in ([v], [v // 2, v - v // 2]):
        grad = logits.clone()
        for loss in in_shards(grad, target, scale, widths, widths, (0.0, 0.0)):
            assert_near(loss, grad, logits, target, scale, (0.0, 0.0))
        assert not grad[logits == float("-inf")].any()


def test_small_probability_of_the_label_survives_rounding(native: Native) -> None:
    logits = torch.zeros(1, 64, dtype=torch.bfloat16)
    logits[0, 5] = 12.0
    grad = logits.clone()
    cross_entropy_(grad, torch.tensor([5]), torch.ones(1), 64, 0.0, 0.0)
    assert grad[0, 5] < 0  # 1 - p = 4e-4 would vanish from a bf16 p


@pytest.mark.parametrize("v", [50, 64])
def test_zero_scale_gives_zero_gradient_whatever_the_logits(native: Native, v: int) -> None:
    for filler in (float("nan"), float("inf"), float("-inf"), 3e38):
        for run in (cross_entropy_, whole_reference):
            grad = drawn(3, v, torch.float32)
            grad[1] = filler
            run(grad, torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.0, 1.0]), v, 0.1, 1e-3)
            assert not grad[1].any()
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("v", [50, 64, 5000])
def test_nan_reaches_loss_and_gradient(native: Native, v: int) -> None:
    for column in (0, v // 2, v - 1):
        grad = drawn(2, v, torch.bfloat16)
        grad[1, column] = float("nan")
        loss = cross_entropy_(grad, torch.tensor([3, 4]), torch.ones(2), v, 0.0, 0.0)
        assert loss.isnan().tolist() == [False, True]
        assert grad[1].isnan().all()
        assert torch.isfinite(grad[0]).all()


@pytest.mark.parametrize("label", [-1, -100, 10, 12, 2**40])
def test_a_target_held_elsewhere_is_nobodys_column(native: Native, label: int) -> None:
    """Also not a padding column, which a label of the next shard would fall on."""
    logits, target, scale = drawn(1, 16, torch.float32), torch.tensor([label]), torch.ones(1)
    _, sums = cross_entropy_statistics(logits, target, 10, True)
    assert sums[1, 0] == 0.0
    grad = logits.clone()
    cross_entropy_(grad, target, scale, 10, 0.0, 0.0)
    torch.testing.assert_close(grad[:, :10], logits[:, :10].softmax(-1), rtol=1e-5, atol=1e-7)
    assert not grad[:, 10:].any()


def test_rows_at_a_stride_and_misaligned(native: Native) -> None:
    storage = drawn(1, 4 * 50 + 1, torch.bfloat16).flatten()
    view = storage[1:].view(4, 50)[:, 5:38]
    target, scale = labels_and_scale(4, 33, torch.bfloat16)
    packed, outside = view.clone(), storage[1:].view(4, 50)[:, 38:].clone()
    want = cross_entropy_(packed, target, scale, 33, 0.0, 0.0)
    assert torch.equal(cross_entropy_(view, target, scale, 33, 0.0, 0.0), want)
    assert torch.equal(view, packed)
    assert torch.equal(storage[1:].view(4, 50)[:, 38:], outside)


def test_rows_beyond_2_to_the_31_elements(native: Native) -> None:
    """Memory between the rows is never touched, so it is not there."""
    v, stride = 72, 2**31 + 8
    logits = torch.empty(stride + v, dtype=torch.bfloat16).as_strided((2, v), (stride, 1))
    logits.copy_(drawn(2, v, torch.bfloat16))
    before = logits.clone()
    target, scale = labels_and_scale(2, v, torch.bfloat16)
    loss = cross_entropy_(logits, target, scale, v, 0.0, 0.0)
    assert_near(loss, logits, before, target, scale, (0.0, 0.0))


@pytest.mark.parametrize("terms", [(0.0, 0.0), (0.2, 1e-4)], ids=str)
def test_autograd_and_fake_rules(native: Native, terms: tuple[float, float]) -> None:
    logits = drawn(4, 11, torch.float64).requires_grad_()
    target = torch.tensor([3, 10, -100, 0])
    torch.library.opcheck(differentiable, (logits, target, *terms))
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, *terms), logits)
    wanted = functional.cross_entropy(
        logits, target, reduction="none", label_smoothing=terms[0], ignore_index=-100
    )
    lse = logits.logsumexp(-1).square() * (target >= 0)
    torch.testing.assert_close(cross_entropy(logits, target, *terms), wanted + terms[1] * lse)
    loose = logits.detach().clone()
    scale = torch.ones(4, dtype=torch.float64)
    torch.library.opcheck(cross_entropy_, (loose, target, scale, 9, *terms))
    peak, sums = cross_entropy_statistics(loose, target, 9, terms[0] != 0)
    torch.library.opcheck(cross_entropy_statistics, (loose, target, 9, terms[0] != 0))
    args = (loose, target, peak, sums, scale, 9, 20, *terms)
    torch.library.opcheck(cross_entropy_gradient_, args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_differentiable_loss_takes_leading_dims_and_keeps_its_input(
    native: Native, dtype: torch.dtype
) -> None:
    logits = drawn(6, 40, dtype).view(2, 3, 40).requires_grad_()
    before, target = logits.detach().clone(), torch.tensor([[1, -100, 3], [0, 39, 7]])
    loss = cross_entropy(logits, target)
    assert loss.shape == (2, 3)
    assert loss[0, 1] == 0
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.detach(), before)
    assert not logits.grad[0, 1].any()
    held = target.flatten() >= 0
    assert_near(
        loss.detach().flatten()[held],
        logits.grad.view(6, 40)[held],
        before.view(6, 40)[held],
        target.flatten()[held],
        torch.ones(5),
        (0.0, 0.0),
    )


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x, target, scale = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    with pytest.raises(RuntimeError, match="target: wrong shape"):
        cross_entropy_(x, target[:1], scale, 4, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="target: dtype must be int64"):
        cross_entropy_(x, target.int(), scale, 4, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="scale: dtype must be"):
        cross_entropy_(x.bfloat16(), target, scale.bfloat16(), 4, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="columns: must be 0 to 4, is 5"):
        cross_entropy_(x, target, scale, 5, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="logits: columns must be contiguous"):
        cross_entropy_(torch.zeros(4, 2).t(), target, scale, 4, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="logits: rows must not overlap"):
        cross_entropy_(torch.zeros(4).expand(2, 4), target, scale, 4, 0.0, 0.0)
    peak, sums = cross_entropy_statistics(x, target, 4, False)
    with pytest.raises(RuntimeError, match="sums: wrong shape"):  # smoothing needs a third row
        cross_entropy_gradient_(x, target, peak, sums, scale, 4, 4, 0.1, 0.0)
    with pytest.raises(RuntimeError, match=r"classes: must be at least columns \(4\), is 3"):
        cross_entropy_gradient_(x, target, peak, sums, scale, 4, 3, 0.0, 0.0)
