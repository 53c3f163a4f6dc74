"""Plain and gated activations against float64, over the whole range of their inputs.

Bounds: the value of an activation has a slack of 1e-6 |x|, its slope one of 2e-6 (1 + |x|),
times the factors it meets (up, grad); results are rounded once. Gradients beyond the limit
of a clamped gate are exactly 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.elements import (
    DTYPES,
    ORDERS,
    Array,
    check,
    code,
    empty,
    load,
    put,
    wide,
)
from tests.sim import build

SOURCE = "activation/activation.cu"
KINDS = ("gelu", "gelu_tanh", "silu", "squared_relu", "quick_gelu")
erfc = np.vectorize(math.erfc, otypes=[np.float64])


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(SOURCE)


def reference(kind: str, x: Array) -> tuple[Array, Array]:
    """Value and slope in float64."""
    if kind == "gelu":
        share = 0.5 * erfc(-x / math.sqrt(2))
        return x * share, share + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        share = 0.5 * (1 + np.tanh(u))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return x * share, share + 0.5 * x * (1 - np.tanh(u) ** 2) * inner
    if kind == "silu":
        share = 0.5 * (1 + np.tanh(x / 2))
        return x * share, share * (1 + x * (1 - share))
    if kind == "quick_gelu":
        y = 1.702 * x
        share = 0.5 * (1 + np.tanh(y / 2))
        return x * share, share * (1 + y * (1 - share))
    return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)


class Case:
    """One forward and backward call."""

    def __init__(
        self, kernels: build.Kernels, kind: str = "silu", gated: bool = True, dtype: str = "bf16",
        t: int = 5, f: int = 64, pad: int = 0, offset: int = 0, spread: float = 2.0,
        limit: float = math.inf, linear: float = 0.0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(f)
        self.limit, self.linear = limit, linear
        self.kernels, self.kind, self.gated, self.dtype, self.t, self.f = (
            kernels, kind, gated, dtype, t, f,
        )  # fmt: skip
        self.width = 2 * f if gated else f
        self.pad, self.offset = pad, offset
        self.x = put(spread * rng.standard_normal((t, self.width)), dtype, self.width + pad, offset)
        self.grad = put(rng.standard_normal((t, f)), dtype, f + pad, offset)

    def forward(self, run: str = "call") -> Any:
        self.out = empty(self.t, self.f, self.dtype, self.f + self.pad, self.offset)
        return getattr(self.kernels, run)(
            "launch_activation_forward", code(self.dtype), KINDS.index(self.kind), self.gated,
            self.limit, self.linear, self.x, self.width + self.pad, self.out, self.f + self.pad,
            self.t, self.f,
        )  # fmt: skip

    def backward(self, run: str = "call") -> Any:
        self.grad_x = empty(self.t, self.width, self.dtype, self.width + self.pad, self.offset)
        return getattr(self.kernels, run)(
            "launch_activation_backward", code(self.dtype), KINDS.index(self.kind), self.gated,
            self.limit, self.linear, self.grad, self.f + self.pad, self.x, self.width + self.pad,
            self.grad_x, self.width + self.pad, self.t, self.f,
        )  # fmt: skip

    def run(self) -> Case:
        self.forward()
        self.backward()
        x, grad = wide(self.x), wide(self.grad)
        gate, up = (x[:, : self.f], x[:, self.f :]) if self.gated else (x, 1.0)
        far_gate, far_up = gate > self.limit, np.abs(up) > self.limit
        gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit) + self.linear
        value, slope = reference(self.kind, gate)
        slope = np.where(far_gate, 0.0, slope)
        size = np.abs(value) if self.kind == "squared_relu" else np.abs(gate)
        check(self.out, value * up, self.dtype, 1e-6, size * np.abs(up))
        check(self.grad_x[:, : self.f], grad * up * slope, self.dtype, 2e-6,
              np.abs(grad * up) * (1 + np.abs(gate)))  # fmt: skip
        if self.gated:
            want = np.where(far_up, 0.0, grad * value)
            check(self.grad_x[:, self.f :], want, self.dtype, 1e-6, size * np.abs(grad))
            assert (self.grad_x[:, : self.f][far_gate] == 0).all()
            assert (self.grad_x[:, self.f :][far_up] == 0).all()
        return self


def small(kernels: build.Kernels) -> None:
    """For the sanitizers."""
    for kind in KINDS:
        Case(kernels, kind, True, t=9, f=264, limit=1.5, linear=1.0).run()
        Case(kernels, kind, False, "fp32", f=37, offset=1).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_match_float64(
    kernels: build.Kernels, kind: str, gated: bool, dtype: str
) -> None:
    Case(kernels, kind, gated, dtype, 6, 344).run()
    Case(kernels, kind, gated, dtype, 3, 77, spread=0.05).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_limit_clamps_gate_and_up_and_stops_their_gradients(
    kernels: build.Kernels, kind: str, dtype: str
) -> None:
    for f in (344, 77):
        case = Case(kernels, kind, True, dtype, 6, f, spread=6.0, limit=7.0)
        case.x[0, [0, f]] = [7, -7]  # on the limit the gradient passes
        case.run()
        assert (case.grad_x[0, [0, f]] != 0).all()
        assert (wide(case.x) > 7).any() and (wide(case.x) < -7).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [math.inf, 7.0])
def test_gpt_oss_s_gate_matches_float64(kernels: build.Kernels, limit: float, dtype: str) -> None:
    for f, pad in ((344, 0), (77, 3)):
        case = Case(
            kernels, "quick_gelu", True, dtype, 6, f, pad, spread=6.0, limit=limit, linear=1.0
        )
        case.x[0, f] = -1  # there the offset cancels
        case.run()
        assert case.out[0, 0] == 0 and case.grad_x[0, 0] == 0


@pytest.mark.parametrize(
    "layout",
    [
        {"pad": 8}, {"pad": 3}, {"offset": 1}, {"offset": 3, "pad": 5}, {"t": 0}, {"f": 0},
        {"t": 1, "f": 1}, {"f": 4}, {"f": 1001}, {"t": 33, "f": 8},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_layouts(kernels: build.Kernels, gated: bool, layout: dict[str, Any]) -> None:
    Case(kernels, "gelu", gated, **layout).run()


@pytest.mark.parametrize("kind", KINDS)
def test_far_tails_stay_finite_and_nan_stays_nan(kernels: build.Kernels, kind: str) -> None:
    case = Case(kernels, kind, False, "fp32", 1, 8)
    case.x[0] = [-3e38 if kind == "quick_gelu" else -1e4, -88.8, -30, -9.5, 0, 9.5, 1e4, np.nan]
    case.grad[...] = 1
    case.forward()
    case.backward()
    value, slope = reference(kind, wide(case.x))
    for got, want in ((case.out, value), (case.grad_x, slope)):
        assert np.isnan(got[0, 7])
        np.testing.assert_allclose(got[0, :7], want[0, :7], rtol=1e-5, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(KINDS), st.booleans(), st.sampled_from(sorted(DTYPES)), st.integers(1, 9),
    st.integers(1, 300), st.integers(0, 9), st.integers(0, 9), st.floats(0.01, 6),
    st.sampled_from([math.inf, 7.0, 0.5]), st.sampled_from([0.0, 1.0, -0.25]),
)  # fmt: skip
def test_drawn_cases_match_float64(
    kind: str, gated: bool, dtype: str, t: int, f: int, pad: int, offset: int, spread: float,
    limit: float, linear: float,
) -> None:  # fmt: skip
    extras = (limit, linear) if gated else ()
    Case(load(SOURCE), kind, gated, dtype, t, f, pad, offset, spread, *extras).run()


def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Case(kernels, f=280).run()
        runs.add(case.out.tobytes() + case.grad_x.tobytes())
    assert len(runs) == 1


def test_bytes_are_the_minimum(kernels: build.Kernels) -> None:
    t, f = 16, 1024
    for gated in (False, True):
        case, n = Case(kernels, "silu", gated, "bf16", t, f), 2 * t * f * (1 + gated)
        counts = case.forward("count")
        assert counts["global_load_bytes"] == n
        assert counts["global_store_bytes"] == 32 * counts["global_store_sectors"] == 2 * t * f
        counts = case.backward("count")
        assert counts["global_load_bytes"] == n + 2 * t * f
        assert counts["global_store_bytes"] == 32 * counts["global_store_sectors"] == n


def test_rows_beyond_2_to_the_31_elements(kernels: build.Kernels) -> None:
    f, stride = 16, 2**31 + 8
    dense = Case(kernels, "gelu", True, "bf16", 2, f).run()
    memory = build.sparse(stride + 2 * f, np.uint16).view(DTYPES["bf16"][1])
    rows = np.lib.stride_tricks.as_strided(memory, (2, 2 * f), (2 * stride, 2))
    rows[...] = dense.x
    out = empty(2, f, "bf16")
    kernels.call("launch_activation_forward", 1, 0, 1, math.inf, 0.0, rows, stride, out, f, 2, f)
    np.testing.assert_array_equal(out, dense.out)


def test_illegal_kinds_limits_and_offsets_are_refused(kernels: build.Kernels) -> None:
    x = empty(1, 8, "bf16")
    for kind, limit, offset in (
        (5, math.inf, 0.0), (-1, math.inf, 0.0), (0, 0.0, 0.0), (0, math.nan, 0.0),
        (0, 1.0, math.nan), (0, 1.0, math.inf),
    ):  # fmt: skip
        with pytest.raises(build.SimError, match="returned 1"):
            kernels.call("launch_activation_forward", 1, kind, 1, limit, offset, x, 8, x, 8, 1, 4)
