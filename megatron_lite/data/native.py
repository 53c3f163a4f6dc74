"""Choose between the C++ index loops and their numpy twins.

Both give the same arrays (tested on random corpora); the twins are there for machines
without a compiler, with one warning, and `--require-native` turns that into an error.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data import blend, sample_index
from megatron_lite.errors import UserError

NATIVE_MODULE = "megatron_lite.data._index"


@dataclass(frozen=True)
class IndexBackend:
    """The loops over documents and samples."""

    name: str  # "native" | "numpy"
    build_sample_index: sample_index.SampleIndexBuilder
    blend_starts: Callable[..., NDArray[np.int64]]
    blend_block: Callable[..., tuple[NDArray[np.int16], NDArray[np.int64]]]


NUMPY_BACKEND = IndexBackend(
    "numpy", sample_index.build_sample_index, blend.blend_starts, blend.blend_block
)


def load_backend(require_native: bool, announce: Callable[[str], None]) -> IndexBackend:
    """Return the native loops, or the twins after one announcement.

    Args:
        require_native: refuse instead of falling back.
        announce: where the warning goes.

    Raises:
        UserError: `require_native` and no extension.
    """
    try:
        native: Any = importlib.import_module(NATIVE_MODULE)
    except ImportError as error:
        if require_native:
            raise UserError(
                f"--require-native: the index extension is not built ({error}); "
                f"run `pip install -e .` with a C++ compiler"
            ) from None
        announce("warning: the C++ index extension is not built; using the slower numpy loops")
        return NUMPY_BACKEND
    return IndexBackend(
        "native", native.build_sample_index, native.blend_starts, native.blend_block
    )
