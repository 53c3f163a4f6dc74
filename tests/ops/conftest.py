"""The native library for the operations' tests, at every instruction level this machine has."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from megatron_lite.native.load import Native, load_native

LEVELS = ("base", "avx2", "avx512", "bf16", "amx")


@pytest.fixture(scope="session")
def native() -> Native:
    loaded = load_native()
    if loaded.library is None:
        if os.environ.get("MLITE_REQUIRE_NATIVE", "0") not in ("", "0"):
            pytest.fail(f"native library required: {loaded.reason}")
        pytest.skip(f"no native library: {loaded.reason}")
    return loaded


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, native: Native) -> Iterator[str]:
    """Run the test at this level; skipped where the processor lacks it."""
    library = ctypes.CDLL(str(native.library))
    wanted = LEVELS.index(request.param)
    try:
        if library.ml_limit_isa(wanted) != wanted:
            pytest.skip(f"this processor lacks {request.param}")
        yield request.param
    finally:
        library.ml_limit_isa(-1)
