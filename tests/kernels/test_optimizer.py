"""AdamW, SGD and the squared norm on flat ranges, against float64.

Bounds: a moment is within 4e-7 of the magnitudes it is made of, a weight within
2e-7 |w| + 4e-6 of its change; the copy is the new fp32 weight rounded, exactly. The squared
norm is within 1e-14 of itself; counts are exact.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.elements import DTYPES, ORDERS, Array, code, load, put, wide
from tests.sim import build

SOURCES = tuple(f"optimizer/{name}.cu" for name in ("adamw", "sgd", "squared_norm"))
F64 = np.float64


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(*SOURCES)


def flat(values: Array, offset: int = 0, dtype: str = "fp32") -> Array:
    """A placed copy of [n], `offset` elements from alignment."""
    return put(values[None], dtype, 0, offset)[0]


def near(got: Array, want: Array, bound: Any) -> None:
    assert (np.abs(wide(got) - want) <= bound).all()


class Range:
    """One flat range and what an update leaves of it."""

    def __init__(
        self, kernels: build.Kernels, n: int = 1000, offset: int = 0, copy: str | None = "bf16",
        clip: float | None = 0.7, skip: int | None = None, decay: float = 0.1, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.kernels, self.n, self.decay = kernels, n, decay
        self.weight, self.grad = (flat(rng.standard_normal(n), offset) for _ in range(2))
        self.first = flat(0.1 * rng.standard_normal(n), offset)
        self.second = flat(rng.random(n) * 0.1, offset)
        self.copy_dtype = copy or "bf16"
        self.copy = flat(np.zeros(n), offset, copy) if copy else None
        if self.copy is not None:
            self.copy.view(np.uint16)[...] = 0xFFFF
        self.clip = None if clip is None else build.placed(np.full(1, clip, np.float32))
        self.skip = None if skip is None else build.placed(np.full(1, skip, np.int32))
        self.old = [wide(x) for x in (self.weight, self.grad, self.first, self.second)]
        self.factor = 1.0 if clip is None else float(np.float32(clip))

    def adamw(self, run: str = "call", step: int = 3, lr: float = 0.01) -> Any:
        self.step, self.lr = step, lr
        return getattr(self.kernels, run)(
            "launch_adamw", self.weight, self.grad, self.first, self.second, self.copy,
            code(self.copy_dtype), self.clip, self.skip, self.n, F64(lr), F64(0.9), F64(0.95),
            F64(1e-8), F64(self.decay), step,
        )  # fmt: skip

    def verify_adamw(self) -> None:
        w, g, m, v = self.old
        g = g * self.factor
        want_m, want_v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        near(self.first, want_m, 4e-7 * (np.abs(m) + np.abs(g)))
        near(self.second, want_v, 4e-7 * (v + g * g))
        root = np.sqrt(want_v / (1 - 0.95**self.step)) + 1e-8
        change = self.lr * want_m / (1 - 0.9**self.step) / root
        want = w * (1 - self.lr * self.decay) - change
        magnitude = self.lr * (np.abs(m) + np.abs(g)) / root / (1 - 0.9**self.step)
        near(self.weight, want, 2e-7 * np.abs(w) + 4e-6 * magnitude)
        self.verify_copy()

    def sgd(self, momentum: float, decoupled: bool = False, run: str = "call") -> Any:
        self.mu, self.decoupled = momentum, decoupled
        return getattr(self.kernels, run)(
            "launch_sgd", self.weight, self.grad, self.first if momentum else None, self.copy,
            code(self.copy_dtype), self.clip, self.skip, self.n, F64(0.1), F64(momentum),
            F64(self.decay), decoupled,
        )  # fmt: skip

    def verify_sgd(self) -> None:
        w, g, m, _ = self.old
        g = g * self.factor + (0 if self.decoupled else self.decay) * w
        want = self.mu * m + g
        near(self.first, want if self.mu else m, 4e-7 * (np.abs(m) + np.abs(g) + np.abs(w)))
        kept = w * (1 - 0.1 * self.decay) if self.decoupled else w
        near(self.weight, kept - 0.1 * want, 4e-7 * (np.abs(w) + np.abs(m) + np.abs(g)))
        self.verify_copy()

    def verify_copy(self) -> None:
        if self.copy is not None:
            np.testing.assert_array_equal(self.copy, self.weight.astype(self.copy.dtype))

    def bytes(self) -> bytes:
        parts = (self.weight, self.first, self.second, self.copy)
        return b"".join(part.tobytes() for part in parts if part is not None)


def squared_norm(
    kernels: build.Kernels, x: Array, dtype: str, out: Array | None = None, run: str = "call"
) -> tuple[Array, Any]:
    size = kernels.library.squared_norm_workspace
    size.restype = ctypes.c_int64
    workspace = build.poisoned(size(), np.float64)
    result = build.poisoned(2, np.float64) if out is None else out
    returned = getattr(kernels, run)(
        "launch_squared_norm", code(dtype), x, x.size, workspace, result, out is not None
    )
    return result, returned


def small(kernels: build.Kernels) -> None:
    """For the sanitizers."""
    for options in ({"n": 1203}, {"n": 77, "offset": 1, "copy": "fp16"}):
        case = Range(kernels, **options)
        case.adamw()
        case.verify_adamw()
        case = Range(kernels, **options)
        case.sgd(0.9)
        case.verify_sgd()
    squared_norm(kernels, flat(np.ones(9001)), "fp32")
    squared_norm(kernels, flat(np.ones(9001), 1, "bf16"), "bf16")


VARIANTS: list[dict[str, Any]] = [
    {}, {"copy": "fp16"}, {"copy": None}, {"clip": None}, {"clip": 1.0, "decay": 0.0}, {"n": 0},
    {"n": 1}, {"n": 3}, {"n": 1027}, {"n": 5, "offset": 2}, {"offset": 1}, {"skip": 0},
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("step", [1, 100000])
def test_adamw_matches_float64(kernels: build.Kernels, variant: Any, step: int) -> None:
    case = Range(kernels, **variant)
    case.adamw(step=step)
    case.verify_adamw()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("momentum", "decoupled"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_matches_float64(
    kernels: build.Kernels, variant: Any, momentum: float, decoupled: bool
) -> None:
    case = Range(kernels, **variant)
    case.sgd(momentum, decoupled)
    case.verify_sgd()


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 3000), st.integers(0, 7), st.sampled_from(["bf16", "fp16", None]),
    st.floats(0, 2), st.floats(0, 0.5), st.integers(1, 10**7),
)  # fmt: skip
def test_drawn_updates_match_float64(
    n: int, offset: int, copy: str | None, clip: float, decay: float, step: int
) -> None:
    case = Range(load(*SOURCES), n, offset, copy, clip, decay=decay, seed=n)
    case.adamw(step=step)
    case.verify_adamw()


def test_skipped_updates_write_nothing(kernels: build.Kernels) -> None:
    for update in (Range.adamw, lambda case: case.sgd(0.9)):
        case = Range(kernels, skip=1)
        before = case.bytes()
        update(case)
        assert case.bytes() == before


def test_updates_do_not_depend_on_the_cut_into_ranges(kernels: build.Kernels) -> None:
    whole, cut = Range(kernels, 1000), Range(kernels, 1000)
    whole.adamw()
    names = ("weight", "grad", "first", "second", "copy")
    arrays = [getattr(cut, name) for name in names]
    for start, stop in ((0, 333), (333, 340), (340, 340), (340, 1000)):
        for name, array in zip(names, arrays, strict=True):
            setattr(cut, name, array[start:stop])
        cut.n = stop - start
        cut.adamw()
    for name, array in zip(names, arrays, strict=True):
        np.testing.assert_array_equal(array, getattr(whole, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "offset"), [(0, 0), (1, 0), (4099, 0), (40000, 0), (777, 1)])
def test_squared_norm_matches_float64(
    kernels: build.Kernels, dtype: str, n: int, offset: int
) -> None:
    x = flat(np.random.default_rng(n).standard_normal(n), offset, dtype)
    out, _ = squared_norm(kernels, x, dtype)
    want = (wide(x) ** 2).sum()
    assert abs(out[0] - want) <= 1e-14 * want
    assert out[1] == 0
    squared_norm(kernels, x, dtype, out)
    assert abs(out[0] - 2 * want) <= 1e-14 * 2 * want


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_non_finite_element_is_counted(kernels: build.Kernels, dtype: str) -> None:
    x = flat(np.ones(5003), 0, dtype)
    x[[0, 17, 4999, 5002]] = [np.nan, np.inf, -np.inf, np.nan]
    out, _ = squared_norm(kernels, x, dtype)
    assert out[1] == 4 and not np.isfinite(out[0])


def test_squares_of_large_finite_elements_do_not_overflow(kernels: build.Kernels) -> None:
    out, _ = squared_norm(kernels, flat(np.full(10, 3e38)), "fp32")
    assert out[1] == 0 and abs(out[0] / (10 * float(np.float32(3e38)) ** 2) - 1) < 1e-14


def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Range(kernels, 3001)
            case.adamw()
            case.sgd(0.9)
            out, _ = squared_norm(kernels, flat(case.old[0]), "fp32")
        runs.add(case.bytes() + out.tobytes())
    assert len(runs) == 1


def test_bytes_are_the_closed_form(kernels: build.Kernels) -> None:
    n = 16384
    scale = 4 * n // 4  # every thread reads the clip scale, from the caches
    counts = Range(kernels, n).adamw("count")
    assert counts["global_load_bytes"] == 16 * n + scale
    assert counts["global_store_bytes"] == 12 * n + 2 * n
    assert counts["global_store_sectors"] == 14 * n // 32
    counts = Range(kernels, n, copy=None, clip=None).sgd(0.9, run="count")
    assert (counts["global_load_bytes"], counts["global_store_bytes"]) == (12 * n, 8 * n)
    counts = Range(kernels, n, copy=None, clip=None).sgd(0.0, run="count")
    assert (counts["global_load_bytes"], counts["global_store_bytes"]) == (8 * n, 4 * n)
    n = 2**18
    _, counts = squared_norm(kernels, build.sparse(n, np.uint16).view(DTYPES["bf16"][1]), "bf16",
                             run="count")  # fmt: skip
    blocks = n // (4 * 8 * 256)
    assert counts["global_load_bytes"] == 2 * n + 16 * blocks <= 1.05 * 2 * n


def test_elements_beyond_2_to_the_31_are_updated(kernels: build.Kernels) -> None:
    """The last blocks of a grid over 2^31 + 1028 elements, in sparse memory."""
    n = 2**31 + 1028
    arrays = [build.sparse(n, np.float32) for _ in range(4)]
    weight, grad, first, second = arrays
    grad[-4:], weight[-4:] = 1.0, 2.0
    with kernels.options(blocks=f"{n // 1024}:1"):
        kernels.call("launch_adamw", weight, grad, first, second, None, 1, None, None, n,
                     F64(0.1), F64(0.9), F64(0.95), F64(1e-8), F64(0.0), 1)  # fmt: skip
    np.testing.assert_allclose(weight[-4:], 1.9, rtol=1e-6)
    np.testing.assert_allclose(first[-4:], 0.1, rtol=1e-6)
