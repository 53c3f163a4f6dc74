"""Offsets beyond 2^31 elements in every kernel of rows and ranges, in sparse memory.

Two rows lie 2^31 + 8 elements apart, in every input and output: a 32-bit offset anywhere in
forward or backward reads or writes elsewhere, and the float64 comparison of the family's own
test fails. Flat ranges run their last block. Bounds are those of the families' tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from tests.kernels import (
    test_activation,
    test_cross_entropy,
    test_dropout,
    test_norm,
    test_optimizer,
    test_rotary,
    test_softmax,
)
from tests.kernels.elements import DTYPES, code, load
from tests.sim import build

FAR = 2**31 + 8  # elements between two rows
F64 = np.float64


@pytest.fixture(autouse=True)
def large_arrays_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of rows far apart: memory for the pages that are written, zeros elsewhere."""
    dense = build.poisoned

    def roomy(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        count = int(np.prod(shape))
        return build.sparse(shape, dtype) if count > 2**31 else dense(shape, dtype)

    monkeypatch.setattr(build, "poisoned", roomy)


# ---- rows ------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
@pytest.mark.parametrize("h", [64, 2304], ids=["warp", "block"])
def test_norm_of_distant_rows(h: int, offset: int) -> None:
    kernels = load(*test_norm.SOURCES)
    for layer in (False, True):
        case = test_norm.Case("bf16", layer, 2, h, residual=True, stride=FAR, offset=offset)
        case.run(kernels)


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_activation_of_distant_rows(gated: bool, offset: int) -> None:
    kernels, limit = load(test_activation.SOURCE), 3.0 if gated else math.inf
    test_activation.Case(
        kernels, "silu", gated, t=2, f=16, pad=FAR, offset=offset, limit=limit
    ).run()


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
def test_dropout_of_distant_rows(offset: int) -> None:
    kernels = load(test_dropout.SOURCE)
    test_dropout.Case(kernels, "bf16", 2, 1, 40, stride=FAR, offset=offset).run()


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
@pytest.mark.parametrize("keys", [64, 2056], ids=["warp", "block"])
def test_softmax_of_distant_rows(keys: int, offset: int) -> None:
    kernels = load(test_softmax.SOURCE)
    test_softmax.Case(kernels, "bf16", 1, 2, 1, keys, pad=FAR - keys, offset=offset).run()


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
def test_cross_entropy_of_distant_rows(offset: int) -> None:
    kernels, v = load(test_cross_entropy.SOURCE), 600
    case = test_cross_entropy.Case(kernels, "bf16", 2, v, pad=FAR - v, offset=offset)
    case.run()
    case.verify()


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary_of_distant_tokens(interleaved: bool, offset: int) -> None:
    kernels = load(test_rotary.SOURCE)
    case = test_rotary.Case(
        kernels, "bf16", 1, 2, 1, 32, 16, interleaved, pad=FAR - 32, offset=offset
    )
    case.run()


# ---- ranges ----------------------------------------------------------------------------------
def test_sgd_beyond_2_to_the_31() -> None:
    kernels, n = load(*test_optimizer.SOURCES), 2**31 + 1028
    weight, grad, momentum = (build.sparse(n, np.float32) for _ in range(3))
    copy = build.sparse(n, np.uint16).view(DTYPES["bf16"][1])
    grad[-4:], weight[-4:], momentum[-4:] = 1.0, 2.0, 0.5
    with kernels.options(blocks=f"{n // 1024}:1"):
        kernels.call("launch_sgd", weight, grad, momentum, copy, code("bf16"), None, None, n,
                     F64(0.1), F64(0.5), F64(0.0), 0)  # fmt: skip
    np.testing.assert_array_equal(momentum[-4:], 1.25)
    np.testing.assert_allclose(weight[-4:], 1.875, rtol=1e-6)
    np.testing.assert_array_equal(copy[-4:], weight[-4:].astype(copy.dtype))


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
def test_squared_norm_beyond_2_to_the_31(offset: int) -> None:
    """Blocks stride over the range; the one with the last whole vector sees its values."""
    kernels, vector, threads, most = load(*test_optimizer.SOURCES), 8, 256, 1056
    n = 2**31 + vector * threads
    x = build.sparse(n + offset, np.uint16).view(DTYPES["bf16"][1])[offset:]
    x[-1] = 3.0
    block = (n // vector - 1 if offset == 0 else n - 1) // threads % most
    workspace, out = build.poisoned(2 * most, np.float64), build.poisoned(2, np.float64)
    with kernels.options(blocks=f"{block}:1"):
        kernels.call("launch_squared_norm", code("bf16"), x, n, workspace, out, 0)
    assert workspace[block] == 9.0 and workspace[most + block] == 0.0


def test_fp8_amax_beyond_2_to_the_31() -> None:
    kernels, rows, cols = load("fp8/scaling.cu"), 70_000, 40_000
    x = build.sparse((rows, cols), np.uint16).view(DTYPES["bf16"][1])
    x[-1, -1] = -5.0
    blocks = rows * cols // 8 // 256 + 1
    partial, amax = build.poisoned(blocks, np.uint32), build.poisoned(1, np.float32)
    last = (rows * cols // 8 - 1) // 256
    with kernels.options(blocks=f"{last}:1"):
        kernels.call("launch_fp8_amax", x, code("bf16"), partial, blocks, amax, rows, cols, cols)
    assert partial[last] == np.float32(5.0).view(np.uint32)
