"""Launches of the fp8 kernels with poisoned outputs, for the tests of their two sources."""

from typing import Any

import numpy as np

from tests.kernels.fp8_oracle import BFLOAT16, Array, Format
from tests.sim import build

SOURCES = tuple(f"csrc/fp8/{name}.cu" for name in ("scaling", "quantize", "dequantize"))
SCALINGS = ("tensor", "rows", "square", "mx")
DTYPES = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
NAMES = ["fp32", "bf16", "fp16"]


def code_of(dtype: Any) -> int:
    return DTYPES.index(np.dtype(dtype))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def scale_arrays(scaling: str, rows: int, cols: int) -> tuple[Array | None, Array | None]:
    """Poisoned outputs of the scales, rowwise and transposed."""
    if scaling == "rows":
        shapes = (ceil_div(cols, 128), rows), (ceil_div(rows, 128), cols)
    elif scaling == "mx":
        shapes = (rows, ceil_div(cols, 32)), (cols, ceil_div(rows, 32))
    elif scaling == "square":
        return build.poisoned((ceil_div(rows, 128), ceil_div(cols, 128)), np.float32), None
    else:
        return None, None
    dtype = np.uint8 if scaling == "mx" else np.float32
    return build.poisoned(shapes[0], dtype), build.poisoned(shapes[1], dtype)


class Result:
    """Outputs of one launch."""

    def __init__(self, kernels: build.Kernels, x: Array, scaling: str, form: Format, **more: Any):
        rows, cols = x.shape
        self.codes = build.poisoned((rows, cols), np.uint8) if more.get("rowwise", True) else None
        wanted = more.get("transposed", True)
        self.codes_t = build.poisoned((cols, rows), np.uint8) if wanted else None
        self.scale_inv, self.scale_inv_t = scale_arrays(scaling, rows, cols)
        tiles = ceil_div(rows, 128) * ceil_div(cols, 128)
        self.partial = build.poisoned(tiles, np.uint32) if scaling == "tensor" else None
        words = more.get("stochastic", (0, 0, 0, 0, 0))
        self.arguments = (
            "launch_fp8_quantize", x, code_of(x.dtype), rows, cols,
            x.strides[0] // x.itemsize if rows > 1 else cols, SCALINGS.index(scaling), form.code,
            self.codes, self.codes_t, build.placed(np.float32([more.get("scale", 1.0)])),
            self.scale_inv, self.scale_inv_t, self.partial, float(more.get("epsilon", 0.0)),
            int(more.get("power_of_two", False)), int("stochastic" in more), *words,
        )  # fmt: skip
        if more.get("count"):
            self.counts = kernels.count(*self.arguments)
        else:
            kernels.call(*self.arguments)


def dequantized(
    kernels: build.Kernels, codes: Array, scale_inv: Array, scaling: str, form: Format, dtype: Any
) -> Array:
    """Values by the launcher."""
    out = build.poisoned(codes.shape, np.dtype(dtype))
    kernels.call("launch_fp8_dequantize", codes, form.code, SCALINGS.index(scaling), scale_inv,
                 out, code_of(dtype), *codes.shape)  # fmt: skip
    return out


def inputs(rng: np.random.Generator, rows: int, cols: int, dtype: Any) -> Array:
    spread = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-8, 8, (rows, 1)))
    return build.placed(spread.astype(dtype))
