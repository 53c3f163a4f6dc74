"""Compile kernel sources for GPUs, and read what ptxas and nvdisasm say of the machine code.

A source is compiled once per architecture: the cubin lies under build/nvcc with ptxas's report
beside it, and serves every test until a file that it was made from changes. `need_nvcc` is the
one place that decides between skipping and failing where a tool is missing: MLITE_REQUIRE_NVCC=1
(continuous integration) makes it a failure.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.sim import build

ARCHITECTURES = ("sm_80", "sm_90")
CACHE = build.ROOT / "build" / "nvcc"
REQUIRED = "MLITE_REQUIRE_NVCC"


# ---- what this machine has -----------------------------------------------------------------
@cache
def disassembler() -> str | None:
    """nvdisasm of the toolkit, or the one that Triton's wheel brings, or None."""
    compiler = build.nvcc()
    folders = [Path(compiler).resolve().parent] if compiler else []
    folders += [
        Path(entry) / "triton" / "backends" / "nvidia" / "bin"
        for entry in sys.path
        if entry.endswith("site-packages")
    ]
    found = [str(folder / "nvdisasm") for folder in folders if (folder / "nvdisasm").is_file()]
    return found[0] if found else shutil.which("nvdisasm")


def why_not_nvcc() -> str | None:
    """The reason why machine code cannot be checked here; None if it can."""
    if build.nvcc() is None:
        return "no nvcc on this machine"
    if disassembler() is None:
        return "no nvdisasm on this machine (neither CUDA's nor that of the triton wheel)"
    return None


def need_nvcc() -> None:
    """Skip the test where the tools are missing; fail where MLITE_REQUIRE_NVCC demands them."""
    reason = why_not_nvcc()
    if reason is None:
        return
    if os.environ.get(REQUIRED, "0") not in ("", "0"):
        pytest.fail(f"{reason}, and {REQUIRED} is set")
    pytest.skip(reason)


# ---- compiling -----------------------------------------------------------------------------
def compile_for_gpu(source: Path | str, arch: str, defines: Sequence[str] = ()) -> Path:
    """Compile with nvcc for one architecture ("sm_90"), or find what was compiled before.

    Args:
        source: .cu file, absolute or relative to the repository.
        arch: one of ARCHITECTURES.
        defines: macros, "NAME" or "NAME=VALUE".

    Returns:
        the cubin, for `resources` and `instructions`; kept beside a source from elsewhere.
    """
    path = build.ROOT / source
    flags = ["-std=c++17", "-O3", "-cubin", f"-arch={arch}", f"-I{build.CSRC}", "-Xptxas=-v"]
    command = [str(build.nvcc()), *flags, *(f"-D{define}" for define in defines)]
    folder = CACHE if path.is_relative_to(build.ROOT) else path.parent
    name = f"{path.stem}-{arch}-{build.digest_of((str(path), *command), ())}"
    listing = folder / f"{name}.json"
    with build.locked(listing):
        if listing.is_file():
            inputs = [Path(entry) for entry in json.loads(listing.read_text())]
            ready = folder / f"{name}-{build.digest_of((), inputs)}.cubin"
            if ready.is_file() and _report(ready).is_file():
                return ready
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made, deps = Path(scratch) / "out.cubin", Path(scratch) / "out.d"
            command += ["-MMD", "-MF", str(deps), "-x", "cu", str(path), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")
            words = deps.read_text().replace("\\\n", " ").split(" : ", 1)[1].split()
            inputs = [Path(word).resolve() for word in words]
            ready = folder / f"{name}-{build.digest_of((), inputs)}.cubin"
            _report(ready).write_text(done.stderr)
            made.replace(ready)
            listing.write_text(json.dumps([str(entry) for entry in inputs]))
        return ready


def _report(cubin: Path) -> Path:
    return cubin.with_suffix(".txt")


# ---- reading -------------------------------------------------------------------------------
def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """Read ptxas's report on a cubin of `compile_for_gpu`.

    Returns:
        mangled kernel name -> {"registers", "spill_bytes", "stack_bytes", "shared_bytes"}
    """
    return parse_resources(_report(cubin).read_text())


def parse_resources(report: str) -> dict[str, dict[str, int]]:
    """Read the verbose report of ptxas."""
    kernels: dict[str, dict[str, int]] = {}
    for part in re.split(r"Compiling entry function '", report)[1:]:

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match.group(1)) if match else 0

        kernels[part.split("'", 1)[0]] = {
            "registers": number(r"Used (\d+) registers"),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "stack_bytes": number(r"(\d+) bytes stack frame"),
            "shared_bytes": number(r"(\d+) bytes smem"),
        }
    return kernels


def instructions(cubin: Path) -> dict[str, Counter[str]]:
    """Disassemble: mangled kernel name -> opcode with its modifiers -> how often it stands."""
    command = [str(disassembler()), "-c", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return parse_instructions(done.stdout)


def parse_instructions(listing: str) -> dict[str, Counter[str]]:
    """Read nvdisasm's listing; a predicate before an opcode is not part of it."""
    kernels: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in listing.splitlines():
        start = re.match(r"\.text\.(\S+):", line)
        if start:
            current = kernels.setdefault(start.group(1), Counter())
            continue
        opcode = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if opcode:
            current[opcode.group(1)] += 1
    return kernels


def plain_names(mangled: Sequence[str]) -> list[str]:
    """Demangle, without namespaces, return type and parameters: "adamw<__half, true>"."""
    tool = shutil.which("c++filt")
    if tool is None:
        raise RuntimeError("no c++filt on this machine (binutils, which nvcc's host compiler uses)")
    done = subprocess.run(
        [tool], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    return [_plain(name) for name in done.stdout.splitlines()]


def _plain(name: str) -> str:
    name = name.replace("(anonymous namespace)::", "")
    name = re.sub(r"\((?:\w+::)*\w+\)(\d)", r"\1", name)  # an enumerator's cast
    name = re.sub(r"\w+::", "", name.removeprefix("void "))
    return name.split("(", 1)[0]
