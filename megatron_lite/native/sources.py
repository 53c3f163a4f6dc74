"""What the native library consists of: one list for setup.py and for building at first use.

Sources lie by convention: `csrc/<operation>/bindings.cpp` and `api.cpp` (the only files that
see torch, through its stable ABI), `csrc/<operation>/cpu/*.cpp` (compiled once per instruction
level, chosen at run time), `csrc/<operation>/*.cu` (no torch headers). Imports nothing but the
standard library, so that setup.py can read it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

# Minor release whose stable ABI is used; the library then loads in every later torch.
TORCH_TARGET = (2, 11)
DEFAULT_CUDA_ARCHITECTURES = ("80", "90", "100")

_LEVEL_FLAGS: dict[str, tuple[str, ...]] = {
    "base": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
_LEVEL_FLAGS["avx512"] = (
    *_LEVEL_FLAGS["avx2"],
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
)
_LEVEL_FLAGS["bf16"] = (*_LEVEL_FLAGS["avx512"], "-mavx512bf16")
_LEVEL_FLAGS["amx"] = (*_LEVEL_FLAGS["bf16"], "-mamx-tile", "-mamx-bf16")

_ELEMENT_LEVELS = ("base", "avx2", "avx512")
# Operations with matrix products: declared by ML_CPU_MATRIX_KERNEL (csrc/cpu/isa.h).
_MATRIX_OPERATIONS = ("attention", "matrix")
# Bit-exact with NumPy: no product may be fused with a sum.
_EXACT_OPERATIONS = ("fp8", "dropout")

_COMMON_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")


@dataclass(frozen=True)
class Unit:
    """One compilation.

    Attributes:
        source: relative to the root of the checkout.
        object: name of the object file.
        flags: of the host compiler, or of nvcc for a .cu file.
        torch: needs torch's headers.
    """

    source: Path
    object: str
    flags: tuple[str, ...]
    torch: bool = False


def source_root() -> Path | None:
    """Root of the checkout that this package lies in; None where it was installed without."""
    root = Path(__file__).resolve().parent.parent.parent
    return root if (root / "csrc" / "cpu" / "isa.h").is_file() else None


def cuda_architectures(environ: Mapping[str, str], known: Collection[str]) -> tuple[str, ...]:
    """Compute capabilities to build for.

    Args:
        environ: MLITE_CUDA_ARCHITECTURES="80;90" decides.
        known: what the compiler can build, e.g. {"80", "90", "100"}; empty: not asked.

    Returns:
        Without the switch, those of the default list that the compiler knows.
    """
    text = environ.get("MLITE_CUDA_ARCHITECTURES", "")
    wanted = tuple(part.strip().replace(".", "") for part in text.split(";") if part.strip())
    return wanted or tuple(a for a in DEFAULT_CUDA_ARCHITECTURES if not known or a in known)


def _object_name(source: Path, level: str = "") -> str:
    stem = "-".join(source.with_suffix("").parts[1:])
    return f"{stem}{'-' + level if level else ''}{source.suffix.replace('.', '-')}.o"


def _cpu_kernel_units(root: Path) -> list[Unit]:
    units = []
    for path in sorted(root.glob("csrc/*/cpu/*.cpp")):
        source = path.relative_to(root)
        operation = source.parts[1]
        levels = tuple(_LEVEL_FLAGS) if operation in _MATRIX_OPERATIONS else _ELEMENT_LEVELS
        if platform.machine() not in ("x86_64", "AMD64"):
            levels = ("base",)
        contract = "off" if operation in _EXACT_OPERATIONS else "fast"
        for level in levels:
            # On x86-64 only processors older than AVX2 run it: compiling fast is worth more.
            optimize = "-O1" if level == "base" and len(levels) > 1 else "-O3"
            flags = (
                *("-std=c++17", optimize, *_COMMON_FLAGS, f"-ffp-contract={contract}"),
                *(*_LEVEL_FLAGS[level], f"-DML_ISA={level}", f"-DML_ISA_{level.upper()}"),
            )
            units.append(Unit(source, _object_name(source, level), flags))
    return units


def host_units(root: Path, cuda: bool) -> list[Unit]:
    """All C++ compilations; with `cuda` the faces call the CUDA launchers."""
    target = f"-DTORCH_TARGET_VERSION=0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000"
    faces = [*root.glob("csrc/*/api.cpp"), *root.glob("csrc/*/bindings.cpp")]
    units = [
        Unit(
            path.relative_to(root),
            _object_name(path.relative_to(root)),
            (
                "-std=c++20",
                *_COMMON_FLAGS,
                target,
                *(("-DML_WITH_CUDA", "-DUSE_CUDA") if cuda else ()),
            ),
            torch=True,
        )
        for path in sorted(faces)
    ]
    for path in sorted(root.glob("csrc/cpu/*.cpp")):
        source = path.relative_to(root)
        units.append(Unit(source, _object_name(source), ("-std=c++17", "-O2", *_COMMON_FLAGS)))
    return units + _cpu_kernel_units(root)


def cuda_units(root: Path, architectures: tuple[str, ...]) -> list[Unit]:
    """All compilations by nvcc."""
    codes = tuple(f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures)
    flags = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-lineinfo", *codes)
    sources = [path.relative_to(root) for path in sorted(root.glob("csrc/*/*.cu"))]
    return [Unit(source, _object_name(source), flags) for source in sources]


def fingerprint(root: Path, *facts: str) -> str:
    """Hash of every file of csrc/, of this module and of further facts (compiler, torch)."""
    digest = hashlib.sha256()
    files = [path for path in root.glob("csrc/**/*") if path.is_file()]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    digest.update(Path(__file__).read_bytes())
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:24]
