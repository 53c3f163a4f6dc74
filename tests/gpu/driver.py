"""Run the small problems of some families once: what compute-sanitizer looks at.

compute-sanitizer --tool racecheck python -m tests.gpu.driver norm attention
"""

from __future__ import annotations

import sys

import torch

from megatron_lite.native.load import load_native
from tests.gpu.problems import BF16, FAMILIES, FP32
from tests.gpu.running import run


def main(families: list[str]) -> int:
    """Number of problems run, printed; 1 where there are no CUDA kernels."""
    native = load_native()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not native.serves(device):
        print(native.reason or "no CUDA kernels", file=sys.stderr)
        return 1
    count = 0
    for family in families or list(FAMILIES):
        for dtype in (BF16, FP32):
            if family == "attention" and dtype == FP32:
                continue
            for problem in FAMILIES[family](dtype, "small"):
                run(problem, device)
                count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"ran {count} problems on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
