"""Vocabulary-parallel cross-entropy: shards together equal float64 on the whole row.

Bounds: sums of exponentials are within 4e-6 of themselves, sums of logits within 1e-6 per
column and unit of their spread; losses within 2e-6 (3 + |largest term|); a gradient is rounded
once, slack 4e-6 |scale| (1 + 2 z |log-sum-exp|).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.elements import DTYPES, ORDERS, Array, check, code, load, put, wide
from tests.sim import build

SOURCE = "cross_entropy/cross_entropy.cu"


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(SOURCE)


@dataclass
class Case:
    """t rows of a vocabulary in `shards` equal pieces; the last ones hold the padding."""

    kernels: build.Kernels
    dtype: str = "bf16"
    t: int = 5
    v: int = 100
    shards: int = 1
    padding: int = 0  # columns beyond v
    pad: int = 0  # extra row stride
    offset: int = 0
    shift: float = 0.0
    seed: int = 0
    smoothing: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        assert (self.v + self.padding) % self.shards == 0
        self.width = (self.v + self.padding) // self.shards
        self.labels = rng.integers(0, self.v, self.t)
        self.scale = np.asarray(rng.random(self.t) + 0.1, np.float32)
        if self.t > 2:
            self.scale[1] = 0.0
        values = 3 * rng.standard_normal((self.t, self.v + self.padding)) + self.shift
        values[:, self.v :] = np.inf  # padding must not be read
        self.logits = [
            put(values[:, i * self.width : (i + 1) * self.width], self.dtype,
                self.width + self.pad, self.offset)
            for i in range(self.shards)
        ]  # fmt: skip
        self.real = [min(max(self.v - i * self.width, 0), self.width) for i in range(self.shards)]
        self.whole = np.concatenate([wide(x) for x in self.logits], 1)[:, : self.v]

    def run(self, run: str = "call") -> list[Any]:
        """Both steps with the reductions of the caller between; what `run` returned."""
        t, stride, number = self.t, self.width + self.pad, code(self.dtype)
        go = getattr(self.kernels, run)
        peaks = build.poisoned((self.shards, t), np.float32)
        totals = int(self.smoothing != 0)
        sums = build.poisoned((self.shards, 2 + totals, t), np.float32)
        targets = [build.placed(self.labels - i * self.width) for i in range(self.shards)]
        returned = [
            go("launch_cross_entropy_statistics", number, x, stride, targets[i], peaks[i],
               sums[i], t, self.real[i], totals)
            for i, x in enumerate(self.logits)
        ]  # fmt: skip
        self.peak = build.placed(peaks.max(0))
        self.sums = build.placed(self.rebased(sums, peaks).sum(0))
        self.loss = build.poisoned((self.shards, t), np.float32)
        returned += [
            go("launch_cross_entropy_gradient", number, x, stride, targets[i], self.peak,
               self.sums, self.scale, self.loss[i], t, self.real[i], self.width, self.v,
               self.smoothing, self.z)
            for i, x in enumerate(self.logits)
        ]  # fmt: skip
        return returned

    def rebased(self, sums: Array, peaks: Array) -> Array:
        """What the caller does between the steps: sums relative to the maximum of all shards."""
        out = sums.copy()
        for i, real in enumerate(self.real):
            if not real:
                assert not sums[i].any()
                assert (peaks[i] == -np.inf).all()
                continue
            first = i * self.width
            held = (self.labels >= first) & (self.labels < first + real)
            assert not sums[i, 1][~held].any()
            with np.errstate(invalid="ignore"):  # a row of NaN only
                shift = peaks[i] - self.peak
            out[i, 0] *= np.exp(shift)
            out[i, 1] += shift * held
            out[i, 2:] += shift * real
        return out

    def verify(self) -> Case:
        np.testing.assert_array_equal(self.peak, self.whole.max(1))
        shifted = self.whole - self.whole.max(1, keepdims=True)
        exponentials = np.exp(shifted)
        total = exponentials.sum(1)
        check(self.sums[0], total, "fp32", 4e-6, total)
        rows = np.arange(self.t)
        picked = shifted[rows, self.labels]
        log_sum = np.log(total) + self.whole.max(1)
        want_loss = np.log(total) - (1 - self.smoothing) * picked + self.z * log_sum**2
        if self.smoothing:
            spread = np.abs(shifted).max(1)
            check(self.sums[2], shifted.sum(1), "fp32", 1e-6 * self.v, spread)
            want_loss -= self.smoothing * shifted.mean(1)
        largest = np.abs(picked) + self.z * log_sum**2
        for loss in self.loss:
            check(loss, want_loss, "fp32", 2e-6, 3 + largest)
        want = exponentials / total[:, None] * (1 + 2 * self.z * log_sum[:, None])
        want[rows, self.labels] -= 1 - self.smoothing
        want = (want - self.smoothing / self.v) * self.scale[:, None]
        got = np.concatenate(self.logits, 1)
        factor = np.abs(self.scale) * (1 + 2 * self.z * np.abs(log_sum))
        check(got[:, : self.v], want, self.dtype, 4e-6, factor[:, None])
        assert not got[:, self.v :].any()
        assert not got[self.scale == 0].any()
        return self


def small(kernels: build.Kernels) -> None:
    """For the sanitizers."""
    for options in (
        {"v": 600, "pad": 8, "smoothing": 0.1},
        {"dtype": "fp32", "v": 133, "offset": 1, "padding": 3, "z": 1e-3},
    ):
        case = Case(kernels, **options)
        case.run()
        case.verify()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v", [1, 7, 64, 1000, 4099])
def test_loss_and_gradient_match_float64(kernels: build.Kernels, dtype: str, v: int) -> None:
    case = Case(kernels, dtype, 4, v)
    case.run()
    case.verify()


@pytest.mark.parametrize(
    "variant",
    [
        {"shards": 2},
        {"shards": 4, "v": 250, "padding": 6},
        {"shards": 4, "v": 90, "padding": 70},  # a shard of padding only
        {"padding": 28},
        {"pad": 3},
        {"pad": 28},
        {"offset": 1},
        {"offset": 5, "pad": 3, "padding": 3},
        {"t": 0},
        {"t": 1, "v": 12},
        {"shift": 5000.0, "dtype": "fp32"},  # a large common offset
        {"v": 9000},
        {"smoothing": 0.1},
        {"z": 1e-3},
        {"smoothing": 0.2, "z": 1e-2, "shards": 4, "v": 90, "padding": 70},
        {"smoothing": 0.1, "offset": 1, "v": 300, "dtype": "fp32"},
        {"smoothing": 0.1, "shift": 5000.0, "dtype": "fp32", "v": 2000},
    ],
    ids=str,
)
def test_shards_padding_and_layouts(kernels: build.Kernels, variant: dict[str, Any]) -> None:
    case = Case(kernels, **variant)
    case.run()
    case.verify()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)), st.integers(1, 9), st.integers(1, 400), st.integers(1, 4),
    st.integers(0, 9), st.integers(0, 9), st.sampled_from((0.0, 0.1)), st.sampled_from((0.0, 1e-3)),
)  # fmt: skip
def test_drawn_cases_match_float64(
    dtype: str, t: int, v: int, shards: int, pad: int, offset: int, smoothing: float, z: float
) -> None:
    case = Case(
        load(SOURCE),
        dtype,
        t,
        v,
        shards,
        -v % shards,
        pad,
        offset,
        seed=v,
        smoothing=smoothing,
        z=z,
    )
    case.run()
    case.verify()


def test_padded_column_is_not_the_target_of_another_shard(kernels: build.Kernels) -> None:
    """A label of the next shard, counted from this one, falls on this one's padding."""
    case = Case(kernels, "fp32", 1, 10, padding=6)
    case.labels[:] = 12  # held by nobody here
    case.run()
    assert case.sums[1, 0] == 0.0
    want = np.exp(case.whole - case.peak[0]) / np.exp(case.whole - case.peak[0]).sum()
    check(case.logits[0][:, :10], want * case.scale[0], "fp32", 4e-6)
    assert not case.logits[0][:, 10:].any()


@pytest.mark.parametrize("v", [50, 64])  # by elements, by vectors
def test_zero_weight_rows_get_zero_even_from_nan(kernels: build.Kernels, v: int) -> None:
    case = Case(kernels, "bf16", 3, v)
    case.logits[0][1] = np.nan
    case.run()
    assert not case.logits[0][1].any()
    assert np.isfinite(wide(case.logits[0])).all()


def test_small_probability_of_the_label_survives_rounding(kernels: build.Kernels) -> None:
    """softmax - 1 is rounded once: near-certain labels keep a gradient of the right size."""
    logits = np.zeros((1, 64))
    logits[0, 5] = 12.0
    case = Case(kernels, "bf16", 1, 64)
    case.logits[0][...] = logits.astype(case.logits[0].dtype)
    case.whole, case.labels[0] = logits, 5
    case.run()
    case.verify()
    assert case.logits[0][0, 5] < 0  # 1 - p = 4e-4 would vanish from a bf16 p


@pytest.mark.parametrize("terms", [{}, {"smoothing": 0.1, "z": 1e-3}], ids=str)
def test_evaluation_gives_the_loss_and_keeps_the_logits(
    kernels: build.Kernels, terms: dict[str, Any]
) -> None:
    case = Case(kernels, "bf16", 300, 20, **terms)
    before = case.logits[0].copy()
    case.run()
    loss = build.poisoned(300, np.float32)
    case.logits[0][...] = before
    kernels.call("launch_cross_entropy_gradient", 1, case.logits[0], 20, case.labels, case.peak,
                 case.sums, None, loss, 300, 20, 20, 20, case.smoothing, case.z)  # fmt: skip
    np.testing.assert_array_equal(loss, case.loss[0])
    np.testing.assert_array_equal(case.logits[0], before)


@pytest.mark.parametrize("v", [50, 64, 4096])  # by elements, by vectors, several per thread
def test_infinite_logits_are_zero_probability(kernels: build.Kernels, v: int) -> None:
    """Masked columns, also the first ones and a whole thread's, leave the rest as it is."""
    case = Case(kernels, "bf16", 4, v)
    case.labels[:] = v - 1
    masked = [slice(0, v // 2), slice(v // 2, v - 1), slice(1, v - 1)]
    for row, columns in enumerate(masked):
        case.logits[0][row, columns] = -np.inf
    case.whole = wide(case.logits[0])
    case.run()
    case.verify()
    for row, columns in enumerate(masked):
        assert not case.logits[0][row, columns].any()


@pytest.mark.parametrize("v", [50, 64])
def test_nan_reaches_the_loss(kernels: build.Kernels, v: int) -> None:
    case = Case(kernels, "bf16", 3, v)
    case.logits[0][2, v // 2] = np.nan
    case.run()
    assert np.isnan(case.loss[0]).tolist() == [False, False, True]


@pytest.mark.parametrize("v", [1000, 777])
def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels, v: int) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Case(kernels, v=v)
            case.run()
        runs.add(case.sums.tobytes() + case.loss.tobytes() + case.logits[0].tobytes())
    assert len(runs) == 1


def test_bytes_are_the_closed_form(kernels: build.Kernels) -> None:
    t, v = 8, 8192
    case = Case(kernels, "bf16", t, v)
    case.scale[:] = 1.0
    statistics, gradient = case.run("count")
    n, threads = 2 * t * v, 512 * t
    assert statistics["global_load_bytes"] == n + (8 + 2) * t  # target, its logit
    assert gradient["global_load_bytes"] == n + (4 + 4 + 4 + 8) * threads + 4 * t
    assert gradient["global_store_bytes"] == n + 4 * t
    for counts in (statistics, gradient):
        assert counts["global_load_sectors"] <= 1.05 * n / 32 + 64 * t
    assert gradient["global_store_sectors"] == n // 32 + t


def test_rows_beyond_2_to_the_31_elements(kernels: build.Kernels) -> None:
    v, stride = 72, 2**31 + 8
    case = Case(kernels, "bf16", 2, v)
    memory = build.sparse(stride + v, np.uint16).view(DTYPES["bf16"][1])
    rows: Array = np.lib.stride_tricks.as_strided(memory, (2, v), (2 * stride, 2))
    rows[...] = case.logits[0]
    case.logits, case.pad = [rows], stride - v
    case.run()
    case.verify()
