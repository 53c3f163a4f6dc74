"""The lane layouts of mma.sync and ldmatrix against plain matrix arithmetic in float64."""

import ml_dtypes
import numpy as np
import pytest

from tests.sim.build import Kernels, poisoned

DTYPES = {
    "bf16": (ml_dtypes.bfloat16, 16),
    "fp16": (np.float16, 16),
    "e4m3": (ml_dtypes.float8_e4m3fn, 32),
}


@pytest.mark.parametrize("name", DTYPES)
def test_mma_multiplies_fragments_of_the_ptx_manual(ordered: Kernels, name: str) -> None:
    dtype, k = DTYPES[name]
    rng = np.random.default_rng(0)
    # Small integers: every product and sum is exact, so one wrong lane shows.
    a = rng.integers(-8, 9, (16, k)).astype(dtype)
    b = rng.integers(-8, 9, (k, 8)).astype(dtype)
    acc = rng.integers(-99, 99, (16, 8)).astype(np.float32)
    want = acc + a.astype(np.float64) @ b.astype(np.float64)
    ordered.call(f"launch_mma_{name}", a, b, acc)
    np.testing.assert_array_equal(acc, want)


@pytest.mark.parametrize("name", DTYPES)
def test_mma_converts_every_finite_operand(kernels: Kernels, name: str) -> None:
    dtype, k = DTYPES[name]
    bits = np.arange(256 if name == "e4m3" else 65536)
    every = bits.astype(np.uint8 if name == "e4m3" else np.uint16).view(dtype)
    every = every[np.isfinite(every.astype(np.float32))]
    every = np.resize(every, -(-every.size // (16 * 8)) * (16 * 8)).reshape(-1, 16, 8)
    identity = np.eye(k, 8).astype(dtype)
    for values in every[:: max(1, len(every) // 60)]:
        a = np.zeros((16, k), dtype)
        a[:, :8] = values
        acc = np.zeros((16, 8), np.float32)
        kernels.call(f"launch_mma_{name}", a, identity, acc)
        np.testing.assert_array_equal(acc, values.astype(np.float32))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_hands_out_rows_or_columns(ordered: Kernels, count: int, transposed: bool) -> None:
    values = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = poisoned((32, 4), np.uint32)
    ordered.call("launch_dump_ldmatrix", values, out, count, int(transposed))
    lane = np.arange(32)
    for matrix in range(count):
        m = values[matrix].T if transposed else values[matrix]
        pair = m[lane // 4, lane % 4 * 2] + (m[lane // 4, lane % 4 * 2 + 1].astype(np.uint32) << 16)
        np.testing.assert_array_equal(out[:, matrix], pair)
    assert not out[:, count:].any()


@pytest.mark.parametrize("shape", [(16, 16, 16), (32, 48, 80)], ids=str)
def test_pipelined_matmul_matches_float64(ordered: Kernels, shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    rng = np.random.default_rng(1)
    a = rng.standard_normal((rows, depth)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((depth, columns)).astype(ml_dtypes.bfloat16)
    for padded in (0, 1):
        out = poisoned((rows, columns), np.float32)
        ordered.call("launch_matmul", a, b, out, rows, columns, depth, padded)
        want = a.astype(np.float64) @ b.astype(np.float64)
        scale = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
        assert np.all(np.abs(out - want) <= depth * 2.0**-24 * scale)


def test_results_depend_neither_on_order_nor_on_threads(kernels: Kernels) -> None:
    rng = np.random.default_rng(2)
    a = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    results = set()
    for order in ("fwd", "rev", "rand:1", "rand:2"):
        for threads in (1, 3):
            out = poisoned((64, 64), np.float32)
            with kernels.options(order=order, threads=threads):
                kernels.call("launch_matmul", a, b, out, 64, 64, 64, 1)
            results.add(out.tobytes())
    assert len(results) == 1
