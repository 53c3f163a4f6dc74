"""Run kernels with a planted fault, or their correct twins, by name in a process of its own.

`python -m tests.sim.program BROKEN NAME...` prints one line per kernel before it runs, so that
a sanitizer's report can be told from the next one's. The process runs under
`build.environment(mode)`.
"""

import sys
from typing import Any

import numpy as np

from tests.sim import build
from tests.sim.conftest import SOURCES

ROWS, ROW_BYTES = 70_000, 40_000  # their product is over 2^31


def arguments(name: str) -> tuple[Any, ...]:
    """Fresh arguments of a launcher, without the last one, `broken`."""
    values = build.placed(np.arange(1, 129, dtype=np.float32))
    match name:
        case "unwritten_tail" | "missing_guard":
            return build.placed(values[:50]), build.poisoned(50, np.float32), 50
        case "masked_row":
            rows = build.placed(np.zeros((8, 4), np.float32))
            rows[3] = -np.inf
            return rows, build.poisoned(8, np.float32)
        case "misaligned_copy":
            return values, build.poisoned(32, np.float32)
        case "global_race" | "order_dependence":
            return (build.placed(np.zeros(1, np.int32)),)
        case "narrow_index":
            return build.sparse(ROWS * ROW_BYTES, np.uint8), ROWS, ROW_BYTES
        case "misaligned_ldmatrix":
            return (build.poisoned(32, np.uint32),)
        case "removed_barrier" | "unsynchronised_copy" | "shared_off_by_one":
            return build.placed(values[:64]), build.poisoned(64, np.float32)
        case "wrong_wait_count":
            return values, build.poisoned(128, np.float32)
        case _:
            return (build.poisoned(128, np.float32),)


def main() -> None:
    broken, *names = sys.argv[1:]
    kernels = build.load(SOURCES)
    for name in names:
        print(f"== {name}", flush=True)
        try:
            kernels.call(f"launch_{name}", *arguments(name), int(broken))
        except build.SimError as error:
            print(error, flush=True)
        sys.stderr.flush()


if __name__ == "__main__":
    main()
