"""Find, build where needed, and load the native library.

Loading only adds implementations: operations, their reference in plain torch and their rules
for autograd and fake tensors are registered by `megatron_lite/ops/` and exist without it. So
a machine without a compiler trains with the references, after one warning;
MLITE_REQUIRE_NATIVE=1 (or `--require-native`) makes that an error.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_lite.errors import UserError
from megatron_lite.native import build, sources

LEVELS = ("base", "avx2", "avx512", "bf16", "amx")  # as in csrc/cpu/isa.cpp


@dataclass(frozen=True)
class Native:
    """What was loaded.

    Attributes:
        library: path of the shared object, None where the references run.
        cuda: it holds CUDA kernels.
        reason: why there is none.
    """

    library: Path | None
    cuda: bool = False
    reason: str = ""

    def serves(self, device: torch.device | str) -> bool:
        """Whether operations on this device have a native implementation."""
        if self.library is None:
            return False
        return self.cuda or torch.device(device).type == "cpu"


def _find() -> Native:
    root = sources.source_root()
    if root is None:
        library = Path(__file__).parent / build.LIBRARY
        if library.is_file():
            return Native(library, (library.parent / build.CUDA_MARK).is_file())
        return Native(None, reason="the package was installed without native library and sources")
    cuda = build.wants_cuda()
    try:
        return Native(build.build_library(root, cuda), cuda)
    except (build.BuildError, OSError) as error:  # also a full or read-only disk
        return Native(None, reason=str(error))


def _check_level() -> None:
    """The library itself would take a misspelt level for none."""
    wanted = os.environ.get("MLITE_CPU_ISA", "")
    if wanted and wanted not in LEVELS:
        raise UserError(f"MLITE_CPU_ISA={wanted}: legal are {', '.join(LEVELS)}")


@functools.cache
def load_native() -> Native:
    """Load the native library once per process; says why where there is none.

    Raises:
        UserError: MLITE_CPU_ISA is none of LEVELS.
    """
    _check_level()
    native = _find()
    if native.library is None:
        return native
    try:
        torch.ops.load_library(str(native.library))
    except OSError as error:
        return Native(None, reason=f"{native.library}: {error}")
    return native


def require_native(native: Native, device: torch.device | str, wanted_by_user: bool) -> str:
    """Refuse or tell that the references run where native operations are missing.

    Args:
        native: what was loaded.
        device: where operations will run.
        wanted_by_user: `--require-native`; the environment's MLITE_REQUIRE_NATIVE counts too.

    Returns:
        The one warning to print, "" where nothing is missing.

    Raises:
        UserError: they are required.
    """
    if native.serves(device):
        return ""
    reason = native.reason or f"the library was built without kernels for {device}"
    if wanted_by_user or os.environ.get("MLITE_REQUIRE_NATIVE", "0") not in ("", "0"):
        raise UserError(f"native operations are required but missing: {reason}")
    return f"native operations are not available, plain torch runs instead: {reason}"
