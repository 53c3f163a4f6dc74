"""Rotary embedding against float64: both pairings, partial dims, any strides, its gradient.

Bounds: each result is rounded once, slack 3e-7 (|first| + |second|); channels that are not
rotated are copied exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.elements import DTYPES, ORDERS, Array, check, code, load, put, wide
from tests.sim import build

SOURCE = "rotary/rotary.cu"


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(SOURCE)


class Case:
    """[s, b, n, d] heads as a slice of wider rows (as of a fused projection)."""

    def __init__(
        self, kernels: build.Kernels, dtype: str = "bf16", s: int = 4, b: int = 2, n: int = 3,
        d: int = 64, dim: int | None = None, interleaved: bool = False, pad: int = 0,
        offset: int = 0,
    ) -> None:  # fmt: skip
        self.kernels, self.dtype, self.shape, self.interleaved = (
            kernels,
            dtype,
            (s, b, n, d),
            interleaved,
        )
        self.dim = d if dim is None else dim
        rng = np.random.default_rng(d)
        self.strides = (b * (n * d + pad), n * d + pad, d)
        self.pad, self.offset = pad, offset
        self.x = self.heads(rng.standard_normal((s, b, n, d)))
        positions = np.arange(100, 100 + s)[:, None]
        angles = positions * 10000.0 ** (-np.arange(self.dim // 2) * 2 / max(self.dim, 1))
        self.cosine = build.placed(np.cos(angles).astype(np.float32))
        self.sine = build.placed(np.sin(angles).astype(np.float32))

    def heads(self, values: Array | None = None) -> Array:
        """[s, b, n, d] view with this case's strides; poisoned without values."""
        s, b, n, d = self.shape
        rows = np.full((s * b, n * d), np.nan) if values is None else values.reshape(s * b, n * d)
        flat = put(rows, self.dtype, self.strides[1], self.offset)
        item = flat.itemsize
        steps = tuple(step * item for step in (*self.strides, 1))
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps)

    def rotate(self, x: Array, out: Array, backward: bool = False, run: str = "call") -> Any:
        return getattr(self.kernels, run)(
            "launch_rotary", code(self.dtype), x, *self.strides, self.cosine, self.sine, out,
            *self.strides, *self.shape, self.dim, self.interleaved, backward,
        )  # fmt: skip

    def verify(self, x: Array, out: Array, sign: int = 1) -> None:
        half = self.dim // 2
        wide_x, got = wide(x), wide(out)
        if self.interleaved:
            first, second = slice(0, self.dim, 2), slice(1, self.dim, 2)
        else:
            first, second = slice(0, half), slice(half, self.dim)
        c, s = (wide(t)[:, None, None, :] for t in (self.cosine, self.sine))
        a, b = wide_x[..., first], wide_x[..., second]
        size = np.abs(a) + np.abs(b)
        check(got[..., first], a * c - sign * b * s, self.dtype, 3e-7, size)
        check(got[..., second], b * c + sign * a * s, self.dtype, 3e-7, size)
        np.testing.assert_array_equal(got[..., self.dim :], wide_x[..., self.dim :])

    def run(self) -> Case:
        before, self.out, self.grad_x = self.x.copy(), self.heads(), self.heads()
        self.rotate(self.x, self.out)
        self.verify(before, self.out)
        self.rotate(self.x, self.grad_x, backward=True)
        self.verify(before, self.grad_x, -1)
        in_place = self.heads(before)
        self.rotate(in_place, in_place)
        np.testing.assert_array_equal(in_place, self.out)
        return self


def small(kernels: build.Kernels) -> None:
    """For the sanitizers."""
    for interleaved in (False, True):
        Case(kernels, "bf16", n=9, d=128, dim=64, interleaved=interleaved).run()
        Case(kernels, "fp32", d=10, dim=6, interleaved=interleaved, pad=3, offset=1).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("d", "dim"), [(128, 128), (128, 64), (64, 24), (10, 6), (96, 0), (8, 2)])
def test_rotation_and_gradient_match_float64(
    kernels: build.Kernels, dtype: str, interleaved: bool, d: int, dim: int
) -> None:
    Case(kernels, dtype, d=d, dim=dim, interleaved=interleaved).run()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    "layout",
    [
        {"pad": 64}, {"pad": 3}, {"offset": 1}, {"offset": 8, "pad": 8}, {"s": 0}, {"n": 0},
        {"s": 1, "b": 1, "n": 1, "d": 2}, {"n": 40, "d": 128}, {"d": 7, "dim": 4},
    ],
    ids=str,
)  # fmt: skip
def test_layouts(kernels: build.Kernels, interleaved: bool, layout: dict[str, Any]) -> None:
    Case(kernels, interleaved=interleaved, **layout).run()


def test_gradient_is_the_transpose_of_the_rotation(kernels: build.Kernels) -> None:
    """<rotate(x), y> = <x, backward(y)>."""
    case = Case(kernels, "fp32", d=32, dim=16, interleaved=True).run()
    y = case.heads(np.random.default_rng(9).standard_normal(case.shape))
    grad = case.heads()
    case.rotate(y, grad, backward=True)
    left, right = (wide(case.out) * wide(y)).sum(), (wide(case.x) * wide(grad)).sum()
    assert abs(left - right) < 1e-5 * np.abs(wide(case.x)).sum()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5),
    st.integers(1, 80), st.data(),
)  # fmt: skip
def test_drawn_cases_match_float64(
    dtype: str, s: int, b: int, n: int, d: int, data: st.DataObject
) -> None:
    dim = 2 * data.draw(st.integers(0, d // 2))
    pad, offset = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    Case(load(SOURCE), dtype, s, b, n, d, dim, data.draw(st.booleans()), pad, offset).run()


def test_illegal_dims_are_refused(kernels: build.Kernels) -> None:
    for dim in (3, 66, -2):
        case = Case(kernels)
        case.dim = dim
        with pytest.raises(build.SimError, match="returned 1"):
            case.rotate(case.x, case.x)


def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Case(kernels, n=9).run()
        runs.add(case.out.tobytes() + case.grad_x.tobytes())
    assert len(runs) == 1


def test_bytes_are_the_closed_form(kernels: build.Kernels) -> None:
    for interleaved in (False, True):
        case = Case(kernels, "bf16", 4, 2, 8, 128, 64, interleaved)
        n, tables = 4 * 2 * 8 * 128, 4 * 4 * 2 * 8 * 64  # tables: from the caches, per head
        counts = case.rotate(case.x, case.heads(), run="count")
        assert counts["global_load_bytes"] == 2 * n + tables
        assert counts["global_store_bytes"] == 2 * n
        assert counts["global_store_sectors"] == 2 * n // 32


def test_rows_beyond_2_to_the_31_elements(kernels: build.Kernels) -> None:
    case = Case(kernels, "bf16", 2, 1, 1, 16).run()
    stride = 2**31 + 8
    memory = build.sparse(stride + 16, np.uint16).view(DTYPES["bf16"][1])
    memory[:16], memory[stride:] = case.x[0, 0, 0], case.x[1, 0, 0]
    kernels.call("launch_rotary", 1, memory, stride, 16, 16, case.cosine, case.sine, memory,
                 stride, 16, 16, 2, 1, 1, 16, 16, 0, 0)  # fmt: skip
    np.testing.assert_array_equal(memory[stride:], case.out[1, 0, 0])
