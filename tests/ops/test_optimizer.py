"""The optimizer steps and the squared norm as operations: native equals float64, every level."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops.optimizer import (
    _adamw_reference,
    _norm_reference,
    _sgd_reference,
    adamw_update,
    sgd_update,
    squared_norm,
)

# Largest error of weights and state against fp64, relative to the largest value.
BOUNDS = {torch.float64: 1e-14, torch.float32: 5e-7}
GRADIENTS = {
    torch.float64: (torch.float64,),
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
}
KINDS = [(weight, grad) for weight, grads in GRADIENTS.items() for grad in grads]
NORM_BOUND = 1e-13  # of the squared norm against fp64, relative
SIZES = [0, 1, 15, 64, 5000]
Range = tuple[Tensor, Tensor, Tensor, Tensor]
RATES = (0.01, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight decay


def drawn(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, dtype=torch.float64, generator=generator).to(dtype)


def drawn_range(n: int, weight: torch.dtype, grad: torch.dtype) -> Range:
    """Weight, gradient, first and second moment."""
    first, second = drawn(n, weight, 3) * 0.1, drawn(n, weight, 4).square() * 0.1
    return drawn(n, weight, 1), drawn(n, grad, 2), first, second


def widened(tensors: Range) -> Range:
    weight, grad, first, second = (x.double() for x in tensors)
    return weight, grad, first, second


def assert_near(got: Tensor, exact: Tensor, bound: float) -> None:
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    assert ((got.double() - exact).abs() <= bound * scale).all()


@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("weight", "grad"), KINDS, ids=str)
def test_adamw_matches_float64(
    native: Native, weight: torch.dtype, grad: torch.dtype, n: int, clip: float | None
) -> None:
    tensors = drawn_range(n, weight, grad)
    exact = widened(tensors)
    scale = None if clip is None else torch.tensor([clip], dtype=weight)
    adamw_update(*tensors, None, scale, None, 3, *RATES)
    wide = None if clip is None else torch.tensor([clip], dtype=torch.float64)
    _adamw_reference(*exact, None, wide, None, 3, *RATES)
    for got, want in zip(tensors, exact, strict=True):
        assert_near(got, want, BOUNDS[weight])


@pytest.mark.parametrize(("mu", "decoupled"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("weight", "grad"), KINDS, ids=str)
def test_sgd_matches_float64(
    native: Native, weight: torch.dtype, grad: torch.dtype, n: int, mu: float, decoupled: bool
) -> None:
    held, gradient, momentum, _ = drawn_range(n, weight, grad)
    wide, wide_momentum = held.double(), momentum.double()
    clip = torch.tensor(0.5, dtype=weight)
    sgd_update(held, gradient, momentum if mu else None, None, clip, None, 0.1, mu, 0.1, decoupled)
    exact_momentum = wide_momentum if mu else None
    _sgd_reference(
        wide, gradient.double(), exact_momentum, None, clip.double(), None, 0.1, mu, 0.1, decoupled
    )
    assert_near(held, wide, BOUNDS[weight])
    if mu:
        assert_near(momentum, wide_momentum, BOUNDS[weight])


@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_level_agrees_and_rounds_the_copy(level: str, copy_dtype: torch.dtype) -> None:
    for n in (7, 3001):
        tensors = drawn_range(n, torch.float32, torch.float32)
        exact = widened(tensors)
        copy = torch.full((n,), math.nan, dtype=copy_dtype)
        adamw_update(*tensors, copy, None, None, 1, *RATES)
        _adamw_reference(*exact, None, None, None, 1, *RATES)
        for got, want in zip(tensors, exact, strict=True):
            assert_near(got, want, BOUNDS[torch.float32])
        assert torch.equal(copy, tensors[0].to(copy_dtype))
        weight, gradient, momentum, _ = drawn_range(n, torch.float32, torch.float32)
        wide, wide_momentum = weight.double(), momentum.double()
        sgd_update(weight, gradient, momentum, copy, None, None, 0.1, 0.9, 0.1, False)
        _sgd_reference(
            wide, gradient.double(), wide_momentum, None, None, None, 0.1, 0.9, 0.1, False
        )
        assert_near(weight, wide, BOUNDS[torch.float32])
        assert torch.equal(copy, weight.to(copy_dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_level_sums_squares_in_float64(level: str, dtype: torch.dtype) -> None:
    for n in (0, 1, 63, 65536, 200_003):
        x = drawn(n, dtype, n)
        got = squared_norm(x)
        assert got[0].item() == pytest.approx(_norm_reference(x)[0].item(), rel=NORM_BOUND)
        assert got[1].item() == 0.0
        if n > 60:
            x[[0, 17, n - 1]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
            assert squared_norm(x)[1].item() == 3.0
    assert squared_norm(torch.full((100,), 3e38))[0].item() == pytest.approx(9e78, rel=1e-6)


def test_updates_do_not_depend_on_the_cut_or_on_threads(native: Native) -> None:
    n, before = 200_001, torch.get_num_threads()
    results = []
    try:
        for threads, bounds in ((1, (0, n)), (2, (0, n)), (5, (0, 33, 70_001, 70_001, n))):
            torch.set_num_threads(threads)
            tensors = drawn_range(n, torch.float32, torch.float32)
            copy = torch.empty(n, dtype=torch.bfloat16)
            for start, stop in itertools.pairwise(bounds):
                cut = [x[start:stop] for x in tensors]
                adamw_update(*cut, copy[start:stop], None, None, 2, *RATES)
            results.append([*tensors, copy, squared_norm(tensors[1])])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_skipped_update_writes_nothing(native: Native) -> None:
    skip = torch.ones(1, dtype=torch.int32)
    tensors = drawn_range(100, torch.float32, torch.float32)
    before = [x.clone() for x in tensors]
    adamw_update(*tensors, None, None, skip, 1, *RATES)
    sgd_update(*tensors[:3], None, None, skip, 0.1, 0.9, 0.0, False)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    adamw_update(*tensors, None, None, skip * 0, 1, *RATES)
    assert not torch.equal(tensors[0], before[0])


def test_rules_for_tracing(native: Native) -> None:
    def fresh() -> Range:
        return drawn_range(20, torch.float32, torch.float32)

    copy, clip = torch.empty(20, dtype=torch.bfloat16), torch.ones(1)
    torch.library.opcheck(adamw_update, (*fresh(), copy, clip, None, 2, *RATES))
    torch.library.opcheck(sgd_update, (*fresh()[:3], copy, clip, None, 0.1, 0.9, 0.1, False))
    torch.library.opcheck(squared_norm, (fresh()[0],))


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    weight, grad, first, second = drawn_range(8, torch.float32, torch.float32)

    def step(**changed: Tensor | int) -> None:
        given = {
            "weight": weight, "grad": grad, "exp_avg": first, "exp_avg_sq": second, "copy": None,
            "clip": None, "skip": None, "step": 1,
        } | changed  # fmt: skip
        adamw_update(*given.values(), *RATES)

    with pytest.raises(RuntimeError, match="grad: has 7 elements, the weight 8"):
        step(grad=grad[:7])
    with pytest.raises(RuntimeError, match="weight: dtype must be float32 or float64"):
        step(weight=weight.bfloat16())
    with pytest.raises(RuntimeError, match="grad: dtype must be float64 with float64 weights"):
        step(grad=grad.double())
    with pytest.raises(RuntimeError, match="exp_avg: dtype differs"):
        step(exp_avg=first.double())
    with pytest.raises(RuntimeError, match="exp_avg_sq: must be contiguous"):
        step(exp_avg_sq=torch.zeros(16)[::2])
    with pytest.raises(RuntimeError, match="copy: must be bfloat16 or float16"):
        step(copy=torch.zeros(8))
    with pytest.raises(RuntimeError, match="clip: must be one element of the weight's dtype"):
        step(clip=torch.ones(1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="skip: must be one int32"):
        step(skip=torch.ones(1))
    with pytest.raises(RuntimeError, match="step: counts from 1, not 0"):
        step(step=0)
    with pytest.raises(RuntimeError, match="momentum: is absent, so its factor must be 0"):
        sgd_update(weight, grad, None, None, None, None, 0.1, 0.9, 0.0, False)
    with pytest.raises(RuntimeError, match="x: must be contiguous"):
        squared_norm(torch.zeros(8)[::2])
    with pytest.raises(RuntimeError, match="x: dtype must be"):
        squared_norm(torch.zeros(8, dtype=torch.int32))
