"""Bias, dropout and residual: native draws the masks of ops/random.py and sums in order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.microbatch import MicrobatchContext, WeightGradientStore
from megatron_lite.native.load import Native
from megatron_lite.ops.dropout import (
    _backward_reference,
    _forward_reference,
    bias_dropout_residual,
    dropout_backward,
    dropout_forward,
    hidden_mask,
    signed_seed,
)

# Largest error against fp64 on the same rounded inputs, relative to 1 + |exact|, per dtype.
BOUNDS = {
    torch.float64: 1e-15,
    torch.float32: 3e-7,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}
BIAS_BOUND = 1e-6  # of the bias's gradient, relative to its sum of magnitudes
SHAPES = [(3, 2, 40), (1, 1, 1), (5, 3, 77), (2, 1, 2051), (0, 2, 8), (2, 2, 0), (70, 4, 384)]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


@dataclass
class Case:
    """One forward and backward call, checked against the fp64 reference."""

    shape: tuple[int, int, int] = (5, 2, 77)
    dtype: torch.dtype = torch.float32
    p: float = 0.3
    bias: bool = True
    residual: bool = True
    first: int = 5
    seed: int = 2**63 + 12345

    def run(self) -> tuple[Tensor, ...]:
        s, b, h = self.shape
        x, grad = drawn(s, b, h, dtype=self.dtype, seed=1), drawn(s, b, h, dtype=self.dtype, seed=2)
        bias = drawn(h, dtype=self.dtype, seed=3) if self.bias else None
        residual = drawn(s, b, h, dtype=self.dtype, seed=4) if self.residual else None
        key = (
            torch.arange(self.first, self.first + s), torch.arange(b) * 2**33 + 11, self.p,
            0xDEADBEEF, signed_seed(self.seed),
        )  # fmt: skip
        out = dropout_forward(x, bias, residual, *key)
        wide = [None if t is None else t.double() for t in (x, bias, residual)]
        self.near(out, _forward_reference(*wide, *key))
        grad_x, bias_grad = dropout_backward(grad, *key, self.bias)
        exact = _backward_reference(grad.double(), *key, self.bias)
        self.near(grad_x, exact[0])
        assert torch.equal(grad_x == 0, (exact[0] == 0)), "another mask"
        assert bias_grad.shape == exact[1].shape
        size = exact[0].abs().sum((0, 1)) if self.p > 0 else grad.double().abs().sum((0, 1))
        if self.bias:
            assert ((bias_grad.double() - exact[1]).abs() <= BIAS_BOUND * size).all()
        return out, grad_x, bias_grad

    def near(self, got: Tensor, exact: Tensor) -> None:
        assert got.shape == exact.shape and got.dtype == self.dtype
        assert ((got.double() - exact).abs() <= BOUNDS[self.dtype] * (1 + exact.abs())).all()


def context(native: bool, training: bool = True, sink: object = None) -> MicrobatchContext:
    return MicrobatchContext(
        step=7, microbatch=0, stage=0, training=training, seed=2**63 + 5,
        sample_ids=torch.tensor([3, 2**33 + 1]), positions=torch.arange(4, 9),
        full_positions=torch.arange(4, 9), loss_weights=None, denominators={},
        wgrads=None if sink is None else WeightGradientStore(sink), native=native,
    )  # fmt: skip


class Sink:
    """Keeps main gradients."""

    def __init__(self) -> None:
        self.grads: dict[nn.Parameter, Tensor] = {}

    def main_grad(self, param: nn.Parameter) -> Tensor:
        return self.grads.setdefault(param, torch.zeros_like(param))

    def written(self, param: nn.Parameter) -> None:
        pass


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_matches_float64_with_the_same_mask(
    native: Native, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    Case(shape, dtype).run()


@pytest.mark.parametrize(
    "variant",
    [
        {"p": 0.0}, {"p": 0.999}, {"p": 1e-10}, {"first": 2**37}, {"bias": False},
        {"residual": False}, {"bias": False, "residual": False}, {"p": 0.0, "residual": False},
        {"p": 0.0, "bias": False, "residual": False}, {"seed": 1}, {"shape": (300, 4, 8)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variants(native: Native, variant: dict[str, object], dtype: torch.dtype) -> None:
    Case(dtype=dtype, **variant).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_level_draws_the_same_mask(level: str, dtype: torch.dtype) -> None:
    for h in (264, 2051, 37):
        Case((3, 2, h), dtype).run()


def test_fp32_results_equal_the_reference_bit_for_bit(native: Native) -> None:
    x, residual = drawn(5, 2, 77, dtype=torch.float32), drawn(5, 2, 77, dtype=torch.float32, seed=1)
    bias = drawn(77, dtype=torch.float32, seed=2)
    key = (torch.arange(5), torch.arange(2), 0.4, 99, 5)
    assert torch.equal(
        dropout_forward(x, bias, residual, *key), _forward_reference(x, bias, residual, *key)
    )


def test_slices_of_sequence_and_batch_draw_the_masks_of_the_whole(native: Native) -> None:
    x = torch.ones(6, 4, 75)
    positions, samples = torch.arange(10, 16), torch.tensor([5, 2**32 + 6, 7, 9])
    whole = dropout_forward(x, None, None, positions, samples, 0.5, 1, 2)
    part = dropout_forward(x[2:5, 1:3], None, None, positions[2:5], samples[1:3].clone(), 0.5, 1, 2)
    assert torch.equal(part, whole[2:5, 1:3])
    assert 0.4 < (whole != 0).double().mean() < 0.6


def test_results_do_not_depend_on_threads(native: Native) -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(Case((301, 2, 96)).run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strided_and_misaligned_rows_are_read_where_they_lie(native: Native) -> None:
    packed = drawn(5 * 2 * 100 + 1, dtype=torch.bfloat16)[1:].view(5, 2, 100)
    x, residual = packed[..., 3:40], packed[..., 50:87]
    key = (torch.arange(5), torch.arange(2), 0.4, 99, 5)
    got = dropout_forward(x, None, residual, *key)
    assert torch.equal(got, dropout_forward(x.contiguous(), None, residual.contiguous(), *key))
    expanded = drawn(37, dtype=torch.bfloat16).expand(5, 2, 37)
    for grad in (x, expanded, x.transpose(0, 1).contiguous().transpose(0, 1)):
        got, exact = (dropout_backward(g, *key, True) for g in (grad, grad.contiguous()))
        assert torch.equal(got[0], exact[0]) and torch.equal(got[1], exact[1])


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_autograd_and_fake_rules(native: Native, p: float, biased: bool, added: bool) -> None:
    x = drawn(3, 2, 5, dtype=torch.float64).requires_grad_()
    bias = drawn(5, dtype=torch.float64, seed=1).requires_grad_() if biased else None
    residual = drawn(3, 2, 5, dtype=torch.float64, seed=2).requires_grad_() if added else None
    key = (torch.arange(3), torch.arange(2), p, 99, -5)
    torch.library.opcheck(dropout_forward, (x, bias, residual, *key))
    torch.library.opcheck(dropout_backward, (x.detach(), *key, biased))
    tensors = [t for t in (x, bias, residual) if t is not None]

    def run(*given: Tensor) -> Tensor:
        left = iter(given)
        args = [None if t is None else next(left) for t in (x, bias, residual)]
        return dropout_forward(*args, *key)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("biased", [False, True])
def test_model_function_is_the_same_with_native_operations_on_and_off(
    native: Native, p: float, biased: bool
) -> None:
    results = []
    for run in (False, True):
        sink = Sink()
        mb = context(run, sink=sink)
        x = drawn(5, 2, 36, dtype=torch.float32).requires_grad_()
        residual = drawn(5, 2, 36, dtype=torch.float32, seed=1).requires_grad_()
        bias = nn.Parameter(drawn(36, dtype=torch.float32, seed=2)) if biased else None
        out = bias_dropout_residual(x, bias, residual, p, "mlp_output_dropout", 1, mb)
        out.backward(drawn(5, 2, 36, dtype=torch.float32, seed=3))
        assert x.grad is not None and residual.grad is not None
        results.append([out.detach(), x.grad, residual.grad, *sink.grads.values()])
    assert len(results[0]) == len(results[1]) == 3 + biased
    for off, on in zip(*results, strict=True):
        torch.testing.assert_close(on, off, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_model_function_drops_what_the_hidden_mask_says(native: Native) -> None:
    mb = context(True)
    out = bias_dropout_residual(torch.ones(5, 2, 33), None, None, 0.3, "mlp_output_dropout", 2, mb)
    mask = hidden_mask(mb.positions, 33, 0.3, "mlp_output_dropout", 2, mb)
    assert torch.equal(out != 0, mask)
    quiet, x = context(True, training=False), torch.ones(5, 2, 33)
    assert bias_dropout_residual(x, None, None, 0.3, "mlp_output_dropout", 2, quiet) is x


def test_gradient_without_dropout_is_not_copied(native: Native) -> None:
    x = torch.ones(5, 2, 8, requires_grad=True)
    seen = []
    x.register_hook(lambda grad: seen.append(grad.data_ptr()))
    bias = nn.Parameter(torch.ones(8))
    out = bias_dropout_residual(
        x, bias, None, 0.0, "mlp_output_dropout", 1, context(True, sink=Sink())
    )
    grad = torch.ones(5, 2, 8)
    out.backward(grad)
    assert seen == [grad.data_ptr()]


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x, positions, samples = torch.zeros(3, 2, 4), torch.arange(3), torch.arange(2)
    with pytest.raises(RuntimeError, match=r"p: must be in \[0, 1\), not 1"):
        dropout_forward(x, None, None, positions, samples, 1.0, 0, 0)
    with pytest.raises(RuntimeError, match=r"p: must be in \[0, 1\)"):
        dropout_backward(x, positions, samples, float("nan"), 0, 0, False)
    with pytest.raises(RuntimeError, match="positions: must have one entry for each of 3"):
        dropout_forward(x, None, None, samples, samples, 0.5, 0, 0)
    with pytest.raises(RuntimeError, match="sample_ids: must be int64"):
        dropout_forward(x, None, None, positions, samples.int(), 0.5, 0, 0)
    with pytest.raises(RuntimeError, match="bias: wrong shape"):
        dropout_forward(x, torch.zeros(3), None, positions, samples, 0.5, 0, 0)
    with pytest.raises(RuntimeError, match="residual: shape differs"):
        dropout_forward(x, None, x[:2], positions, samples, 0.5, 0, 0)
    with pytest.raises(RuntimeError, match=r"x: must have shape \[s, b, h\], not 2 dims"):
        dropout_forward(x[0], None, None, positions, samples, 0.5, 0, 0)
    with pytest.raises(RuntimeError, match="x: dtype must be"):
        dropout_forward(x.int(), None, None, positions, samples, 0.5, 0, 0)
