"""The native library whose CUDA faces call simulated kernels, on tensors of the CPU.

Faces are compiled as for CUDA, but take a CPU tensor for a CUDA tensor, know no streams, and
are registered for the CPU; the kernels are those of `tests/sim`. So what a face does between
torch and a launcher (order of arguments, strides, workspaces, optional tensors) is executed
where there is no GPU. A process that loads it has no CPU kernels any more.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_lite.native import build as native_build
from megatron_lite.native import sources
from tests.sim import build

# Included before a face: torch's names are read first, then replaced.
PRELUDE = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
namespace torch::stable::accelerator {
struct NoGuard {
  explicit NoGuard(int32_t) {}
};
}
inline AOTITorchError no_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
#define DeviceGuard NoGuard
#define aoti_torch_get_current_cuda_stream no_stream
#define is_cuda is_cpu
"""
# Attention has dozens of instances; its own tests compile these, too.
DEFINES = {"attention": ("MLITE_ATTENTION_TEST_DIMS",)}
DIRECTORY = build.CACHE / "faces"


def why_not() -> str | None:
    """The reason why the library cannot be had here; None if it can."""
    try:
        native_build.find_compiler()
    except native_build.BuildError as error:
        return str(error)
    return build.why_not()


def _written(path: Path, text: str) -> Path:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def _source(unit: sources.Unit) -> Path:
    """The face's file; of registrations a copy in which those for CUDA serve the CPU."""
    path = build.ROOT / unit.source
    if path.name != "bindings.cpp":
        return path
    text = path.read_text(encoding="utf-8")
    text = text.replace("megatron_lite, CPU,", "megatron_lite, PrivateUse1,")
    text = text.replace("megatron_lite, CUDA,", "megatron_lite, CPU,")
    return _written(DIRECTORY / f"{unit.source.parts[1]}_bindings.cpp", text)


def _kernel_libraries() -> list[Path]:
    """One library of simulated kernels per operation."""
    by_operation: dict[str, list[Path]] = {}
    for unit in sources.cuda_units(build.ROOT, ()):
        by_operation.setdefault(unit.source.parts[1], []).append(unit.source)
    return [
        build.build(files, "plain", DEFINES.get(operation, ()))
        for operation, files in sorted(by_operation.items())
    ]


def _ninja_file(inputs: list[Path]) -> str:
    prelude = _written(DIRECTORY / "prelude.h", PRELUDE)
    flags = [f"-I{build.CSRC}", *native_build.torch_flags(), "-include", str(prelude)]
    compiler = native_build.find_compiler()
    link = " ".join(native_build.link_flags(cuda=False))
    lines = [
        "rule cxx",
        f"  command = {compiler} -MMD -MF $out.d $flags -O1 {' '.join(flags)} -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        "rule link",
        f"  command = {compiler} -shared -o $out $in {link}",
    ]
    objects = []
    for unit in sources.host_units(build.ROOT, cuda=True):
        if unit.torch:
            lines.append(f"build {unit.object}: cxx {_source(unit)}")
            lines.append(f"  flags = {' '.join(unit.flags)}")
            objects.append(unit.object)
    lines.append(f"build faces.so: link {' '.join([*objects, *map(str, inputs)])}")
    return "\n".join([*lines, ""])


@functools.cache
def build_library() -> Path:
    """The library, made from the sources as they are now."""
    plain = native_build.build_library(build.ROOT, cuda=False).parent
    units = sources.host_units(build.ROOT, cuda=True)
    inputs = [plain / unit.object for unit in units if not unit.torch] + _kernel_libraries()
    library = DIRECTORY / "faces.so"
    with build.locked(library):
        (DIRECTORY / "build.ninja").write_text(_ninja_file(inputs), encoding="utf-8")
        beside = Path(sys.executable).parent / "ninja"
        ninja = str(beside) if beside.is_file() else shutil.which("ninja") or "ninja"
        done = subprocess.run([ninja, "-j", "2"], cwd=DIRECTORY, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{done.stdout[-8000:]}{done.stderr[-2000:]}")
    return library
