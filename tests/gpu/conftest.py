"""Where the GPU tests run: on CUDA, or, to prove their own code, on the CPU.

MLITE_GPU_TESTS_ON=cuda is the default; `cpu` runs them with the CPU kernels, `simulation` with
the CUDA faces and kernels in simulation (`simulated.py`). Without a CUDA device they skip, and
MLITE_REQUIRE_NATIVE=1 makes a library that cannot be had a failure.
"""

from __future__ import annotations

import os

import pytest
import torch

from megatron_lite.native.load import Native, load_native
from tests.gpu import simulated

PLACES = ("cuda", "cpu", "simulation")


def _refuse(reason: str) -> None:
    if os.environ.get("MLITE_REQUIRE_NATIVE", "0") not in ("", "0"):
        pytest.fail(f"{reason}, and MLITE_REQUIRE_NATIVE is set")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def place() -> str:
    """One of PLACES; the operations of the native library are loaded for it."""
    name = os.environ.get("MLITE_GPU_TESTS_ON", "cuda")
    if name not in PLACES:
        raise pytest.UsageError(f"MLITE_GPU_TESTS_ON={name}: legal are {', '.join(PLACES)}")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if name == "simulation":
        if reason := simulated.why_not():
            _refuse(reason)
        torch.ops.load_library(str(simulated.build_library()))
        return name
    native = load_native()
    if not native.serves(name):
        _refuse(native.reason or "the native library was built without CUDA kernels")
    return name


@pytest.fixture(scope="session")
def native(place: str) -> Native:
    """The library in use, as the program would be told of it."""
    return Native(simulated.build_library()) if place == "simulation" else load_native()


@pytest.fixture(scope="session")
def device(place: str) -> torch.device:
    """Where tensors lie."""
    return torch.device("cuda", 0) if place == "cuda" else torch.device("cpu")


@pytest.fixture
def only_cuda(place: str) -> None:
    """Skip what has no counterpart without a GPU: streams, devices, graphs."""
    if place != "cuda":
        pytest.skip("streams, devices and graphs are CUDA's")
