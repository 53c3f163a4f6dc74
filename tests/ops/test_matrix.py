"""Accumulated products against float64, at every level; torch's rules; odd sizes and strides.

Bounds are relative to the sum of absolute products: fp32 sums of t terms.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops import matrix
from megatron_lite.ops.matrix import accumulate_product

BOUNDS = {
    torch.bfloat16: 2e-6,
    torch.float16: 2e-6,
    torch.float32: 2e-6,
    torch.float64: 1e-14,
}
SHAPES = [(1, 1, 1), (3, 5, 7), (64, 32, 96), (33, 70, 45), (600, 100, 33), (40, 530, 600)]


def drawn(t: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """main, a and b as columns of wider tensors whose other columns are NaN."""
    generator = torch.Generator().manual_seed(t + m + n)

    def columns(rows: int, count: int, kind: torch.dtype) -> Tensor:
        wide = torch.full((rows, count + 5), torch.nan, dtype=kind)[:, 3 : 3 + count]
        return wide.copy_(torch.randn(rows, count, generator=generator))

    main = columns(m, n, torch.float64 if dtype == torch.float64 else torch.float32)
    return main, columns(t, m, dtype), columns(t, n, dtype)


def assert_near(main: Tensor, before: Tensor, a: Tensor, b: Tensor, bound: float) -> None:
    exact = before.double() + a.double().t() @ b.double()
    terms = before.double().abs() + a.double().abs().t() @ b.double().abs()
    assert ((main.double() - exact).abs() <= bound * terms).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_accumulated(
    level: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    main, a, b = drawn(*shape, dtype)
    before = main.clone()
    matrix._accumulate(main, a, b)
    assert_near(main, before, a, b, BOUNDS[dtype])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_face_accumulates_with_and_without_native(
    native: bool, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if native:
        request.getfixturevalue("native")
    main, a, b = drawn(33, 70, 45, dtype)
    before = main.clone()
    accumulate_product(main, a, b, native)
    # Plain torch rounds the product to the operands' dtype.
    rounded = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, BOUNDS[dtype])
    assert_near(main, before, a, b, BOUNDS[dtype] if native else rounded)


def test_threads_do_not_change_bits(native: Native) -> None:
    threads = torch.get_num_threads()
    made = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            main, a, b = drawn(700, 1100, 70, torch.bfloat16)
            matrix._accumulate(main, a, b)
            made.append(main.contiguous())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_empty_sizes_change_nothing(native: Native, shape: tuple[int, int, int]) -> None:
    main, a, b = drawn(*shape, torch.bfloat16)
    before = main.clone()
    matrix._accumulate(main, a, b)
    assert torch.equal(main, before)


def test_the_operation_obeys_torch_s_rules(native: Native) -> None:
    t, m, n = 5, 6, 7
    arguments = (torch.zeros(m, n), torch.randn(t, m), torch.randn(t, n))
    torch.library.opcheck(matrix._accumulate, arguments)


def test_wrong_arguments_are_refused(native: Native) -> None:
    main, a, b = drawn(5, 6, 7, torch.bfloat16)
    with pytest.raises(RuntimeError, match="first sizes differ: 5 and 4"):
        matrix._accumulate(main, a, b[:4])
    with pytest.raises(RuntimeError, match="main: must be float32"):
        matrix._accumulate(main.double(), a, b)
    with pytest.raises(RuntimeError, match="last dim must be contiguous"):
        matrix._accumulate(main, a, b.t().contiguous().t())
