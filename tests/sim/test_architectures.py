"""The fiber switch is written twice: both give the same results, the same reports."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sim import build
from tests.sim.conftest import SOURCES

CROSS, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")


def digest(compiler: str, folder: Path, *run_with: str) -> str:
    """Build digest_main.cpp with its kernels, statically, and run it."""
    program = folder / "digest"
    sources = [*SOURCES, "tests/sim/kernels/digest_main.cpp"]
    files = [str(build.ROOT / source) for source in sources] + [str(p) for p in build.RUNTIME]
    includes = [part for header in build.cuda_headers() for part in ("-isystem", str(header))]
    flags = [*build.COMMON, "-O1", "-static", f"-I{build.CSRC}", *includes]
    subprocess.run([compiler, *flags, "-x", "c++", *files, "-o", str(program)], check=True)
    command = [*run_with, str(program)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_aarch64_gives_the_digests_and_reports_of_this_machine(tmp_path: Path) -> None:
    emulator = next((found for name in EMULATOR if (found := shutil.which(name))), None)
    if build.why_not() is not None or shutil.which(CROSS) is None or emulator is None:
        pytest.skip(f"needs CUDA headers, {CROSS} and {' or '.join(EMULATOR)}")
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = digest(str(build.compiler()), tmp_path / "here")
    there = digest(CROSS, tmp_path / "there", emulator)
    assert "transpose 0" in here
    assert "deadlock 1" in here
    assert there == here
