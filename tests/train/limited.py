"""A rank of a run with a limit on what it may allocate beyond what Python and torch have."""

import os
import resource
import sys
from collections.abc import Sequence

from megatron_lite.mesh.launch import run_program
from pretrain import run


def data_bytes() -> int:
    """Private writable memory that this process has mapped: what RLIMIT_DATA counts."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmData:")) * 1024


def limited_rank(argv: Sequence[str], more_bytes: int) -> int:
    """One rank that may map `more_bytes`; without a limit where that is 0."""
    if more_bytes:
        limit = data_bytes() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.argv = ["pretrain.py", *argv]
    code: int = run_program(run, os.environ)
    return code
