"""Run every fp8 kernel once or twice, in the mode of this process (build.environment).

`python -m tests.kernels.fp8_program` ends with the line "done"; a sanitizer's report comes
before it, or instead.
"""

import numpy as np

from tests.kernels.fp8_calls import SOURCES
from tests.kernels.fp8_oracle import BFLOAT16
from tests.sim import build


def main() -> None:
    kernels = build.load(SOURCES)
    rng = np.random.default_rng(0)
    for rows, cols, dtype, stochastic in ((130, 144, BFLOAT16, 0), (37, 131, np.float32, 1)):
        x = build.placed(rng.standard_normal((rows, cols)).astype(dtype))
        dtype_code = int(dtype is BFLOAT16)
        partial, amax = build.poisoned(4, np.uint32), build.poisoned(1, np.float32)
        kernels.call("launch_fp8_amax", x, dtype_code, partial, 4, amax, rows, cols, cols)
        scale, inverse = build.poisoned(1, np.float32), build.poisoned(1, np.float32)
        kernels.call("launch_fp8_scales", amax, scale, inverse, 1, 0, 0.0, 0)
        history = build.placed(np.ones((3, 1), np.float32))
        kernels.call("launch_fp8_delayed_update", history, scale, inverse, 3, 1, 0, 1.0, 0, 0.0, 0)
        down, across = -(-rows // 128), -(-cols // 128)
        float_scales = (np.float32, (across, rows), (down, cols))
        exponents = (np.uint8, (rows, -(-cols // 32)), (cols, -(-rows // 32)))
        square = (np.float32, (down, across), (0,))
        for scaling, (kind, by_row, by_col) in enumerate((square, float_scales, square, exponents)):
            codes, codes_t = (
                build.poisoned(shape, np.uint8) for shape in ((rows, cols), (cols, rows))
            )
            scales = build.poisoned(by_row, kind)
            kernels.call(
                "launch_fp8_quantize", x, dtype_code, rows, cols, cols, scaling, 0, codes, codes_t,
                scale, scales, build.poisoned(by_col, kind),
                build.poisoned(down * across, np.uint32), 0.0, 0, stochastic, 2**63 - 1, 1, 2, 3,
                cols,
            )  # fmt: skip
            kernels.call(
                "launch_fp8_dequantize", codes, 0, scaling, inverse if scaling == 0 else scales,
                build.poisoned((rows, cols), x.dtype), dtype_code, rows, cols,
            )  # fmt: skip
    print("done", flush=True)


if __name__ == "__main__":
    main()
