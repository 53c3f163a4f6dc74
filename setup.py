"""Install megatron_lite with its native helpers; works without CUDA and without a compiler.

Native code is optional by construction: every native operation has a Python twin that
is its oracle, so a failed build warns and the installation goes on. Set
MLITE_REQUIRE_NATIVE=1 (continuous integration does) to make a failed build an error.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent

TORCH = "torch>=2.11,<2.16"
TRAIN = ["rich>=13", "matplotlib>=3.8", "tensorboard>=2.16", "wandb>=0.17"]
CONVERT = ["transformers>=4.50", "tokenizers>=0.20"]
DEV = [
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
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


def cuda_extensions() -> list[Extension]:
    """The place for CUDA kernels: built only where nvcc and a CUDA torch are found. None yet."""
    return []


def native_required() -> bool:
    return os.environ.get("MLITE_REQUIRE_NATIVE", "0") not in ("", "0")


def tell_skipped(reason: str) -> None:
    """Warn that the Python twins will run; stop instead where native code is demanded."""
    if native_required():
        raise SystemExit(f"native helpers are required (MLITE_REQUIRE_NATIVE): {reason}")
    print(f"warning: native helpers not built ({reason}); Python twins run", file=sys.stderr)


class OptionalBuild(build_ext):
    """Build extensions, and go on without one that does not compile."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # a missing compiler shows in as many types as toolchains
            tell_skipped(str(error))

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            tell_skipped(f"{ext.name}: {error}")

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
    install_requires=[TORCH, "numpy>=1.26", "safetensors>=0.4", "sentencepiece>=0.2", "pyyaml>=6"],
    extras_require={"train": TRAIN, "convert": CONVERT, "dev": DEV},
    ext_modules=cpu_extensions() + cuda_extensions(),
    cmdclass={"build_ext": OptionalBuild},
    zip_safe=False,
)
