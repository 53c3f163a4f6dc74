"""Scaled masked softmax against float64: causal and given masks, blind rows, gradients.

Bounds (beside the one rounding of a result, see elements.py):
| result | slack | scale                                                    |
|--------|-------|----------------------------------------------------------|
| out    | 3e-7  | out * (1 + distance of the score from the row's maximum) |
| grad_x | 1e-6  | |scale| * y * (|grad| + sum |grad y|)                     |
Hidden probabilities and their gradients are exactly 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.elements import DTYPES, ORDERS, Array, check, code, empty, load, put, wide
from tests.sim import build

SOURCE = "softmax/softmax.cu"


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(SOURCE)


class Case:
    """One forward and backward call over [b, n, queries, keys]."""

    def __init__(
        self, kernels: build.Kernels, dtype: str = "bf16", b: int = 2, n: int = 2, queries: int = 3,
        keys: int = 64, causal: bool = False, mask: tuple[int, int, int] | None = None,
        scale: float = 0.4, pad: int = 0, offset: int = 0, spread: float = 4.0, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.kernels, self.dtype, self.scale, self.causal = kernels, dtype, scale, causal
        self.b, self.n, self.queries, self.keys = b, n, queries, keys
        self.rows, self.stride, self.offset = b * n * queries, keys + pad, offset
        self.x = put(spread * rng.standard_normal((self.rows, keys)), dtype, self.stride, offset)
        self.grad = put(rng.standard_normal((self.rows, keys)), dtype, self.stride, offset)
        self.visible, self.steps = None, (0, 0, 0)
        if mask is not None:
            sizes = (*mask, keys)  # 1 where it is broadcast
            steps = np.array([mask[1] * mask[2] * keys, mask[2] * keys, keys])
            self.steps = tuple(int(s) for s in np.where(np.array(mask) == 1, 0, steps))
            self.visible = build.placed((rng.random(sizes) < 0.6).astype(np.uint8))
            self.visible[0, 0, 0] = 0  # a blind row at least

    def seen(self) -> Array:
        """[rows, keys] bool."""
        shape = (self.b, self.n, self.queries, self.keys)
        seen = np.ones(shape, bool)
        if self.visible is not None:
            seen &= self.visible != 0
        if self.causal:
            seen &= np.tri(self.queries, self.keys, self.keys - self.queries, dtype=bool)
        return seen.reshape(self.rows, self.keys)

    def forward(self, run: str = "call") -> Any:
        self.out = empty(self.rows, self.keys, self.dtype, self.stride, self.offset)
        return getattr(self.kernels, run)(
            "launch_masked_softmax_forward", code(self.dtype), self.x, self.stride, self.visible,
            *self.steps, self.causal, self.scale, self.out, self.stride, self.b, self.n,
            self.queries, self.keys,
        )  # fmt: skip

    def backward(self, run: str = "call") -> Any:
        self.grad_x = empty(self.rows, self.keys, self.dtype, self.stride, self.offset)
        return getattr(self.kernels, run)(
            "launch_masked_softmax_backward", code(self.dtype), self.grad, self.stride, self.out,
            self.stride, self.scale, self.grad_x, self.stride, self.rows, self.keys,
        )  # fmt: skip

    def run(self) -> Case:
        self.forward()
        self.backward()
        seen = self.seen()
        scores = np.where(seen, wide(self.x) * np.float64(np.float32(self.scale)), -np.inf)
        top = np.max(scores, axis=1, keepdims=True, initial=-1e300)
        powers = np.exp(scores - top) * seen
        total = powers.sum(1, keepdims=True)
        want = powers / np.where(total == 0, 1.0, total)
        distance = np.where(seen, top - scores, 0.0)
        check(self.out, want, self.dtype, 3e-7, want * (1 + distance) + 1e-30)
        assert (self.out[~seen] == 0).all()
        y, grad = wide(self.out), wide(self.grad)
        want = self.scale * y * (grad - (grad * y).sum(1, keepdims=True))
        size = abs(self.scale) * y * (np.abs(grad) + np.abs(grad * y).sum(1, keepdims=True))
        check(self.grad_x, want, self.dtype, 1e-6, size + 1e-30)
        assert (self.grad_x[~seen] == 0).all()
        return self


def small(kernels: build.Kernels) -> None:
    """For the sanitizers."""
    for mask in (None, (2, 1, 3)):
        Case(kernels, "bf16", keys=1032, causal=True, mask=mask).run()
        Case(kernels, "fp32", keys=37, mask=mask, offset=1, pad=2).run()
        Case(kernels, "fp16", queries=5, keys=264, causal=True).run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("keys", [8, 37, 264, 1032, 4100])
def test_softmax_and_gradient_match_float64(
    kernels: build.Kernels, keys: int, causal: bool, dtype: str
) -> None:
    Case(kernels, dtype, keys=keys, causal=causal).run()
    Case(kernels, dtype, keys=keys, causal=causal, mask=(2, 1, 3), seed=1).run()


@pytest.mark.parametrize("mask", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 3), (2, 1, 3)])
@pytest.mark.parametrize("keys", [64, 37])
def test_masks_are_broadcast(kernels: build.Kernels, keys: int, mask: tuple[int, int, int]) -> None:
    Case(kernels, keys=keys, mask=mask).run()


@pytest.mark.parametrize(
    "variant",
    [
        {"pad": 8}, {"pad": 3}, {"offset": 1}, {"offset": 3, "pad": 5}, {"b": 0}, {"queries": 0},
        {"keys": 0}, {"b": 1, "n": 1, "queries": 1, "keys": 1}, {"queries": 33, "keys": 8},
        {"queries": 20, "keys": 8, "causal": True},  # more queries than keys: blind rows
        {"queries": 3, "keys": 4, "causal": True}, {"scale": -1.5}, {"spread": 100.0},
        {"b": 1, "n": 1, "queries": 1, "keys": 16384}, {"keys": 16392, "queries": 1, "n": 1},
    ],
    ids=str,
)  # fmt: skip
def test_variants_and_layouts(kernels: build.Kernels, variant: dict[str, Any]) -> None:
    Case(kernels, **variant).run()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9),
    st.integers(1, 300), st.booleans(), st.booleans(), st.integers(0, 9), st.integers(0, 9),
)  # fmt: skip
def test_drawn_cases_match_float64(
    dtype: str, b: int, n: int, queries: int, keys: int, causal: bool, masked: bool, pad: int,
    offset: int,
) -> None:  # fmt: skip
    mask = (b, 1, queries) if masked else None
    Case(load(SOURCE), dtype, b, n, queries, keys, causal, mask, pad=pad, offset=offset).run()


def test_hidden_scores_have_no_influence_and_nan_stays_nan(kernels: build.Kernels) -> None:
    for keys in (64, 37):
        case = Case(kernels, "fp32", keys=keys, mask=(2, 2, 3)).run()
        before, seen = case.out.copy(), case.seen()
        case.x[~seen] = np.nan
        case.forward()
        np.testing.assert_array_equal(case.out, before)
        case.x[1, np.argmax(seen[1])] = np.nan
        case.forward()
        assert np.isnan(case.out[1][seen[1]]).all() and not np.isnan(case.out[2:]).any()


def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Case(kernels, keys=2056, causal=True, mask=(2, 1, 3)).run()
        runs.add(case.out.tobytes() + case.grad_x.tobytes())
    assert len(runs) == 1


def test_bytes_are_the_closed_form(kernels: build.Kernels) -> None:
    queries, keys = 64, 64
    case = Case(kernels, "bf16", 2, 2, queries, keys)
    n = case.rows * keys
    counts = case.forward("count")
    assert counts["global_load_bytes"] == 2 * n
    assert counts["global_store_bytes"] == 32 * counts["global_store_sectors"] == 2 * n
    counts = case.backward("count")
    assert counts["global_load_bytes"] == 4 * n
    assert counts["global_store_bytes"] == 32 * counts["global_store_sectors"] == 2 * n
    masked = Case(kernels, "bf16", 2, 2, queries, keys, mask=(2, 2, queries))
    visible = masked.visible
    assert visible is not None
    whole = visible.reshape(-1, 8).any(1).sum() * 16  # vectors that are all hidden are not read
    assert masked.forward("count")["global_load_bytes"] == n + whole
    causal = Case(kernels, "bf16", 2, 2, queries, keys, causal=True)
    read = sum(-(-(q + 1) // 8) * 16 for q in range(queries)) * 4
    assert causal.forward("count")["global_load_bytes"] == read


def test_rows_beyond_2_to_the_31_elements(kernels: build.Kernels) -> None:
    keys, stride = 16, 2**31 + 8
    dense = Case(kernels, "bf16", 1, 1, 2, keys).run()
    memory = build.sparse(stride + keys, np.uint16).view(DTYPES["bf16"][1])
    rows = np.lib.stride_tricks.as_strided(memory, (2, keys), (2 * stride, 2))
    rows[...] = dense.x
    visible = build.sparse(stride + keys, np.uint8)
    visible[:keys] = visible[stride:] = 1
    out = empty(2, keys, "bf16")
    kernels.call("launch_masked_softmax_forward", 1, rows, stride, visible, 0, 0, stride, 0,
                 dense.scale, out, keys, 1, 1, 2, keys)  # fmt: skip
    np.testing.assert_array_equal(out, dense.out)


@pytest.mark.timeout(300)  # room for building on a busy machine
@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_launches_are_clean_under(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    status, output = build.run_python(mode, ["-m", "tests.kernels.small_launches", "softmax"])
    assert status == 0, output
    assert output.split() == ["==", "softmax", "==", "done"], output
