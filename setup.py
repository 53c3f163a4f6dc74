"""Install megatron_lite with its native code; works without CUDA and without a compiler.

Native code is optional by construction: every native operation has a Python twin that
is its oracle, so a failed build warns and the installation goes on. Set
MLITE_REQUIRE_NATIVE=1 (continuous integration does) to make a failed build an error.

The operations' library is built by megatron_lite/native/, from the same list of sources as at
first use: with the CUDA kernels where nvcc and a device are found (MLITE_CUDA=1 or 0 decides
otherwise, MLITE_CUDA_ARCHITECTURES="80;90" names the targets), never needing nvcc without.
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent

TORCH = "torch>=2.11,<2.16"
TRAIN = ["rich>=13", "matplotlib>=3.8", "tensorboard>=2.16", "wandb>=0.17"]
CONVERT = ["transformers>=4.50", "tokenizers>=0.20"]
REMOTE = ["fsspec>=2024.12"]  # and the store's own client: s3fs, gcsfs, ...
DEV = [
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "fsspec>=2024.12",
    "ml_dtypes>=0.4",
    "ruff>=0.17,<0.18",
    "mypy>=2.4,<2.5",
    "import-linter>=2.5",
    "pybind11>=2.12",
    "setuptools>=70",
    "wheel",
]


def read_version() -> str:
    """Take the version from the package without importing it."""
    text = (ROOT / "megatron_lite" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("megatron_lite/__init__.py states no __version__")
    return match.group(1)


def cpu_extensions() -> list[Extension]:
    """Extensions in plain C++ through pybind11: no torch headers, so no torch at build time."""
    try:
        import pybind11
    except ImportError:
        tell_skipped("pybind11 is not installed")
        return []
    sources = [Path("csrc/index/index.cpp")]
    missing = [str(path) for path in sources if not (ROOT / path).is_file()]
    if missing:
        tell_skipped(f"no source {', '.join(missing)}")
        return []
    return [
        Extension(
            "megatron_lite.data._index",
            sources=[str(path) for path in sources],
            include_dirs=[pybind11.get_include()],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
        )
    ]


def build_operations(destination: Path | None) -> str:
    """Build the library of native operations; copy it into a package that is not a checkout.

    Returns why it was not built, "" where it was.
    """
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed yet: operations are built at first use instead"
    sys.path.insert(0, str(ROOT))
    from megatron_lite.native import build

    cuda = build.wants_cuda()
    try:
        library = build.build_library(ROOT, cuda)
    except build.BuildError as error:
        return str(error)
    if destination is not None:
        destination.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, destination / build.LIBRARY)
        if cuda:
            (destination / build.CUDA_MARK).touch()
    return ""


def native_required() -> bool:
    return os.environ.get("MLITE_REQUIRE_NATIVE", "0") not in ("", "0")


def tell_skipped(reason: str) -> None:
    """Warn that the Python twins will run; stop instead where native code is demanded."""
    if native_required():
        raise SystemExit(f"native helpers are required (MLITE_REQUIRE_NATIVE): {reason}")
    print(f"warning: native helpers not built ({reason}); Python twins run", file=sys.stderr)


class OptionalBuild(build_ext):
    """Build what can be built, say once what could not, and go on."""

    def run(self) -> None:
        self.skipped: list[str] = []
        try:
            super().run()
        except Exception as error:  # a missing compiler shows in as many types as toolchains
            self.skipped.append(str(error))
        editable = self.inplace or self.editable_mode
        package = Path(self.build_lib) / "megatron_lite" / "native"
        self.skipped.append(build_operations(None if editable else package))
        reasons = [reason for reason in self.skipped if reason]
        if reasons:
            tell_skipped("; ".join(reasons))

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            self.skipped.append(f"{ext.name}: {error}")

    def copy_extensions_to_source(self) -> None:
        """Copy what was built; an extension that was skipped leaves nothing to copy."""
        self.extensions = [ext for ext in self.extensions if self.is_built(ext)]
        super().copy_extensions_to_source()

    def is_built(self, ext: Extension) -> bool:
        return (Path(self.build_lib) / self.get_ext_filename(ext.name)).is_file()


setup(
    name="megatron_lite",
    version=read_version(),
    description="Pretraining of Transformer language models, the same numbers in any layout",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    package_data={"megatron_lite": ["**/*.tsv", "**/*.json", "py.typed"]},
    install_requires=[
        TORCH,
        "numpy>=1.26",
        "ninja>=1.11",
        "safetensors>=0.4",
        "sentencepiece>=0.2",
        "pyyaml>=6",
    ],
    extras_require={"train": TRAIN, "convert": CONVERT, "remote": REMOTE, "dev": DEV},
    ext_modules=cpu_extensions(),
    cmdclass={"build_ext": OptionalBuild},
    zip_safe=False,
)
