"""Muon (Jordan et al. 2024): momentum, orthogonalised per logical matrix.

m <- momentum m + (1 - momentum) g; the update is s U V^T of m (with Nesterov, of
momentum m + (1 - momentum) g), its singular values brought near 1 by Newton-Schulz, its
scale s by the sides of the matrix; decay is decoupled. The momentum is elementwise, so it
lives where the gradient does; the matrix is whole only while it is orthogonalised
(`whole_matrices.py`). Invariant: what is orthogonalised is the logical matrix, q, k, v,
gate and up each, so the update is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.muon_coefficients import Step, coefficient_steps
from megatron_lite.config.schema import Config
from megatron_lite.optim.newton_schulz import iteration_dtype, orthogonalize_all, scale_factor


@dataclass(frozen=True)
class Muon:
    """Hyper-parameters of Muon."""

    momentum: float
    nesterov: bool
    steps: tuple[Step, ...]
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    precision: str = "medium"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The momentum; SGD's, which is a sum, has another name."""
        return ("muon_momentum",)

    def directions(self, gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> list[Tensor]:
        """Update the momenta in place; return what is to be orthogonalised.

        Args:
            gradients: any shapes, master dtype, clipped.
            momenta: the same shapes.
        """
        torch._foreach_lerp_(list(momenta), list(gradients), 1.0 - self.momentum)
        if not self.nesterov:
            return list(momenta)
        return list(torch._foreach_lerp(list(gradients), list(momenta), self.momentum))

    def message_dtype(self, momentum: Tensor) -> torch.dtype:
        """In what directions are gathered: no more bits than the iteration keeps."""
        return iteration_dtype(momentum, self.precision)

    def updates(self, directions: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Orthogonalise and scale whole matrices.

        Args:
            directions: [rows, columns] each.
            dtype: of the weights.
        """
        # Widened first: a norm is no sum to be formed in bf16.
        results = orthogonalize_all([d.to(dtype) for d in directions], self.steps, self.precision)
        return [matrix * self._scale(*matrix.shape) for matrix in results]

    def _scale(self, rows: int, columns: int) -> float:
        return scale_factor(rows, columns, self.scale_mode) * self.extra_scale


def build_muon(config: Config) -> Muon:
    """Muon as the flags describe it."""
    return Muon(
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        steps=coefficient_steps(config.muon_coefficient_type, config.muon_num_ns_steps),
        scale_mode=config.muon_scale_mode,
        extra_scale=config.muon_extra_scale_factor,
        precision=config.muon_fp32_matmul_prec,
    )
