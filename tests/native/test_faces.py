"""The faces and the CUDA launchers they call agree, and compile, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_lite.native import build, sources

ROOT = Path(__file__).resolve().parents[2]
FACES = sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/*/api.cpp"))


def parameter_types(parameters: str) -> list[str]:
    """Types of a parameter list, without names and spacing."""
    types = []
    for part in filter(None, (text.strip() for text in parameters.split(","))):
        stripped = re.sub(r"\b[A-Za-z_]\w*$", "", part) if " " in part or "*" in part else part
        types.append(re.sub(r"\s+", "", stripped))
    return types


def functions(text: str, pattern: str) -> dict[str, tuple[str, list[str]]]:
    found = re.finditer(pattern + r"\s*(int64_t|int|void)\s+(\w+)\(([^)]*)\)", text)
    return {m.group(2): (m.group(1), parameter_types(m.group(3))) for m in found}


@pytest.mark.parametrize("face", FACES, ids=lambda path: path.parts[1])
def test_declared_launchers_are_those_of_the_kernels(face: Path) -> None:
    text = (ROOT / face).read_text(encoding="utf-8")
    block = re.search(r'#ifdef ML_WITH_CUDA\s+extern "C"(.*?)\n(\}|#endif)', text, re.DOTALL)
    if block is None:
        assert not list((ROOT / face.parent).glob("*.cu")), "kernels that no face calls"
        return
    declared = functions(block.group(1), "")
    assert declared
    defined: dict[str, tuple[str, list[str]]] = {}
    for kernel in (ROOT / face.parent).glob("*.cu"):
        defined |= functions(kernel.read_text(encoding="utf-8"), "ML_EXPORT")
    for name, signature in declared.items():
        assert signature == defined[name], name


@pytest.mark.parametrize("face", FACES, ids=lambda path: path.parts[1])
def test_faces_compile_with_cuda(face: Path) -> None:
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    unit = next(u for u in sources.host_units(ROOT, cuda=True) if u.source == face)
    include = Path(torch.__file__).parent / "include"
    command = [compiler, *unit.flags, "-fsyntax-only", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    done = subprocess.run([*command, str(ROOT / face)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
