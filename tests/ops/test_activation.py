"""The activations' operation: native equals fp64 reference, gradients, rules, odd inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_lite.native.load import Native
from megatron_lite.ops.activation import (
    _backward_reference,
    _forward_reference,
    activate,
    activation_backward,
    activation_forward,
)

# Largest error against fp64, relative to 1 + |exact|, per dtype.
BOUNDS = {
    torch.float64: 1e-13,  # torch's own tanh form cancels
    torch.float32: 1e-6,
    torch.bfloat16: 4.1e-3,
    torch.float16: 6e-4,
}
TAIL_BOUND = 4e-7  # relative, times 1 + x^2: of lower tails, where 1 + erf would cancel
KINDS = ("gelu", "gelu_tanh", "silu", "squared_relu", "quick_gelu")
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 3, 129), (0, 16), (3, 0), (70, 384)]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * spread).to(dtype)


def assert_near(got: Tensor, exact: Tensor, bound: float) -> None:
    assert got.shape == exact.shape and got.is_contiguous()
    assert ((got.double() - exact).abs() <= bound * (1 + exact.abs())).all()


def check(
    x: Tensor, grad: Tensor, kind: str, gated: bool, limit: float = math.inf, offset: float = 0.0
) -> None:
    bound, call = BOUNDS[x.dtype], (kind, gated, limit, offset)
    exact = _forward_reference(x.double(), *call)
    assert_near(activation_forward(x, *call), exact, bound)
    exact = _backward_reference(grad.double(), x.double(), *call)
    assert_near(activation_backward(grad, x, *call), exact, 2 * bound)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_native_activations_match_float64(
    native: Native, gated: bool, kind: str, dtype: torch.dtype
) -> None:
    for *rows, f in SHAPES:
        x = drawn(*rows, 2 * f if gated else f, dtype=dtype, seed=1)
        check(x, drawn(*rows, f, dtype=dtype, seed=2), kind, gated)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_limit_clamps_gate_and_up_and_stops_their_gradients(
    native: Native, kind: str, dtype: torch.dtype
) -> None:
    x, grad = drawn(5, 154, dtype=dtype, seed=3, spread=6), drawn(5, 77, dtype=dtype, seed=4)
    x[0, :4], x[0, 77:81] = 7.0, -7.0  # on the limit the gradient passes
    check(x, grad, kind, True, 7.0)
    gate, up = x.double().chunk(2, dim=-1)
    grad_gate, grad_up = activation_backward(grad, x, kind, True, 7.0).chunk(2, dim=-1)
    assert (gate > 7).any() and (up.abs() > 7).any()
    assert (grad_gate[gate > 7] == 0).all() and (grad_up[up.abs() > 7] == 0).all()
    assert (grad_up[0, :4] != 0).all() and (grad_gate[0, :4] != 0).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_match_float64_at_every_level(level: str, kind: str, dtype: torch.dtype) -> None:
    for f in (77, 128):
        x, grad = drawn(5, 2 * f, dtype=dtype, seed=7, spread=6), drawn(5, f, dtype=dtype, seed=8)
        x[0, f : f + 2] = torch.tensor([-7.0, -1.0])  # on the limit; where the offset cancels
        for limit in (math.inf, 7.0):
            check(x, grad, kind, True, limit, 1.0)
            assert activation_forward(x, kind, True, limit, 1.0)[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_level_agrees_with_the_reference(level: str, kind: str, dtype: torch.dtype) -> None:
    for gated in (False, True):
        x = drawn(4, 262 if gated else 131, dtype=dtype, seed=5)
        check(x, drawn(4, 131, dtype=dtype, seed=6), kind, gated, 2.5 if gated else math.inf)


def test_lower_tails_keep_their_digits_at_every_level(level: str) -> None:
    x = torch.linspace(-12.5, 0, 4099)
    shares = {
        "gelu": lambda x: 0.5 * torch.special.erfc(-x / math.sqrt(2)),
        "silu": torch.sigmoid,
        "quick_gelu": lambda x: torch.sigmoid(1.702 * x),
    }
    for kind, share in shares.items():
        exact = x.double() * share(x.double())
        error = (activation_forward(x, kind, False, math.inf).double() - exact).abs()
        assert (error <= TAIL_BOUND * (1 + x * x) * exact.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_far_values_stay_finite_and_nan_stays_nan(level: str, kind: str) -> None:
    x = torch.tensor([-3e38, -1e4, -88.8, -30, 0, 30, 88.8, 1e4, math.nan])
    out = activation_forward(x, kind, False, math.inf)
    grad_x = activation_backward(torch.ones(9), x, kind, False, math.inf)
    exact = _forward_reference(x.double(), kind, False, math.inf)[:-1]
    slope = _backward_reference(torch.ones(9).double(), x.double(), kind, False, math.inf)[:-1]
    assert out[-1].isnan() and grad_x[-1].isnan()
    torch.testing.assert_close(out[:-1].double(), exact, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(grad_x[:-1].double(), slope, rtol=1e-5, atol=1e-9)
    gated = activation_forward(torch.full((1, 2), math.nan), kind, True, 7.0)
    assert gated.isnan().all()


def test_results_do_not_depend_on_threads(native: Native) -> None:
    x, grad = drawn(301, 192, dtype=torch.float32), drawn(301, 96, dtype=torch.float32, seed=1)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(activation_forward(x, "silu", True, math.inf))
            results.append(activation_backward(grad, x, "silu", True, math.inf))
    finally:
        torch.set_num_threads(before)
    for i in (2, 4):
        assert torch.equal(results[0], results[i]) and torch.equal(results[1], results[i + 1])


def test_strided_and_misaligned_rows_are_read_where_they_lie(native: Native) -> None:
    packed = drawn(4 * 3 * 40 + 1, dtype=torch.bfloat16)[1:].view(4, 3, 40)
    views = [packed[..., 5:13], packed.transpose(0, 1)[..., 5:13], packed[:, 1:2, 7:15]]
    views.append(drawn(8, dtype=torch.bfloat16).expand(5, 8))
    for view in views:
        dense = view.contiguous()
        for gated in (False, True):
            got = activation_forward(view, "silu", gated, math.inf)
            assert torch.equal(got, activation_forward(dense, "silu", gated, math.inf))
            grad = got.unsqueeze(-1).expand(*got.shape, 2).flatten(-2)[..., ::2]
            got = activation_backward(grad, view, "silu", gated, math.inf)
            dense_grad = grad.contiguous()
            assert torch.equal(got, activation_backward(dense_grad, dense, "silu", gated, math.inf))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("gated", "limit", "offset"),
    [(False, math.inf, 0.0), (True, math.inf, 0.0), (True, 1.5, 0.0), (True, 1.5, 1.0)],
    ids=["plain", "gated", "clamped", "offset"],
)
def test_autograd_and_fake_rules(
    native: Native, kind: str, gated: bool, limit: float, offset: float
) -> None:
    call = (kind, gated, limit, offset)
    x = drawn(2, 3, 6, dtype=torch.float64).requires_grad_()
    torch.library.opcheck(activation_forward, (x, *call))
    grad = drawn(2, 3, 3 if gated else 6, dtype=torch.float64)
    torch.library.opcheck(activation_backward, (grad, x.detach(), *call))
    assert torch.autograd.gradcheck(lambda x: activation_forward(x, *call), x)
    for ours in (True, False):
        assert torch.autograd.gradcheck(
            lambda x: activate(x, kind, gated, ours, limit, offset),  # noqa: B023
            x,
        )


def gpt_oss(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The gate of GPT-OSS's experts, with autograd's gradients."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("limit", [math.inf, 7.0])
@pytest.mark.parametrize(
    ("ours", "dtype"),
    [(False, torch.float64), *((True, dtype) for dtype in BOUNDS)],
    ids=lambda value: {True: "native", False: "reference"}.get(value, str(value)),
)
def test_quick_gelu_with_clamp_and_offset_is_gpt_oss_s_gate(
    native: Native, ours: bool, dtype: torch.dtype, limit: float
) -> None:
    x, grad = drawn(5, 154, dtype=dtype, spread=6), drawn(5, 77, dtype=dtype, seed=1)
    x[x.abs() == 7] = 5  # on the limit torch's clamp passes no gradient, ours does
    made = []
    for run, inputs in (
        (lambda x: activate(x, "quick_gelu", True, ours, limit, 1.0), (x, grad)),
        (lambda x: gpt_oss(*x.chunk(2, dim=-1), limit), (x.double(), grad.double())),
    ):
        leaf = inputs[0].clone().requires_grad_()
        out = run(leaf)
        made.append((out.detach(), *torch.autograd.grad(out, leaf, inputs[1])))
    for got, exact in zip(*made, strict=True):
        assert got.dtype == dtype
        assert_near(got, exact, 2 * BOUNDS[dtype])


def test_native_runs_the_operation_for_gpt_oss_s_gate(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> Tensor:
        raise AssertionError("the reference ran")

    for name in ("_forward_reference", "_backward_reference"):
        monkeypatch.setattr(f"megatron_lite.ops.activation.{name}", refused)
    x = drawn(3, 16, dtype=torch.float32).requires_grad_()
    activate(x, "quick_gelu", True, True, 7.0, 1.0).sum().backward()
    assert x.grad is not None and x.grad.any()


def test_an_offset_joins_the_linear_half_of_every_gate(native: Native) -> None:
    x = drawn(2, 3, 8, dtype=torch.float64).requires_grad_()
    for kind in KINDS:
        gate, up = x.chunk(2, dim=-1)
        exact = activate(gate, kind, False) * (up + 0.5)
        torch.testing.assert_close(activate(x, kind, True, True, offset=0.5), exact)
        assert torch.autograd.gradcheck(lambda x: activate(x, kind, True, True, 2.0, 0.5), x)  # noqa: B023


def test_bad_input_is_refused_with_its_name(native: Native) -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="activation 'relu': legal are gelu"):
        activation_forward(x, "relu", False, math.inf)
    with pytest.raises(ValueError, match="activation 'relu': legal are gelu"):
        activate(x, "relu", False)
    with pytest.raises(RuntimeError, match="even last dim, not 3"):
        activation_forward(torch.zeros(2, 3), "silu", True, math.inf)
    with pytest.raises(RuntimeError, match="limit: must be positive, not 0"):
        activation_forward(x, "silu", True, 0.0)
    with pytest.raises(RuntimeError, match="limit: only gated"):
        activation_forward(x, "silu", False, 7.0)
    with pytest.raises(RuntimeError, match="offset: only gated"):
        activation_forward(x, "silu", False, math.inf, 1.0)
    with pytest.raises(RuntimeError, match="offset: must be finite, not nan"):
        activation_forward(x, "silu", True, math.inf, math.nan)
    with pytest.raises(RuntimeError, match="x: dtype must be"):
        activation_forward(x.int(), "silu", False, math.inf)
    with pytest.raises(RuntimeError, match="grad: shape differs"):
        activation_backward(x, x, "silu", True, math.inf)
    with pytest.raises(RuntimeError, match="grad: dtype differs"):
        activation_backward(x[:, :2].double(), x, "silu", True, math.inf)
