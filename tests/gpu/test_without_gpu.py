"""The GPU tests run where there is no GPU: with the faces and kernels of CUDA in simulation.

The first step builds the library (minutes on a cold cache, which the kernels' own tests share).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu import simulated
from tests.sim import build


def run_on(place: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "MLITE_GPU_TESTS_ON": place,
        "MLITE_REQUIRE_NATIVE": "1",
        "PYTHONPATH": str(build.ROOT),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "gpu", *arguments]
    return subprocess.run(
        command, cwd=build.ROOT, env=environment, capture_output=True, text=True, timeout=800
    )


@pytest.mark.timeout(900)
def test_gpu_tests_pass_with_simulated_cuda_kernels() -> None:
    if reason := simulated.why_not():
        pytest.skip(reason)
    simulated.build_library()
    done = run_on("simulation", "tests/gpu")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout


def test_gpu_tests_skip_or_fail_as_told() -> None:
    one = "tests/gpu/test_operations.py::test_every_operation_has_a_cuda_kernel_and_a_problem"
    done = run_on("cpu", one)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "1 passed" in done.stdout
    done = run_on("moon", one)
    assert done.returncode != 0
    assert "MLITE_GPU_TESTS_ON=moon: legal are cuda, cpu, simulation" in done.stdout + done.stderr
