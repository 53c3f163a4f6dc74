"""Count the matrix-product FLOPs that a rank executes, in the planner's convention.

torch's counter does not know the in-place products that accumulate weight gradients, nor
fused attention, torch's or ours. Attention counts here as its two products of the full square
forward and four backward, whatever the kernel skips or computes again, which is what
`telemetry.flops.count_rank_gemm_flops` says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import megatron_lite.ops.attention
import megatron_lite.ops.matrix  # noqa: F401  defines the operations named below


def build_flop_counter() -> FlopCounterMode:
    """A counting mode that covers every product of the model on the CPU."""
    aten, ours = torch.ops.aten, torch.ops.megatron_lite
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten.addmm_: _accumulated_product,
            aten._scaled_dot_product_flash_attention_for_cpu: _torch_attention_forward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _torch_attention_backward,
            ours.accumulate_product: _accumulated_transposed,
            ours.attention_forward: _attention_forward,
            ours.attention_backward: _attention_backward,
            aten._grouped_mm: grouped_product,
        },
    )


def grouped_product(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of rows [t, in] times the matrix [in, out] of each row's expert."""
    return 2 * x[0] * weight[-2] * weight[-1]


def _accumulated_product(into: Any, a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def _accumulated_transposed(
    into: Any, a: Sequence[int], b: Sequence[int], *_: Any, **__: Any
) -> int:
    return 2 * a[0] * a[1] * b[1]


def _torch_attention_forward(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    b, n, s_q, d = q
    return 4 * b * n * s_q * k[2] * d


def _torch_attention_backward(
    grad: Any, q: Sequence[int], k: Sequence[int], *_: Any, **__: Any
) -> int:
    return 2 * _torch_attention_forward(q, k)


def _attention_forward(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    s_q, b, n, d = q
    return 2 * b * n * s_q * k[0] * (d + v[3])


def _attention_backward(
    grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    return 2 * _attention_forward(q, k, v)
