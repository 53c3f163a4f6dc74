"""The scaled masked softmax: native equals fp64 reference, masks, gradients, odd inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops.softmax import (
    _backward_reference,
    _forward_reference,
    masked_softmax,
    masked_softmax_backward,
    scaled_masked_softmax,
)

# Largest error against fp64 on the same rounded inputs: relative to the exact value (beside a
# floor of 1e-12, or half the step of fp16's subnormals); the gradient's is relative to
# |scale| * y * (|grad| + sum |grad y|).
BOUNDS = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,  # 1e-7 |scale * x| of the exponential
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}
FLOOR = {torch.float16: 2.0**-25}
SHAPES = [
    (1, 1), (3, 7), (5, 64), (2, 3, 129), (2, 2, 4, 33), (0, 2, 3, 8), (2, 3, 0), (3, 0),
    (2, 2, 70, 70), (2, 5000),
]  # fmt: skip


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * 4).to(dtype)


def hidden(*shape: int, share: float = 0.4) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) >= share


def check(x: Tensor, visible: Tensor | None, scale: float, causal: bool) -> Tensor:
    bound, floor = BOUNDS[x.dtype], FLOOR.get(x.dtype, 1e-12)
    out = masked_softmax(x, visible, scale, causal)
    exact = _forward_reference(x.double(), visible, scale, causal)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    assert ((out.double() - exact).abs() <= bound * exact + floor).all()
    assert (out[exact == 0] == 0).all()
    grad = drawn(*x.shape, dtype=x.dtype, seed=3)
    got = masked_softmax_backward(grad, out, scale)
    wide, y = grad.double(), out.double()
    size = abs(scale) * y * (wide.abs() + (wide * y).abs().sum(-1, keepdim=True))
    exact = _backward_reference(wide, y, scale)
    assert ((got.double() - exact).abs() <= bound * size + floor).all()
    return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_native_softmax_matches_float64(
    native: Native, masked: bool, causal: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = drawn(*shape, dtype=dtype, seed=1)
    check(x, hidden(*shape) if masked else None, 0.31, causal)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_level_agrees_with_the_reference(level: str, dtype: torch.dtype) -> None:
    x = drawn(2, 2, 9, 131, dtype=dtype, seed=2)
    check(x, hidden(2, 1, 9, 131), 0.25, True)
    check(drawn(2, 4173, dtype=dtype), None, -0.3, False)


@pytest.mark.parametrize(
    "mask", [(33,), (4, 33), (1, 33), (3, 4, 33), (2, 1, 4, 33), (2, 1, 1, 33), (1, 3, 1, 33)]
)
def test_masks_are_broadcast(native: Native, mask: tuple[int, ...]) -> None:
    x = drawn(2, 3, 4, 33, dtype=torch.float32)
    visible = hidden(*mask)
    out = check(x, visible, 0.5, False)
    assert torch.equal(out, masked_softmax(x, visible.expand(x.shape), 0.5, False))
    strided = hidden(*mask[:-1], 66)[..., ::2]
    assert torch.equal(
        masked_softmax(x, strided, 0.5, False), masked_softmax(x, strided.contiguous(), 0.5, False)
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_that_see_nothing_give_zero(level: str, dtype: torch.dtype) -> None:
    x = drawn(2, 6, 20, dtype=dtype)
    visible = hidden(2, 6, 20)
    visible[0, 2] = False
    out = check(x, visible, 1.0, False)
    assert (out[0, 2] == 0).all() and (out[0, 1].sum() - 1).abs() < 0.02
    tall = check(drawn(1, 6, 4, dtype=dtype), None, 1.0, True)  # more queries than keys
    assert (tall[0, :2] == 0).all() and tall[0, 2, 0] == 1
    assert (masked_softmax(torch.full((1, 9), -math.inf, dtype=dtype), None, 1.0, False) == 0).all()


def test_large_scores_and_nan(level: str) -> None:
    x = torch.tensor([[3e38, -3e38, 1.0, 3e38], [-3e38, -3e38, -3e38, -3e38]])
    out = masked_softmax(x, None, 1.0, False)
    assert torch.equal(out, torch.tensor([[0.5, 0, 0, 0.5], [0.25] * 4]))
    x = torch.zeros(2, 40)
    x[0, 37] = math.nan
    out = masked_softmax(x, None, 1.0, False)
    assert out[0].isnan().all() and (out[1] == 1 / 40).all()
    causal = masked_softmax(x, None, 1.0, True)
    assert causal[0, :39].isnan().all() and causal[0, 39] == 0


def test_hidden_values_have_no_influence(native: Native) -> None:
    x, visible = drawn(3, 50, dtype=torch.float32), hidden(3, 50)
    other = x.masked_fill(~visible, math.nan)
    got, exact = (masked_softmax(t, visible, 1.0, False) for t in (other, x))
    assert torch.equal(got, exact)


def test_results_do_not_depend_on_threads(native: Native) -> None:
    x = drawn(301, 2, 50, 70, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(masked_softmax(x, None, 0.3, True))
            results.append(masked_softmax_backward(x, results[-1], 0.3))
    finally:
        torch.set_num_threads(before)
    for i in (2, 4):
        assert torch.equal(results[0], results[i]) and torch.equal(results[1], results[i + 1])


def test_strided_and_misaligned_rows_are_read_where_they_lie(native: Native) -> None:
    packed = drawn(4 * 3 * 40 + 1, dtype=torch.bfloat16)[1:].view(4, 3, 40)
    for view in (packed[..., 5:30], packed.transpose(0, 1)[..., 5:30], packed.transpose(1, 2)):
        dense = view.contiguous()
        out = masked_softmax(view, None, 0.3, True)
        assert torch.equal(out, masked_softmax(dense, None, 0.3, True))
        got = masked_softmax_backward(view, out, 0.3)
        assert torch.equal(got, masked_softmax_backward(dense, out, 0.3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_autograd_and_fake_rules(native: Native, masked: bool, causal: bool) -> None:
    x = drawn(2, 2, 3, 5, dtype=torch.float64).requires_grad_()
    visible = hidden(2, 1, 3, 5) if masked else None
    torch.library.opcheck(masked_softmax, (x, visible, 0.4, causal))
    out = masked_softmax(x, visible, 0.4, causal).detach()
    torch.library.opcheck(masked_softmax_backward, (x.detach(), out, 0.4))
    assert torch.autograd.gradcheck(lambda x: masked_softmax(x, visible, 0.4, causal), x)
    for run in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, run=run: scaled_masked_softmax(x, visible, 0.4, causal, run), x
        )


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(RuntimeError, match="not 1 dims"):
        masked_softmax(x[0, 0], None, 1.0, False)
    with pytest.raises(RuntimeError, match="x: dtype must be"):
        masked_softmax(x.int(), None, 1.0, False)
    with pytest.raises(RuntimeError, match="visible: must be bool"):
        masked_softmax(x, x, 1.0, False)
    for shape in ((3,), (2, 4), (3, 1), (1, 2, 3, 4)):
        with pytest.raises(RuntimeError, match="visible: must be broadcastable"):
            masked_softmax(x, torch.ones(shape, dtype=torch.bool), 1.0, False)
    with pytest.raises(RuntimeError, match="grad: shape differs"):
        masked_softmax_backward(x[:1], x, 1.0)
    with pytest.raises(RuntimeError, match="grad: dtype differs"):
        masked_softmax_backward(x.double(), x, 1.0)
