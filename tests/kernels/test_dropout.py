"""The stateless dropout kernels: the very masks of ops/random.py, in any layout.

Bounds: a kept value is (x + bias) * scale (+ residual): slack 2e-7 of the sum of magnitudes.
The bias gradient is a fp32 sum: slack 1e-6 of the sum of magnitudes. Masks are exact.
"""

from __future__ import annotations

import ctypes
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

SOURCE = "dropout/dropout.cu"
ONES = 0xFFFFFFFF
MASK = np.uint64(ONES)


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    return load(SOURCE)


def philox(block: Array, c2: Array, c3: int, seed: int) -> Array:
    """[..., 4] words of the blocks, by NumPy: the generator's definition once more."""
    c = [np.asarray(w, np.uint64) for w in (block & MASK, block >> np.uint64(32), c2, c3)]
    key = [np.uint64(seed & ONES), np.uint64(seed >> 32)]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        half = np.uint64(32)
        c = [(p1 >> half) ^ c[1] ^ key[0], p1 & MASK, (p0 >> half) ^ c[3] ^ key[1], p0 & MASK]
        key = [(key[0] + np.uint64(0x9E3779B9)) & MASK, (key[1] + np.uint64(0xBB67AE85)) & MASK]
    return np.stack(np.broadcast_arrays(*c), axis=-1)


def words_of(positions: Array, samples: Array, h: int, c3: int, seed: int) -> Array:
    """[s, b, h] words of the decisions position * h + channel."""
    element = positions.astype(np.uint64)[:, None] * np.uint64(h) + np.arange(h, dtype=np.uint64)
    blocks = philox(
        (element // np.uint64(4))[:, None, :], (samples.astype(np.uint64) & MASK)[:, None], c3, seed
    )
    which = (element % np.uint64(4)).astype(np.int64)[:, None, :, None]
    return np.take_along_axis(blocks, np.broadcast_to(which, (*blocks.shape[:3], 1)), -1)[..., 0]


class Case:
    """One forward and backward call, checked against float64."""

    def __init__(
        self, kernels: build.Kernels, dtype: str = "bf16", s: int = 3, b: int = 2, h: int = 40,
        p: float = 0.3, bias: bool = True, residual: bool = True, accumulate: bool = False,
        stride: int = 0, offset: int = 0, first: int = 5, seed: int = 2**40 + 3,
    ) -> None:  # fmt: skip
        self.kernels, self.dtype, self.shape, self.p, self.seed = kernels, dtype, (s, b, h), p, seed
        rng = np.random.default_rng(h)
        self.stride, self.offset = stride or h, offset
        draw = lambda n: put(rng.standard_normal((n, h)), dtype, self.stride, offset)  # noqa: E731
        self.x, self.grad = draw(s * b), draw(s * b)
        self.residual = draw(s * b) if residual else None
        self.bias = put(rng.standard_normal((1, h)), dtype, 0, offset) if bias else None
        self.positions = np.arange(first, first + s, dtype=np.int64)
        self.samples = np.arange(b, dtype=np.int64) * 2**33 + 11  # high words are not used
        self.c3 = 0xDEADBEEF
        self.before = np.asarray(rng.standard_normal(h) * accumulate, np.float32)
        self.accumulate = accumulate

    def mask(self) -> Array:
        s, b, h = self.shape
        words = words_of(self.positions, self.samples, h, self.c3, self.seed)
        return (words >= int(self.p * 2**32)).reshape(s * b, h)

    def _key(self) -> tuple[Any, ...]:
        return self.positions, self.samples, *self.shape, np.float64(self.p), self.c3, self.seed

    def forward(self, run: str = "call") -> Any:
        s, b, h = self.shape
        self.out = empty(s * b, h, self.dtype, self.stride, self.offset)
        return getattr(self.kernels, run)(
            "launch_bias_dropout_residual_forward", code(self.dtype), self.x, self.stride,
            self.bias, self.residual, self.stride, self.out, self.stride, *self._key(),
        )  # fmt: skip

    def backward(self, run: str = "call") -> Any:
        s, b, h = self.shape
        size = self.kernels.library.bias_dropout_residual_workspace
        size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
        self.grad_x = empty(s * b, h, self.dtype, self.stride, self.offset)
        self.grad_bias = build.poisoned(h, np.float32) if self.bias is not None else None
        if self.grad_bias is not None and self.accumulate:
            self.grad_bias[...] = self.before
        biased = self.bias is not None
        self.workspace = build.poisoned(size(s, b, h), np.float32) if biased else None
        return getattr(self.kernels, run)(
            "launch_bias_dropout_residual_backward", code(self.dtype), self.grad, self.stride,
            self.grad_x, self.stride, self.grad_bias, self.workspace, *self._key(),
            self.accumulate,
        )  # fmt: skip

    def run(self) -> Case:
        self.forward()
        self.backward()
        factor = self.mask() / (1 - self.p) if self.p else np.ones(self.x.shape)
        bias = wide(self.bias) if self.bias is not None else 0.0
        beside = wide(self.residual) if self.residual is not None else 0.0
        value = (wide(self.x) + bias) * factor
        check(self.out, value + beside, self.dtype, 2e-7,
              (np.abs(wide(self.x)) + np.abs(bias)) * factor + np.abs(beside))  # fmt: skip
        want = wide(self.grad) * factor
        check(self.grad_x, want, self.dtype, 2e-7, np.abs(want))
        np.testing.assert_array_equal(self.grad_x == 0, (factor == 0) | (self.grad == 0))
        if self.grad_bias is not None:
            check(self.grad_bias, want.sum(0) + self.before, "fp32", 1e-6,
                  np.abs(want).sum(0) + np.abs(self.before))  # fmt: skip
        return self


def small(kernels: build.Kernels) -> None:
    """For the sanitizers."""
    Case(kernels, "bf16", 5, 2, 264).run()
    Case(kernels, "fp32", 3, 1, 37, offset=1, stride=39, accumulate=True).run()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers_of_random123(
    kernels: build.Kernels, counter: Any, key: Any, words: Any
) -> None:
    out = build.poisoned((1, 4), np.uint32)
    block, seed = counter[0] | counter[1] << 32, key[0] | key[1] << 32
    kernels.call("launch_philox_words", out, block, 1, counter[2], counter[3], seed)
    assert tuple(int(word) for word in out[0]) == words


def test_words_are_those_of_the_torch_generator(kernels: build.Kernels) -> None:
    torch = pytest.importorskip("torch")
    from megatron_lite.ops.random import flat_words, keep_mask

    rows = torch.arange(2**33, 2**33 + 3)
    words = flat_words(rows, 6, 0, 6, 77, 0xABCDEF01, 2**63 + 9)
    blocks = build.poisoned((6, 4), np.uint32)
    first = 2**33 * 6 // 4
    kernels.call("launch_philox_words", blocks, first, 6, 77, 0xABCDEF01, 2**63 + 9)
    np.testing.assert_array_equal(blocks.reshape(-1)[:18], words.numpy().reshape(-1))
    case = Case(kernels, "fp32", 3, 2, 36, 0.4)
    samples = torch.tensor(case.samples) & ONES
    positions = torch.tensor(case.positions)[:, None].expand(3, 2)
    want = flat_words(positions, 36, 0, 36, samples.expand(3, 2), case.c3, case.seed)
    np.testing.assert_array_equal(case.mask().reshape(3, 2, 36), keep_mask(want, 0.4).numpy())
    case.run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [8, 36, 77, 264, 1032])
def test_forward_and_gradients_match_float64(kernels: build.Kernels, dtype: str, h: int) -> None:
    Case(kernels, dtype, 7, 3, h).run()


@pytest.mark.parametrize(
    "variant",
    [
        {"bias": False},
        {"residual": False},
        {"bias": False, "residual": False},
        {"p": 0.0},
        {"p": 0.999},
        {"p": 1e-10},  # floor(p 2^32) = 0: everything is kept
        {"accumulate": True},
        {"offset": 1},
        {"stride": 41},
        {"stride": 64},
        {"s": 1, "b": 1, "h": 1},
        {"s": 0},
        {"s": 600, "h": 8},  # more tokens than parts
        {"first": 2**37},  # elements beyond 2^32 blocks
    ],
    ids=str,
)
def test_variants_and_layouts(kernels: build.Kernels, variant: dict[str, Any]) -> None:
    Case(kernels, **variant).run()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)), st.integers(1, 9), st.integers(1, 4), st.integers(1, 300),
    st.floats(0, 0.95), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_drawn_cases_match_float64(
    dtype: str, s: int, b: int, h: int, p: float, pad: int, offset: int, seed: int
) -> None:
    Case(load(SOURCE), dtype, s, b, h, p, stride=h + pad, offset=offset, seed=seed).run()


def test_illegal_probabilities_are_refused(kernels: build.Kernels) -> None:
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(build.SimError, match="returned 1"):
            Case(kernels, p=p).forward()


@pytest.mark.parametrize("offset", [0, 1])  # by vectors, by elements
def test_word_equal_to_the_threshold_is_kept(kernels: build.Kernels, offset: int) -> None:
    case = Case(kernels, "fp32", 1, 1, 8, offset=offset)
    words = words_of(case.positions, case.samples, 8, case.c3, case.seed)
    case.p = int(np.sort(words.reshape(-1))[3]) / 2**32
    assert case.mask().sum() == 5
    case.run()


def test_slices_of_the_sequence_draw_the_masks_of_the_whole(kernels: build.Kernels) -> None:
    whole, part = Case(kernels, s=6, first=10), Case(kernels, s=2, first=12)
    np.testing.assert_array_equal(whole.mask()[4:8], part.mask())
    whole.run()
    part.run()


def test_results_do_not_depend_on_the_order_of_threads(kernels: build.Kernels) -> None:
    runs = set()
    for order in ORDERS:
        with kernels.options(order=order):
            case = Case(kernels, s=9, h=520).run()
        parts = (case.out, case.grad_x, case.grad_bias)
        runs.add(b"".join(part.tobytes() for part in parts if part is not None))
    assert len(runs) == 1


def test_bytes_are_the_closed_form(kernels: build.Kernels) -> None:
    s, b, h = 16, 4, 1024
    case = Case(kernels, "bf16", s, b, h, residual=True)
    n, threads = s * b * h, s * b * h // 8  # one vector per thread here
    counts = case.forward("count")
    assert counts["global_load_bytes"] == 2 * 2 * n + 2 * n + 16 * threads  # bias, indices: caches
    assert counts["global_store_bytes"] == 2 * n
    assert counts["global_store_sectors"] == 2 * n // 32
    counts = case.backward("count")
    workspace = 4 * s * b * h  # one token per part here
    assert counts["global_load_bytes"] == 2 * n + 16 * threads + workspace
    assert counts["global_store_bytes"] == 2 * n + workspace + 4 * h


def test_rows_beyond_2_to_the_31_elements(kernels: build.Kernels) -> None:
    h, stride = 16, 2**31 + 8
    memory = build.sparse(stride + h, np.uint16).view(DTYPES["bf16"][1])
    case = Case(kernels, "bf16", 2, 1, h, bias=False, residual=False)
    rows = np.lib.stride_tricks.as_strided(memory, (2, h), (2 * stride, 2))
    rows[...] = case.x
    dense = case.run().out
    case.x, case.stride = rows, stride
    out = build.sparse(stride + h, np.uint16).view(DTYPES["bf16"][1])
    kernels.call("launch_bias_dropout_residual_forward", 1, rows, stride, None, None, 0, out,
                 stride, *case._key())  # fmt: skip
    np.testing.assert_array_equal(out[stride:], dense[1])
