"""RMSNorm and LayerNorm kernels against float64, in every layout that a caller may have.

Bounds (beside the rounding of the result, see elements.py):
| result            | slack, fp32 bf16 fp16 | scale                             |
|-------------------|-----------------------|-----------------------------------|
| out               | 2e-6                  | |w| max |normalised| + |b|        |
| mean, inverse     | 1e-6                  | max |x|, inverse                  |
| grad_x            | 4e-6                  | inverse * max |w g| * (1 + |n|)   |
| grad_weight, bias | 2e-6                  | sum |g n|, sum |g|                |
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.elements import (
    DTYPES,
    HALF_ULP,
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

SOURCES = ("norm/norm_forward.cu", "norm/norm_backward.cu")
EPS = 1e-5


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(*SOURCES)


@dataclass
class Case:
    """One call of forward and backward; results beside the float64 ones."""

    dtype: str = "bf16"
    layer: bool = False
    rows: int = 5
    h: int = 64
    one_plus: bool = False
    residual: bool = False
    accumulate: bool = False
    stride: int = 0  # 0: dense
    offset: int = 0  # elements from 16-byte alignment
    shift: float = 0.0  # common offset of the values
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)

        def draw(n: int) -> Array:
            return put(
                rng.standard_normal((n, self.h)) + self.shift,
                self.dtype,
                self.stride,
                self.offset,
            )

        self.x, self.grad = draw(self.rows), draw(self.rows)
        self.beside = draw(self.rows) if self.residual else None
        self.grad_sum = draw(self.rows) if self.residual else None
        near = 0.0 if self.one_plus else 1.0
        self.weight = put(near + 0.3 * rng.standard_normal((1, self.h)), self.dtype, 0, self.offset)
        self.bias = (
            put(rng.standard_normal((1, self.h)), self.dtype, 0, self.offset)
            if self.layer
            else None
        )
        self.main = np.asarray(rng.standard_normal((2, self.h)), np.float32)

    def new(self) -> Array:
        return empty(self.rows, self.h, self.dtype, self.stride, self.offset)

    def forward(self, kernels: build.Kernels, run: str = "call") -> Any:
        self.out = self.new()
        self.sum = self.new() if self.residual else None
        self.mean = build.poisoned(self.rows, np.float32) if self.layer else None
        self.inverse = build.poisoned(self.rows, np.float32)
        stride = self.stride or self.h
        return getattr(kernels, run)(
            "launch_norm_forward", code(self.dtype), self.x, stride, self.beside, stride,
            self.sum, stride, self.weight, self.bias, self.out, stride, self.mean, self.inverse,
            self.rows, self.h, EPS, self.one_plus,
        )  # fmt: skip

    def backward(self, kernels: build.Kernels, run: str = "call") -> Any:
        size = kernels.library.norm_backward_workspace
        size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_int64] * 4
        needed = size(code(self.dtype), self.rows, self.h, self.layer)
        self.workspace = build.poisoned(needed, np.float32)
        self.grad_x = self.new()
        self.grad_weight = build.poisoned(self.h, np.float32)
        self.grad_bias = build.poisoned(self.h, np.float32)
        if self.accumulate:
            self.grad_weight[...], self.grad_bias[...] = self.main
        stride = self.stride or self.h
        normed = self.sum if self.residual else self.x
        return getattr(kernels, run)(
            "launch_norm_backward", code(self.dtype), self.grad, stride, normed, stride,
            self.grad_sum, stride, self.weight, self.mean, self.inverse, self.grad_x, stride,
            self.grad_weight, self.grad_bias, self.workspace, self.rows, self.h, self.one_plus,
            self.accumulate,
        )  # fmt: skip

    def check_forward(self) -> None:
        x = wide(self.x)
        if self.residual:
            assert self.sum is not None and self.beside is not None
            rounded = (self.x.astype(np.float32) + self.beside.astype(np.float32)).astype(
                DTYPES[self.dtype][1]
            )
            np.testing.assert_array_equal(self.sum, rounded)
            x = wide(rounded)
        mean = x.mean(-1, keepdims=True) if self.layer else 0.0
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPS)
        normed = (x - mean) * inverse
        weight = wide(self.weight) + self.one_plus
        bias = wide(self.bias) if self.bias is not None else 0.0
        noise = 1.0 + np.abs(x).max(initial=0.0) * inverse  # of x - mean under a common offset
        check(self.out, normed * weight + bias, self.dtype, 2e-6,
              np.abs(weight) * (np.abs(normed) + noise) + np.abs(bias))  # fmt: skip
        check(self.inverse, inverse[:, 0], "fp32", 1e-6, inverse[:, 0] * noise[:, 0])
        if self.layer:
            assert self.mean is not None
            check(self.mean, np.asarray(mean)[:, 0], "fp32", 1e-6, np.abs(x).max(-1))

    def check_backward(self) -> None:
        x = wide(self.sum if self.sum is not None else self.x)
        grad, weight = wide(self.grad), wide(self.weight) + self.one_plus
        mean = x.mean(-1, keepdims=True) if self.layer else 0.0
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPS)
        normed, weighted = (x - mean) * inverse, grad * weight
        want = weighted - normed * (weighted * normed).mean(-1, keepdims=True)
        if self.layer:
            want -= weighted.mean(-1, keepdims=True)
        want *= inverse
        if self.grad_sum is not None:
            want += wide(self.grad_sum)
        top = np.abs(weighted).max(initial=0.0)
        noise = 1.0 + np.abs(x).max(initial=0.0) * inverse
        check(self.grad_x, want, self.dtype, 4e-6, inverse * top * (1 + np.abs(normed)) * noise + 1)
        before = self.main.astype(np.float64) if self.accumulate else np.zeros((2, self.h))
        check(self.grad_weight, before[0] + (grad * normed).sum(0), "fp32", 2e-6,
              (np.abs(grad) * (np.abs(normed) + noise - 1)).sum(0) + np.abs(before[0]))  # fmt: skip
        if self.layer:
            check(self.grad_bias, before[1] + grad.sum(0), "fp32", 2e-6,
                  np.abs(grad).sum(0) + np.abs(before[1]))  # fmt: skip

    def run(self, kernels: build.Kernels) -> Case:
        self.forward(kernels)
        self.check_forward()
        self.backward(kernels)
        self.check_backward()
        return self


def small(kernels: build.Kernels) -> None:
    """For the sanitizers: both paths, one warp and several, residual and not."""
    Case("bf16", False, 9, 72, residual=True).run(kernels)
    Case("fp32", True, 3, 1100, residual=True, accumulate=True).run(kernels)
    Case("fp16", True, 5, 77, offset=1, stride=81).run(kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("h", [8, 72, 1024, 1032, 2304, 3333])
def test_norms_match_float64(kernels: build.Kernels, dtype: str, layer: bool, h: int) -> None:
    Case(dtype, layer, 6, h).run(kernels)


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(
    "layout",
    [
        {"stride": 200},
        {"stride": 131},
        {"offset": 1},
        {"offset": 3, "stride": 999},
        {"h": 1},
        {"h": 127},
        {"rows": 1, "h": 2048},
        {"residual": True},
        {"residual": True, "offset": 1},
        {"one_plus": True},
        {"one_plus": True, "h": 33, "accumulate": True},
        {"accumulate": True},
        {"rows": 1201, "h": 16},  # more rows than parts
        {"h": 16400, "rows": 2},  # more than registers hold
    ],
    ids=str,
)
def test_layouts_and_variants(kernels: build.Kernels, layer: bool, layout: dict[str, Any]) -> None:
    Case(**({"dtype": "bf16", "layer": layer, "h": 128} | layout)).run(kernels)


def test_common_offset_does_not_cancel_the_variance(kernels: build.Kernels) -> None:
    """E[x^2] - E[x]^2 in fp32 would lose every digit here."""
    Case("fp32", True, 4, 512, shift=3000.0).run(kernels)


def test_no_rows_leave_zero_weight_gradients(kernels: build.Kernels) -> None:
    case = Case("bf16", True, 0, 40).run(kernels)
    assert not case.grad_weight.any() and not case.grad_bias.any()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)), st.booleans(), st.integers(1, 12), st.integers(1, 700),
    st.booleans(), st.booleans(), st.integers(0, 9), st.integers(0, 9),
)  # fmt: skip
def test_drawn_norms_match_float64(
    dtype: str, layer: bool, rows: int, h: int, one_plus: bool, residual: bool, pad: int, skew: int
) -> None:
    case = Case(dtype, layer, rows, h, one_plus, residual, stride=h + pad, offset=skew, seed=h)
    case.run(load(*SOURCES))


@pytest.mark.parametrize("h", [256, 1600, 333])
def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels, h: int) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Case("bf16", True, 7, h, residual=True).run(kernels)
        parts = (case.out, case.grad_x, case.grad_weight, case.grad_bias, case.inverse)
        runs.add(b"".join(part.tobytes() for part in parts))
    assert len(runs) == 1


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_bytes_are_the_closed_form(kernels: build.Kernels, layer: bool) -> None:
    """Each element is read and written once; weights are read per row, from the caches."""
    case = Case("bf16", layer, 64, 1024)
    n, kinds = 64 * 1024, 2 if layer else 1
    counts = case.forward(kernels, "count")
    assert counts["global_load_bytes"] == 2 * n + 2 * kinds * n
    assert counts["global_store_bytes"] == 2 * n + 4 * kinds * 64
    assert counts["global_store_sectors"] <= 1.05 * (2 * n / 32) + kinds * 64
    counts = case.backward(kernels, "count")
    parts = case.workspace.size // (1024 * kinds)
    workspace = 4 * kinds * parts * 1024
    # x, grad; the weight before and after the sums; every thread its row's statistics.
    threads = counts["threads"] - 32 * 8 * kinds * 32
    statistics = 4 * kinds * threads
    assert counts["global_load_bytes"] == 4 * n + 2 * 2 * n + statistics + workspace
    assert counts["global_store_bytes"] == 2 * n + workspace + 4 * kinds * 1024
    assert counts["shared_replays"] == 0


def test_rows_beyond_2_to_the_31_elements(kernels: build.Kernels) -> None:
    """Two rows 2^31 + 8 elements apart: a 32-bit offset would read elsewhere."""
    h, stride = 64, 2**31 + 8
    x = build.sparse(stride + h, np.uint16)
    rows = np.lib.stride_tricks.as_strided(x.view(DTYPES["bf16"][1]), (2, h), (2 * stride, 2))
    rng = np.random.default_rng(0)
    rows[...] = rng.standard_normal((2, h)).astype(rows.dtype)
    weight, out = put(np.ones((1, h)), "bf16"), empty(2, h, "bf16")
    inverse = build.poisoned(2, np.float32)
    kernels.call("launch_norm_forward", 1, rows, stride, None, 0, None, 0, weight, None, out, h,
                 None, inverse, 2, h, EPS, 0)  # fmt: skip
    values = wide(rows)
    want = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS)
    check(out, want, "bf16", 2e-6, np.abs(want) + 1)


def test_bounds_are_of_one_rounding() -> None:
    for name, (_, dtype) in DTYPES.items():  # the neighbour of 1
        step = np.nextafter(dtype.type(1), dtype.type(2)) - dtype.type(1)
        assert float(step) / 2 == HALF_ULP[name]
