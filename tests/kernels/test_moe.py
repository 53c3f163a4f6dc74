"""Rows of csrc/moe/pack.cu and combine.cu: copies are exact, sums within rounding of float64.

| result                          | bound of |result - float64 reference|                      |
|---------------------------------|-------------------------------------------------------------|
| gather and its padding          | equal bytes, +0                                             |
| combine, fp32                   | 2^-23 * (k + 1) * sum over slots of |probs * packed|         |
| combine, bf16 / fp16            | the same with 2^-8 / 2^-11 * |sum| more, 2^-25 at least      |
| d_packed                        | one rounding: 2^-24, 2^-8 or 2^-11 * |value| (+ 2^-25)       |
| d_probs                         | 2^-23 * (h / 32 + 8) * sum over channels of |packed * d_out| |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kernels.fp8_oracle import BFLOAT16, Array
from tests.kernels.moe_routes import SOURCES, Route, draw_ids, route
from tests.sim import build

DTYPES = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
ROUNDING = (2.0**-24, 2.0**-8, 2.0**-11)
LEAST = (0.0, 0.0, 2.0**-25)


@pytest.fixture(scope="module")
def kernels() -> build.Kernels:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load(SOURCES)


@pytest.fixture(params=["fwd", "rev", "rand:5"])
def ordered(request: pytest.FixtureRequest, kernels: build.Kernels) -> Iterator[build.Kernels]:
    with kernels.options(order=request.param):
        yield kernels


# ---- gather ----------------------------------------------------------------------------------
@pytest.mark.parametrize("h", [1, 7, 8, 24, 520])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32], ids=lambda d: d.__name__)
def test_gather_copies_rows_and_clears_padding(ordered: build.Kernels, h: int, dtype: Any) -> None:
    rng = np.random.default_rng(h)
    tokens, experts, k, align = 37, 6, 3, 4
    ids = draw_ids(rng, tokens, experts, k, 0.2)
    table = route(ordered, ids, experts, align)
    wide = build.placed(rng.integers(1, 100, (tokens, h + 16)).astype(dtype))
    x = wide[:, :h]
    probs = build.placed(rng.random((tokens, k)).astype(np.float32))
    rows = table.source.size
    packed, packed_probs = build.poisoned((rows, h), dtype), build.poisoned(rows, np.float32)
    ordered.call("launch_moe_gather", x, x.strides[0], table.source, packed, probs, packed_probs,
                 rows, h * x.itemsize, k)  # fmt: skip
    filled = table.source >= 0
    want = np.where(filled[:, None], x[table.source // k], np.zeros(1, dtype))
    assert packed.tobytes() == want.astype(dtype).tobytes()
    want_probs = np.where(filled, probs.reshape(-1)[table.source], np.float32(0))
    assert packed_probs.tobytes() == want_probs.tobytes()

    back = build.poisoned(tokens * k, np.float32)
    ordered.call("launch_moe_scatter_probs", packed_probs, table.row_of, back, back.size)
    np.testing.assert_array_equal(back, np.where(table.row_of >= 0, probs.reshape(-1), 0))


def test_gather_of_misaligned_rows(kernels: build.Kernels) -> None:
    source = build.placed(np.int32([2, -1, 0, 1]))
    for start in (0, 1, 2, 4):
        x = build.placed(np.arange(3 * 96, dtype=np.uint8).reshape(3, 96))[:, start : start + 32]
        packed = build.poisoned((4, 32), np.uint8)
        kernels.call("launch_moe_gather", x, 96, source, packed, None, None, 4, 32, 1)
        np.testing.assert_array_equal(packed, np.where(source[:, None] < 0, 0, x[source]))


def test_nothing_to_move_is_no_launch(kernels: build.Kernels) -> None:
    empty = build.poisoned(0, np.int32)
    kernels.call("launch_moe_gather", None, 0, empty, None, None, None, 0, 64, 2)
    kernels.call("launch_moe_combine", None, 0, empty, None, None, 0, 64, 2)
    kernels.call("launch_moe_combine_backward", None, 0, empty, empty, None, None, None, None,
                 0, 0, 64, 2)  # fmt: skip


# ---- combine ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """Inputs of a combine; padding rows hold NaN, which must reach nothing."""

    table: Route
    packed: Array
    probs: Array
    d_out: Array
    k: int


def make_layer(
    kernels: build.Kernels, dtype: Any, tokens: int, h: int, k: int, *, experts: int = 5
) -> Layer:
    rng = np.random.default_rng(h * 100 + k)
    ids = draw_ids(rng, tokens, experts, k, 0.2)
    ids[0] = -1  # a token without any expert
    table = route(kernels, ids, experts, 4)
    packed = rng.standard_normal((table.source.size, h)).astype(dtype)
    packed[table.source < 0] = np.nan
    return Layer(
        table,
        build.placed(packed),
        build.placed(rng.random((tokens, k)).astype(np.float32)),
        build.placed(rng.standard_normal((tokens, h)).astype(dtype)),
        k,
    )


def gathered(layer: Layer) -> Array:
    """[tokens, k, h] float64: rows of the slots, 0 where dropped."""
    row_of = layer.table.row_of.reshape(layer.probs.shape)
    rows = layer.packed.astype(np.float64)[row_of]
    return np.where((row_of >= 0)[..., None], rows, 0.0)


CASES = [(9, 8, 1), (17, 7, 2), (6, 264, 3), (5, 520, 8), (3, 33, 12), (2, 40, 40)]


@pytest.mark.parametrize("tokens, h, k", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_is_the_weighted_sum(
    ordered: build.Kernels, dtype: Any, tokens: int, h: int, k: int, weighted: bool
) -> None:
    layer = make_layer(ordered, dtype, tokens, h, k)
    out = build.poisoned((tokens, h), dtype)
    probs = layer.probs if weighted else None
    code = DTYPES.index(np.dtype(dtype))
    ordered.call("launch_moe_combine", layer.packed, code, layer.table.row_of, probs, out,
                 tokens, h, k)  # fmt: skip
    weights = layer.probs.astype(np.float64) if weighted else np.ones((tokens, k))
    terms = weights[..., None] * gathered(layer)
    want = terms.sum(1)
    bound = 2.0**-23 * (k + 1) * np.abs(terms).sum(1)
    bound += (1 + 2.0**-10) * ROUNDING[code] * np.abs(want)
    assert np.all(np.abs(out.astype(np.float64) - want) <= bound + LEAST[code])
    assert not np.any(out[0].view(np.uint8))  # +0


@pytest.mark.parametrize("tokens, h, k", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_backward_gives_both_gradients(
    ordered: build.Kernels, dtype: Any, tokens: int, h: int, k: int, weighted: bool
) -> None:
    layer = make_layer(ordered, dtype, tokens, h, k)
    code, rows = DTYPES.index(np.dtype(dtype)), layer.packed.shape[0]
    d_packed, d_probs = build.poisoned((rows, h), dtype), build.poisoned((tokens, k), np.float32)
    ordered.call(
        "launch_moe_combine_backward", layer.packed, code, layer.table.row_of,
        layer.table.source, layer.probs if weighted else None, layer.d_out, d_packed, d_probs,
        tokens, rows, h, k,
    )  # fmt: skip
    source, d_out = layer.table.source, layer.d_out.astype(np.float64)
    weights = layer.probs.astype(np.float64) if weighted else np.ones((tokens, k))
    want = weights.reshape(-1)[source][:, None] * d_out[source // k]
    want = np.where((source >= 0)[:, None], want, 0.0)
    bound = ROUNDING[code] * (1 + 2.0**-10) * np.abs(want) + LEAST[code]
    if weighted and code:
        bound = bound + 2.0**-24 * np.abs(want)
    assert np.all(np.abs(d_packed.astype(np.float64) - want) <= bound)
    assert not np.any(d_packed[source < 0].view(np.uint8))  # +0

    products = gathered(layer) * d_out[:, None, :]
    bound = 2.0**-23 * (h / 32 + 8) * np.abs(products).sum(-1)
    assert np.all(np.abs(d_probs - products.sum(-1)) <= bound)
    dropped = layer.table.row_of.reshape(tokens, k) < 0
    assert not np.any(d_probs[dropped].view(np.uint32))


def test_backward_without_probability_gradients_reads_no_rows(kernels: build.Kernels) -> None:
    layer = make_layer(kernels, np.float32, 6, 16, 2)
    d_packed = build.poisoned(layer.packed.shape, np.float32)
    kernels.call(
        "launch_moe_combine_backward",
        None,
        0,
        layer.table.row_of,
        layer.table.source,
        layer.probs,
        layer.d_out,
        d_packed,
        None,
        6,
        layer.packed.shape[0],
        16,
        2,
    )
    assert np.all(np.isfinite(d_packed))


def test_combine_is_the_backward_of_gather(kernels: build.Kernels) -> None:
    layer = make_layer(kernels, np.float32, 11, 12, 3)
    rows = layer.packed.shape[0]
    packed, d_x = build.poisoned((rows, 12), np.float32), build.poisoned((11, 12), np.float32)
    kernels.call("launch_moe_gather", layer.d_out, 48, layer.table.source, packed, None, None,
                 rows, 48, 3)  # fmt: skip
    cotangent = build.placed(np.where(np.isnan(layer.packed), 0, layer.packed))
    kernels.call("launch_moe_combine", cotangent, 0, layer.table.row_of, None, d_x, 11, 12, 3)
    there = np.sum(packed.astype(np.float64) * cotangent)
    assert there == pytest.approx(np.sum(layer.d_out.astype(np.float64) * d_x), rel=1e-6)


def test_results_are_the_same_bits_in_every_order(kernels: build.Kernels) -> None:
    layer, results = make_layer(kernels, BFLOAT16, 30, 264, 4), set()
    rows = layer.packed.shape[0]
    for order in ("fwd", "rev", "rand:1", "rand:2"):
        out = build.poisoned((30, 264), BFLOAT16)
        d_packed, d_probs = build.poisoned((rows, 264), BFLOAT16), build.poisoned(120, np.float32)
        with kernels.options(order=order):
            kernels.call("launch_moe_combine", layer.packed, 1, layer.table.row_of, layer.probs,
                         out, 30, 264, 4)  # fmt: skip
            kernels.call("launch_moe_combine_backward", layer.packed, 1, layer.table.row_of,
                         layer.table.source, layer.probs, layer.d_out, d_packed, d_probs, 30,
                         rows, 264, 4)  # fmt: skip
        results.add(out.tobytes() + d_packed.tobytes() + d_probs.tobytes())
    assert len(results) == 1


# ---- sizes, counts, compilers ----------------------------------------------------------------
def test_bytes_are_the_least(kernels: build.Kernels) -> None:
    tokens, h, k, experts = 40, 1024, 4, 4
    rng = np.random.default_rng(2)
    table = route(kernels, draw_ids(rng, tokens, experts, k, 0.1), experts, 16)
    rows, used = table.source.size, int(np.sum(table.row_of >= 0))
    x = build.placed(rng.standard_normal((tokens, h)).astype(BFLOAT16))
    packed, d_packed = (build.poisoned((rows, h), BFLOAT16) for _ in range(2))
    probs = build.placed(rng.random((tokens, k)).astype(np.float32))
    d_probs, out = build.poisoned((tokens, k), np.float32), build.poisoned((tokens, h), BFLOAT16)
    n = tokens * k
    counted = [
        kernels.count("launch_moe_gather", x, 2 * h, table.source, packed, None, None, rows,
                      2 * h, k),
        kernels.count("launch_moe_combine", packed, 1, table.row_of, probs, out, tokens, h, k),
        kernels.count("launch_moe_combine_backward", packed, 1, table.row_of, table.source, probs,
                      x, d_packed, d_probs, tokens, rows, h, k),
    ]  # fmt: skip
    least = [
        (2 * h * used + 4 * rows, 2 * h * rows),
        (2 * h * used + 8 * n, 2 * h * tokens),
        (2 * h * (used + tokens) + 8 * n + 4 * rows, 2 * h * rows + 4 * n),
    ]
    for counts, (loads, stores) in zip(counted, least, strict=True):
        assert loads <= counts["global_load_bytes"] <= 1.05 * loads
        assert stores <= counts["global_store_bytes"] <= 1.05 * stores
        assert counts["global_store_sectors"] <= 1.05 * stores / 32


def test_offsets_beyond_two_to_the_31(kernels: build.Kernels) -> None:
    tokens, h = 70_000, 32_768  # 2^31 elements are passed at row 65,536
    x, packed = (build.sparse((tokens, h), BFLOAT16) for _ in range(2))
    x[-8:] = np.arange(1, 9, dtype=np.float32)[:, None]  # no zeros: those are everywhere
    source = build.placed(np.arange(tokens, dtype=np.int32)[::-1].copy())
    source[-8:] = tokens - 1 - np.arange(8)
    last = -(-tokens // 8) - 1
    with kernels.options(blocks=f"{last}:1"):
        kernels.call("launch_moe_gather", x, 2 * h, source, packed, None, None, tokens, 2 * h, 1)
    assert np.array_equal(packed[-8:], x[-8:][::-1])

    row_of = build.placed(np.arange(tokens, dtype=np.int32))
    probs = build.placed(np.full(tokens, 2, np.float32))
    out, d_packed = (build.sparse((tokens, h), BFLOAT16) for _ in range(2))
    d_probs = build.poisoned(tokens, np.float32)
    x[-8:, 0] = 4
    with kernels.options(blocks=f"{-(-tokens // 4) - 1}:1"):
        kernels.call("launch_moe_combine", packed, 1, row_of, probs, out, tokens, h, 1)
        kernels.call("launch_moe_combine_backward", packed, 1, row_of, source, probs, x, d_packed,
                     d_probs, tokens, 0, h, 1)  # fmt: skip
    assert np.all(out[-4:] == 2 * packed[-4:].astype(np.float32))
    assert np.all(d_packed[-4:, 0] == 8)
    assert np.all(d_probs[-4:] == (packed[-4:].astype(float) * x[-4:].astype(float)).sum(1))


@pytest.mark.parametrize("mode", ["asan", "ubsan", "tsan"])
def test_sanitizers_find_nothing(mode: str) -> None:
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    code, output = build.run_python(mode, ["-m", "tests.kernels.moe_program"])
    assert code == 0 and "done" in output, output[-4000:]
