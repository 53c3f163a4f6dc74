"""Products accumulated straight into the main gradient: main += a^T b.

The weight gradient of a linear, main [out, in] fp32 += grad [t, out]^T x [t, in] in bf16. Plain
torch needs a bf16 product, a bf16 temporary rounded once more, and an fp32 sum of it; the native
operation keeps fp32 from the products on (2 t m n FLOPs, main read and written once per 512 of
t). Operands in main's own dtype go to torch's addmm, which does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.ops.registration import define_operation


def _reference(main: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == main.dtype:
        main.addmm_(a.t(), b)
    else:
        main.add_(a.t() @ b)


def _fake(main: Tensor, a: Tensor, b: Tensor) -> None:
    if main.shape != (a.shape[1], b.shape[1]) or a.shape[0] != b.shape[0]:
        raise RuntimeError(f"shapes do not match: {main.shape}, {a.shape}, {b.shape}")


_accumulate = define_operation(
    "accumulate_product(Tensor(a!) main, Tensor a, Tensor b) -> ()", _reference, _fake
)


def accumulate_product(main: Tensor, a: Tensor, b: Tensor, native: bool) -> None:
    """Add a^T b to main.

    Args:
        main: [m, n], fp32 (fp64 of fp64), any row stride; changed in place.
        a: [t, m], any row stride.
        b: [t, n], same dtype as a, any row stride.
        native: the native operation may be used.
    """
    if native and main.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        _accumulate(main, a, b)
    else:
        _reference(main, a, b)
