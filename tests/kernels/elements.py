"""Inputs, outputs and error bounds of the kernels that work on fp32, bf16 and fp16 elements.

A result is compared with a float64 computation on the very same (rounded) inputs:
|got - want| <= HALF_ULP |want| + slack * scale. The first term is the one rounding of a
result to its type, the second the fp32 arithmetic before it; each test states its slack.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.sim import build

Array = NDArray[Any]
DTYPES: dict[str, tuple[int, Any]] = {
    "fp32": (0, np.dtype(np.float32)),
    "bf16": (1, np.dtype(ml_dtypes.bfloat16)),
    "fp16": (2, np.dtype(np.float16)),
}
HALF_ULP = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
SMALLEST = {"fp32": 0.0, "bf16": 0.0, "fp16": 2.0**-25}  # half the step of its subnormals
ORDERS = ("fwd", "rev", "rand:7")


def code(dtype: str) -> int:
    """The launchers' number of a type."""
    return DTYPES[dtype][0]


@cache
def load(*sources: str) -> build.Kernels:
    """Kernels of csrc files, in the mode of this process; skips where they cannot be built."""
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    return build.load([f"csrc/{source}" for source in sources])


def empty(rows: int, columns: int, dtype: str, stride: int = 0, offset: int = 0) -> Array:
    """A poisoned [rows, columns] view: rows `stride` elements apart, `offset` from alignment."""
    stride = stride or columns
    flat = build.poisoned(offset + max(rows - 1, 0) * stride + columns, DTYPES[dtype][1])
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[offset:], (rows, columns), (stride * item, item), writeable=True
    )


def put(values: Array, dtype: str, stride: int = 0, offset: int = 0) -> Array:
    """A rounded copy of [rows, columns] values, laid out as `empty` does."""
    out = empty(*values.shape, dtype, stride, offset)
    out[...] = values.astype(DTYPES[dtype][1])
    return out


def wide(values: Array) -> Array:
    """Any of the types as float64."""
    return values.astype(np.float32).astype(np.float64)


def check(got: Array, want: Array, dtype: str, slack: float, scale: Any = 1.0) -> None:
    """Assert the bound of this module; NaN or an element left unwritten never passes."""
    error = np.abs(wide(got) - want)
    bound = HALF_ULP[dtype] * np.abs(want) + slack * scale + SMALLEST[dtype]
    excess = np.max(error / np.maximum(bound, 1e-300), initial=0.0)
    assert (error <= bound).all(), f"{dtype}: {excess:.3g} x bound"
