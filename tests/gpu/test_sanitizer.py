"""compute-sanitizer finds nothing in any kernel: memcheck, racecheck, synccheck."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.native.build import find_nvcc
from tests.gpu.problems import FAMILIES
from tests.sim.build import ROOT

pytestmark = pytest.mark.gpu
# Only kernels of the library: torch's are slow to check and not ours.
OURS = "kernel_substring=2ml"  # of the mangled name: namespace ml


def find_sanitizer() -> str | None:
    """On PATH or beside nvcc."""
    nvcc = find_nvcc()
    beside = [str(Path(nvcc).resolve().parent / "compute-sanitizer")] if nvcc else []
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    beside += [str(home / "bin" / "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next(filter(os.path.isfile, beside), None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(place: str, tool: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.driver"]
    if place == "cuda":
        sanitizer = find_sanitizer()
        if sanitizer is None:
            pytest.skip("no compute-sanitizer on PATH or in the toolkit")
        options = ["--tool", tool, "--error-exitcode", "9", "--kernel-name", OURS]
        command = [sanitizer, *options, *command]
    elif tool != "memcheck":
        pytest.skip("the driver alone is run once")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ran " in done.stdout, f"{len(FAMILIES)} families were not run"
