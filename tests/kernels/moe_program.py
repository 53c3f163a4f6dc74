"""Run every MoE kernel once, in the mode of this process (build.environment).

`python -m tests.kernels.moe_program` ends with the line "done"; a sanitizer's report comes
before it, or instead.
"""

import numpy as np

from tests.kernels.fp8_oracle import BFLOAT16
from tests.sim import build


def main() -> None:
    kernels = build.load([f"csrc/moe/{name}.cu" for name in ("routing", "pack", "combine")])
    rng = np.random.default_rng(0)
    tokens, experts, k, align = 520, 6, 2, 4
    n = tokens * k
    rows = n + experts * (align - 1)
    ids = build.placed(rng.integers(-1, experts, n).astype(np.int32))
    counts, offsets = build.poisoned(experts, np.int64), build.poisoned(experts + 1, np.int64)
    chunks = build.poisoned((experts, -(-n // 512)), np.int32)
    row_of, source = build.poisoned(n, np.int32), build.poisoned(rows, np.int32)
    kernels.call("launch_moe_route", ids, n, experts, align, rows, counts, offsets, chunks,
                 row_of, source)  # fmt: skip
    kernels.call("launch_moe_splits", counts, experts, 3, build.poisoned(3, np.int64))
    probs = build.placed(rng.random(n).astype(np.float32))
    packed_probs, back = build.poisoned(rows, np.float32), build.poisoned(n, np.float32)
    # Rows of words, of vectors, of single bytes.
    for dtype, number, h in ((np.float32, 0, 7), (np.float32, 0, 40), (BFLOAT16, 1, 5),
                             (BFLOAT16, 1, 264)):  # fmt: skip
        x = build.placed(rng.standard_normal((tokens, h)).astype(dtype))
        packed, d_packed = (build.poisoned((rows, h), dtype) for _ in range(2))
        kernels.call("launch_moe_gather", x, h * x.itemsize, source, packed, probs, packed_probs,
                     rows, h * x.itemsize, k)  # fmt: skip
        kernels.call("launch_moe_scatter_probs", packed_probs, row_of, back, n)
        out = build.poisoned((tokens, h), dtype)
        kernels.call("launch_moe_combine", packed, number, row_of, probs, out, tokens, h, k)
        kernels.call("launch_moe_combine_backward", packed, number, row_of, source, probs, out,
                     d_packed, back, tokens, rows, h, k)  # fmt: skip
    print("done", flush=True)


if __name__ == "__main__":
    main()
