"""The library with CUDA kernels builds, links and loads where there is no GPU.

The whole library takes minutes and is marked slow; its faces and kernels are linked in
simulation by tests/gpu, its kernels compiled by tests/kernels.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.native import build
from tests.native.test_library import ROOT, copy_of_sources
from tests.sim import nvcc

KERNEL = """
__global__ void set(int* x) { *x = 1; }
extern "C" __attribute__((visibility("default"))) int launch_set(int* x) {
  set<<<1, 1>>>(x);
  return static_cast<int>(cudaGetLastError());
}
"""
PROGRAM = """
import pkgutil, sys, torch
import megatron_lite.ops
from importlib import import_module
for module in pkgutil.iter_modules(megatron_lite.ops.__path__):
    import_module(f"megatron_lite.ops.{module.name}")
torch.ops.load_library(sys.argv[1])
from megatron_lite.ops.norm import norm_forward
out = norm_forward(torch.ones(2, 4), None, torch.ones(4), None, 0.0, False)[0]
assert torch.equal(out, torch.ones(2, 4))
has = torch._C._dispatch_has_kernel_for_dispatch_key
for name in torch._C._dispatch_get_all_op_names():
    if name.startswith("megatron_lite::"):
        print(name.removeprefix("megatron_lite::"), has(name, "CPU"), has(name, "CUDA"))
"""
# Plain torch on CUDA, or made of other operations.
WITHOUT_CUDA_KERNEL = {"accumulate_product", "cross_entropy"}


def small_checkout(path: Path) -> Path:
    root = copy_of_sources(path)
    (root / "csrc" / "one").mkdir()
    (root / "csrc" / "one" / "one.cu").write_text(KERNEL)
    return root


@pytest.fixture(autouse=True)
def one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLITE_CUDA_ARCHITECTURES", "9.0")


def need_cuda() -> None:
    nvcc.need_nvcc()
    if torch.version.cuda is None:
        pytest.skip("torch is built without CUDA")


def test_a_kernel_is_compiled_linked_and_loaded(tmp_path: Path) -> None:
    need_cuda()
    library = build.build_library(small_checkout(tmp_path), cuda=True)
    loaded = ctypes.CDLL(str(library))
    if not torch.cuda.is_available():
        assert loaded.launch_set(None) != 0, "a launch without a device is an error, not a crash"
    assert "-gencode=arch=compute_90,code=sm_90" in (library.parent / "build.ninja").read_text()


def test_what_nothing_defines_is_an_error_of_the_build(tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path)
    text = 'extern "C" int launch_missing(int);\nextern "C" int two() { return launch_missing(2); }'
    (root / "csrc" / "cpu" / "two.cpp").write_text(text)
    with pytest.raises(build.BuildError, match="undefined reference to `launch_missing'"):
        build.build_library(root, cuda=False)


def test_the_runtime_is_found_behind_a_compiler_that_is_a_wrapper(tmp_path: Path) -> None:
    library = tmp_path / "toolkit" / "lib" / "libcudart.so"
    library.parent.mkdir(parents=True)
    library.touch()
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}/toolkit/bin/..' >&2\n")
    wrapper.chmod(0o755)
    (tmp_path / "toolkit" / "bin").mkdir()
    assert build.find_cudart(str(wrapper)).resolve() == library


def test_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: "/usr/bin/true")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(build.BuildError, match="built without CUDA"):
        build.link_flags(cuda=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_library_serves_cuda_and_the_cpu() -> None:
    need_cuda()
    library = build.build_library(ROOT, cuda=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, cuda in rows if cuda == "False"} == WITHOUT_CUDA_KERNEL
    assert {name for name, cpu, _ in rows if cpu == "False"} == {"cross_entropy"}
