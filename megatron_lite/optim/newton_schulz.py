"""Orthogonalisation by Newton-Schulz: the nearest matrix with singular values near 1.

For M = U S V^T the iteration gives U S' V^T: it acts on each singular value by an odd
polynomial, needs products only, and commutes with transposition. Muon (Jordan et al.) uses
it on the momentum of a matrix. fp64 input is iterated in fp64; everything else in bf16 on
CUDA and in fp32 on the CPU, or in fp32 everywhere at precision `high`. Whoever holds the
same matrix obtains the same result: nothing here depends on a layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.config.muon_coefficients import Step

EPS = 1e-7  # smallest norm that is divided by: a zero matrix stays zero


def iteration_dtype(matrix: Tensor, precision: str) -> torch.dtype:
    """In what a matrix is iterated: fp64, or by device and `--muon-fp32-matmul-prec`."""
    if matrix.dtype == torch.float64:
        return torch.float64
    if matrix.device.type == "cuda" and precision != "high":
        return torch.bfloat16
    return torch.float32


def orthogonalize(matrices: Tensor, steps: Sequence[Step], precision: str = "medium") -> Tensor:
    """Orthogonalise each matrix of a batch.

    With m <= n the sides of a matrix, a step costs 4 m^2 n + 2 m^3 FLOPs (X X^T, A A and
    B X): 30 m^3 for five steps on a square matrix, as much as 5 m tokens cost in it forward
    and backward (6 m^2 each). A global batch of t tokens pays for it with 5 m / t.

    Args:
        matrices: [..., rows, columns], fp64 or fp32; not changed.
        steps: (a, b, c) of each iteration.
        precision: "high" iterates in fp32 on CUDA too.

    Returns:
        The same shape and dtype. A zero matrix stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The Frobenius norm bounds the largest singular value: the iteration starts within 1.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(EPS)
    x = x.to(iteration_dtype(matrices, precision))
    for a, b, c in steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.to(matrices.dtype)
    return x.mT.contiguous() if tall else x


def orthogonalize_all(
    matrices: Sequence[Tensor], steps: Sequence[Step], precision: str = "medium"
) -> list[Tensor]:
    """Orthogonalise many matrices, those of one shape in one batch.

    Args:
        matrices: [rows, columns] each, on one device.
        steps: (a, b, c) of each iteration.
        precision: see `orthogonalize`.

    Returns:
        The results in order.
    """
    results: list[Tensor] = list(matrices)
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    for indices in by_shape.values():
        batch = orthogonalize(torch.stack([matrices[i] for i in indices]), steps, precision)
        for index, result in zip(indices, batch, strict=True):
            results[index] = result
    return results


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """Factor of an orthogonalised update of a [rows, columns] matrix, by its logical shape.

    spectral: sqrt(max), an update of RMS about 1 (arXiv 2502.16982); unit_rms_norm:
    sqrt(rows / columns), the RMS of the output changes equally (Bernstein); shape_scaling:
    sqrt(max(1, rows / columns)) (Jordan).
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / columns)
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    raise ValueError(f"scale mode {mode!r}")
