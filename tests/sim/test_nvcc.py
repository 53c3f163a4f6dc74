"""The same sources are CUDA: nvcc compiles every test kernel, without spilling registers."""

import pytest

from tests.sim import build, nvcc
from tests.sim.conftest import SOURCES


@pytest.mark.parametrize("arch", nvcc.ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_test_kernels_compile_for_gpus(source: str, arch: str) -> None:
    nvcc.need_nvcc()
    kernels = nvcc.resources(nvcc.compile_for_gpu(source, arch))
    expected = (build.ROOT / source).read_text().count("__global__ void")
    assert len(kernels) >= expected
    for name, resources in kernels.items():
        assert 0 < resources["registers"] <= 255
        assert resources["spill_bytes"] == 0, name


def test_resource_report_is_read() -> None:
    text = (
        "ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z4copyPf\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 4224 bytes smem\n"
    )
    want = {"registers": 40, "spill_bytes": 12, "stack_bytes": 16, "shared_bytes": 4224}
    assert nvcc.parse_resources(text) == {"_Z4copyPf": want}
