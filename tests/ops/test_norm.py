"""The norms' operations: native equals reference, gradients, rules, odd inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops.norm import (
    _backward_reference,
    _forward_reference,
    norm_backward,
    norm_forward,
)

# Largest error against fp64, relative to the largest value, per dtype.
BOUNDS = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 3, 129), (0, 16), (70, 384)]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * 1.5 + 0.3).to(dtype)


def assert_near(got: Tensor, exact: Tensor, bound: float) -> None:
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    error = (got.double() - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= bound * scale


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "rms+residual", "layer", "layer+residual"])
def test_native_norms_match_float64(
    native: Native, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    h = shape[-1]
    x, grad, grad_sum = (drawn(*shape, dtype=dtype, seed=s) for s in (1, 2, 3))
    residual = drawn(*shape, dtype=dtype, seed=4) if "residual" in kind else None
    weight = drawn(h, dtype=dtype, seed=5)
    bias = drawn(h, dtype=dtype, seed=6) if "layer" in kind else None
    one_plus = h % 2 == 1
    eps = 1.0 if h == 1 else 1e-5  # one channel has no variance: its rounding is divided by eps
    out, summed, mean, inverse = norm_forward(x, residual, weight, bias, eps, one_plus)
    exact_x = x.double() if residual is None else (x + residual).double()
    expected = _forward_reference(exact_x, None, weight.double(), wide(bias), eps, one_plus)
    assert_near(out, expected[0], BOUNDS[dtype])
    if residual is not None:
        assert torch.equal(summed, x + residual)
    statistics_bound = 1e-13 if dtype == torch.float64 else 2e-6
    assert_near(inverse, expected[3], statistics_bound)
    saved = x if residual is None else summed
    beside = grad_sum if residual is not None else None
    got = norm_backward(
        grad, saved, beside, weight, mean if bias is not None else None, inverse, one_plus
    )
    exact = _backward_reference(
        grad.double(),
        saved.double(),
        wide(beside),
        weight.double(),
        expected[2] if bias is not None else None,
        expected[3],
        one_plus,
    )
    assert_near(got[0], exact[0], BOUNDS[dtype])
    for summed_grad, exact_grad in zip(got[1:], exact[1:], strict=True):
        assert_near(summed_grad, exact_grad, 4 * statistics_bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_level_agrees_with_the_reference(level: str, dtype: torch.dtype) -> None:
    x, grad = drawn(9, 131, dtype=dtype, seed=1), drawn(9, 131, dtype=dtype, seed=2)
    weight, bias = drawn(131, dtype=dtype, seed=3), drawn(131, dtype=dtype, seed=4)
    out, _, mean, inverse = norm_forward(x, None, weight, bias, 1e-5, False)
    exact = _forward_reference(x.double(), None, weight.double(), bias.double(), 1e-5, False)
    assert_near(out, exact[0], BOUNDS[dtype])
    got = norm_backward(grad, x, None, weight, mean, inverse, False)
    expected = _backward_reference(
        grad.double(), x.double(), None, weight.double(), exact[2], exact[3], False
    )
    assert_near(got[0], expected[0], BOUNDS[dtype])
    assert_near(got[1], expected[1], 1e-5)


def test_results_do_not_depend_on_threads(native: Native) -> None:
    x, grad = drawn(301, 96, dtype=torch.float32), drawn(301, 96, dtype=torch.float32, seed=1)
    weight = drawn(96, dtype=torch.float32, seed=2)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            _, _, _, inverse = norm_forward(x, None, weight, None, 1e-6, False)
            results.append(norm_backward(grad, x, None, weight, None, inverse, False))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strided_and_misaligned_rows_are_read_where_they_lie(native: Native) -> None:
    storage = drawn(4 * 3 * 40 + 1, dtype=torch.bfloat16)
    packed = storage[1:].view(4, 3, 40)
    weight = drawn(8, dtype=torch.bfloat16, seed=2)
    for view in (packed[..., 5:13], packed.transpose(0, 1)[..., 5:13], packed[:, 1:2, 7:15]):
        got = norm_forward(view, None, weight, None, 1e-5, False)[0]
        assert torch.equal(got, norm_forward(view.contiguous(), None, weight, None, 1e-5, False)[0])
    expanded = drawn(8, dtype=torch.bfloat16).expand(5, 8)
    got = norm_forward(expanded, None, weight, None, 1e-5, False)[0]
    assert torch.equal(got, norm_forward(expanded.contiguous(), None, weight, None, 1e-5, False)[0])


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_autograd_and_fake_rules(native: Native, layer: bool, with_residual: bool) -> None:
    def leaf(*shape: int, seed: int) -> Tensor:
        return drawn(*shape, dtype=torch.float64, seed=seed).requires_grad_()

    x, weight = leaf(2, 3, 5, seed=1), leaf(5, seed=2)
    bias = leaf(5, seed=3) if layer else None
    residual = leaf(2, 3, 5, seed=4) if with_residual else None
    torch.library.opcheck(norm_forward, (x, residual, weight, bias, 1e-5, True))
    tensors = [t for t in (x, residual, weight, bias) if t is not None]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        left = iter(given)
        args = [None if t is None else next(left) for t in (x, residual, weight, bias)]
        out, summed, _, _ = norm_forward(*args, 1e-5, True)
        return (out, summed) if with_residual else (out,)

    assert torch.autograd.gradcheck(run, tensors)
    if layer:
        inverse = torch.ones(2, 3, dtype=torch.float64)
        torch.library.opcheck(
            norm_backward,
            (x.detach(), x.detach(), None, weight.detach(), inverse, inverse, True),
        )


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    with pytest.raises(RuntimeError, match="weight: wrong shape"):
        norm_forward(x, None, torch.ones(5), None, 1e-5, False)
    with pytest.raises(RuntimeError, match="weight: dtype differs"):
        norm_forward(x, None, weight.double(), None, 1e-5, False)
    with pytest.raises(RuntimeError, match="x: dtype must be"):
        norm_forward(x.int(), None, weight.int(), None, 1e-5, False)
    with pytest.raises(RuntimeError, match="residual: shape differs"):
        norm_forward(x, torch.zeros(3, 4), weight, None, 1e-5, False)
