"""The host's allocator, told to give large blocks back to the system when they are freed.

Weights that are gathered and dropped in turn, and the whole gradients between, are blocks of
tens of MiB. glibc learns to keep such blocks (up to 32 MiB) on its heap, where the small ones
allocated since hold the holes: a fully sharded run was half as large again as what it used.
Above a fixed size every block is a mapping of its own, which ends when it is freed. That costs
page faults, hence a size that activations seldom reach.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

LARGE_BYTES = 24 * 2**20
# Smaller blocks come and go within a step: the heap's free end stays for them.
KEPT_BYTES = 128 * 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_large_blocks(environ: Mapping[str, str] = os.environ) -> bool:
    """Map blocks of `LARGE_BYTES` and more one by one, for the rest of the process.

    Args:
        environ: where the user may have decided (MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES).

    Returns:
        Whether it is in force: not where the user has decided, nor without glibc.
    """
    if "MALLOC_MMAP_THRESHOLD_" in environ or "mmap_threshold" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Naming one of the two ends glibc's learning of both.
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
